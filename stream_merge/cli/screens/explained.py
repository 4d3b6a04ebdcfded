"""How `stream-merge explain` shows what a table's log tells."""

from __future__ import annotations

from rich.console import Console

from stream_merge.jobs.watch.screen import escape
from stream_merge.model.logs import counted
from stream_merge.tables.explain import Explained, MergedVersion


def show(explained: Explained, target: str, *, console: Console) -> None:
    """Print the table's state, each merge in a line, newest first, with its reason below, and advice."""
    megabytes = explained.bytes / 1e6
    console.print(
        f"{escape(target)}: version {explained.version:,}, {counted(explained.files, 'file')}, {megabytes:,.1f} MB,"
        f" keys {escape(explained.keys or 'not recorded')}{_as(explained.shape)}",
        highlight=False,
        soft_wrap=True,
    )
    may = "may merge into this table" if explained.driver is None else f"must not merge into it: {explained.driver}"
    console.print(f"driver: {escape(may)}", highlight=False, soft_wrap=True)
    for merge in explained.merges:
        console.print(escape(_lines(merge)), highlight=False, soft_wrap=True)
    looked_at = len(explained.merges) + explained.others
    console.print(
        f"a sink merged {len(explained.merges):,} of the newest {counted(looked_at, 'version')}", highlight=False
    )
    for sentence in explained.advice:
        console.print(escape(f"advice: {sentence}"), highlight=False, soft_wrap=True)


def _as(shape: str | None) -> str:
    return "" if shape is None else f", filled as {shape}"


def _lines(merge: MergedVersion) -> str:
    """What one merge did, and why so; as text, which no screen is too narrow for."""
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
