"""How `stream-merge history` shows which version holds which offsets."""

from __future__ import annotations

from rich.console import Console

from stream_merge.jobs.kafka.batch_offsets import Ranges
from stream_merge.jobs.kafka.history import Step
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.watch.screen import escape_line, whole_table
from stream_merge.model.logs import counted


def show(steps: list[Step], query: QuerySettings, *, console: Console) -> None:
    """Print a line per version, oldest first, and the sums."""
    table = whole_table("version", "committed (UTC)", "batch", "offsets", "records")
    for step in steps:
        table.add_row(
            "tail" if step.version is None else f"{step.version}",
            "" if step.at is None else f"{step.at:%Y-%m-%d %H:%M:%S}",
            "" if step.batch_id is None else f"{step.batch_id}",
            _offsets(step),
            escape_line(", ".join(f"{number:,} {kind}" for kind, number in sorted(step.records.items()) if number)),
        )
    console.print(f"{escape_line(query.name)}: {escape_line(query.target)}", highlight=False, soft_wrap=True)
    console.print(table)
    accounted, lost = sum(step.offsets for step in steps), sum(step.lost for step in steps)
    gone = f", {lost:,} of them lost" if lost else ""
    console.print(f"{counted(accounted, 'offset')} in all{gone}", highlight=False)


def _offsets(step: Step) -> str:
    if step.replayed is not None:
        return f"(replay of {step.replayed:,} from quarantine)"
    if step.version is not None and step.batch_id is None:
        # Another writer's, or the sink's own: ALTER TABLE and maintenance by Spark leave nothing that tells them apart.
        return "(maintenance)" if step.is_maintenance else "(no offsets)"
    text = _ranges(step.ranges)
    if step.is_first:
        text += " (first of its query)"
    if step.uncounted:
        text += (
            f" (the first {step.uncounted:,} before a restart, without a change: their records are not counted here)"
        )
    if step.version is None:
        text += " (not committed: no change yet, or still to come)"
    return escape_line(text)


def _ranges(ranges: Ranges) -> str:
    return ", ".join(
        f"{topic}[{partition}] {found.start}-{found.end - 1}"
        for topic, partitions in sorted(ranges.items())
        for partition, found in sorted(partitions.items())
        if len(found)
    )
