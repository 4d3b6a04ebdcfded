"""Output of `stream-merge history` and `stream-merge explain`: the versions of a table."""

from __future__ import annotations

from rich.console import Console

from stream_merge.jobs.kafka.batch_offsets import Ranges
from stream_merge.jobs.kafka.history import Step
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.watch.screen import escape, escape_line, whole_table
from stream_merge.model.logs import counted
from stream_merge.tables.explain import Explained, MergedVersion


def show_history(steps: list[Step], query: QuerySettings, *, console: Console) -> None:
    """Print the offsets of each version, oldest first, and the sums."""
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
        # Another writer's or the sink's own: ALTER TABLE and maintenance by Spark look alike.
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
        f"{topic}[{partition}] {offsets.start}-{offsets.end - 1}"
        for topic, partitions in sorted(ranges.items())
        for partition, offsets in sorted(partitions.items())
        if len(offsets)
    )


def show_explained(explained: Explained, target: str, *, console: Console) -> None:
    """Print the table's state, each merge with its reason, newest first, and advice."""
    shape = "" if explained.shape is None else f", filled as {explained.shape}"
    megabytes = explained.bytes / 1e6
    console.print(
        f"{escape(target)}: version {explained.version:,}, {counted(explained.files, 'file')}, {megabytes:,.1f} MB,"
        f" keys {escape(explained.keys or 'not recorded')}{shape}",
        highlight=False,
        soft_wrap=True,
    )
    may = "may merge into this table" if explained.driver is None else f"must not merge into it: {explained.driver}"
    console.print(f"driver: {escape(may)}", highlight=False, soft_wrap=True)
    for merge in explained.merges:
        console.print(escape(_lines(merge)), highlight=False, soft_wrap=True)
    read = len(explained.merges) + explained.others
    console.print(f"a sink merged {len(explained.merges):,} of the newest {counted(read, 'version')}", highlight=False)
    for sentence in explained.advice:
        console.print(escape(f"advice: {sentence}"), highlight=False, soft_wrap=True)


def _lines(merge: MergedVersion) -> str:
    """What a merge did, and why."""
    counts = merge.metrics
    rows = (counts.get(f"numTargetRows{what}") for what in ("Inserted", "Updated", "Deleted"))
    did = ", ".join(
        f"{_number(count)} {what}" for count, what in zip(rows, ("inserted", "updated", "deleted"), strict=True)
    )
    files = f"files +{_number(counts.get('numTargetFilesAdded'))} -{_number(counts.get('numTargetFilesRemoved'))}"
    at = "" if merge.at is None else f" {merge.at:%Y-%m-%d %H:%M:%S} UTC,"
    batch = f"{merge.batch_id}" if merge.role == "target" else f"{merge.batch_id} ({merge.role})"
    took = "" if merge.seconds is None else f", {merge.seconds:.2f} s"
    return f"version {merge.version}:{at} batch {batch}, {merge.engine}, {did}, {files}{took}\n    {merge.plan}"


def _number(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"
