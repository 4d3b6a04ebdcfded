"""A small real table as a sink leaves it: batches of two engines, a lost commit, compaction, a quarantine beside it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

RECEIVED, QUARANTINED, COLLAPSED, STALE = 10, 2, 1, 1
"""Events of each batch, beside those that change a row."""


def made(folder: Path, batches: int = 4) -> Path:
    """Write the table.

    Args:
        folder: gets the table and its quarantine.
        batches: each inserts five rows and updates one of the batch before; the second lost a commit.
    """
    table = folder / "orders"
    write_deltalake(str(table), _rows([]))
    for batch in range(batches):
        _merge(table, batch)
    write_deltalake(str(table), _rows([1_000_000]), mode="append")
    DeltaTable(str(table)).optimize.compact()
    events = {"reasons": [["null_key"], ["null_key", "undecodable"]], "recorded_at": [datetime.now(UTC)] * 2}
    write_deltalake(str(folder / "__stream_merge_quarantine_orders"), pa.table(events))
    return table


def _rows(ids: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "name": pa.array([f"row {one}" for one in ids], pa.string())})


def _merge(table: Path, batch: int) -> None:
    ours: dict[str, Any] = {
        "identity": "q",
        "batch_id": batch,
        "role": "target",
        "engine": "driver" if batch else "spark",
        "plan": "",
        "events": {"received": RECEIVED, "quarantined": QUARANTINED, "collapsed": COLLAPSED, "stale": STALE},
        "seconds": {"read": 0.25, "prepare": 0.5},
        "attempt": 2 if batch == 1 else 1,
        "conflicts": {"ConcurrentAppendException": 1} if batch == 1 else {},
    }
    metadata = {"userMetadata": json.dumps({"stream_merge": ours, "user": None})}
    first = 5 * batch
    source = _rows([*range(first, first + 5), *([first - 1] if batch else [])])
    merger = DeltaTable(str(table)).merge(
        source, "t.id = s.id", "s", "t", commit_properties=CommitProperties(custom_metadata=metadata)
    )
    merger.when_matched_update_all().when_not_matched_insert_all().execute()
