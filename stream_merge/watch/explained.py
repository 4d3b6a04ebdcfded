"""How `stream-merge explain` shows what a table's log tells."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stream_merge.explain import Explained, MergedVersion


def show(explained: Explained, target: str, *, console: Console) -> None:
    """Print the table's state, then a line per merge and its reason below."""
    megabytes = explained.bytes / 1e6
    console.print(
        f"{escape(target)}: version {explained.version:,}, {explained.files:,} files, {megabytes:,.1f} MB, keys"
        f" {escape(explained.keys or 'not recorded')}",
        highlight=False,
        soft_wrap=True,
    )
    may = "may write this table" if explained.native is None else f"must not write it: {explained.native}"
    console.print(f"native engine: {escape(may)}", highlight=False, soft_wrap=True)
    if explained.merges:
        console.print(_table(explained.merges))
    looked_at = len(explained.merges) + explained.others
    console.print(f"{len(explained.merges)} of the newest {looked_at} versions were merged by a sink", highlight=False)


def _table(merges: tuple[MergedVersion, ...]) -> Table:
    table = Table("version", "committed (UTC)", "batch", "engine", "ins.", "upd.", "del.", "files +/-", "secs.", "why")
    for merge in merges:
        counts = merge.metrics
        batch = f"{merge.batch_id}" if merge.role == "target" else f"{merge.batch_id} ({merge.role})"
        table.add_row(
            f"{merge.version}",
            "" if merge.at is None else f"{merge.at:%Y-%m-%d %H:%M:%S}",
            batch,
            merge.engine,
            *(_number(counts.get(f"numTargetRows{what}")) for what in ("Inserted", "Updated", "Deleted")),
            f"{_number(counts.get('numTargetFilesAdded'))}/{_number(counts.get('numTargetFilesRemoved'))}",
            "" if merge.seconds is None else f"{merge.seconds:.2f}",
            escape(merge.plan),
        )
    return table


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"
