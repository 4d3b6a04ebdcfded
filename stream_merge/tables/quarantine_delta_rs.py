"""The quarantine's append by delta-rs: a bad event in a small batch costs hundredths of a second, not a Spark job."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.model import names, source_batch
from stream_merge.model.snapshot import is_applied
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes.arrow_text import is_legible
from stream_merge.spark.versions import arrow_type
from stream_merge.tables import quarantine
from stream_merge.tables.delta_rs.append import append_once
from stream_merge.tables.delta_rs.eligibility import of_table
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.side_commits import SideCommit


def write(
    invalid: pa.Table,
    table: TableRef,
    find: Callable[[], NativeTable | None],
    *,
    query: str,
    recorded_micros: int,
    commit: SideCommit,
) -> bool:
    """Append the invalid events of a batch, once per batch; False where delta-rs must not, and nothing was written.

    Args:
        invalid: reasons, event, why it could not be read and origin, as `contract.judged` names them.
        table: catalog name or path.
        find: the table up to date, or None where it is not there.
        query: label of the query, kept with each event.
        recorded_micros: time of the call, microseconds since the epoch.
        commit: application id of the quarantine role, batch id, the sink's retry policy.
    """
    found = find()
    if found is None or not is_legible(invalid):
        return False
    if is_applied(found.transaction, commit.app_id, commit.batch_id):
        return False  # what is missing of it is for Spark to find out
    snapshot = found.snapshot()
    wanted = [(f.name, f.dataType) for f in quarantine.SCHEMA.fields]
    if [(f.name, f.dataType) for f in snapshot.schema.fields] != wanted or of_table(found, snapshot, "the quarantine"):
        return False
    rows = _rows(invalid, query, commit.batch_id, recorded_micros)
    append_once(rows, table, find, commit, at_hand=found)
    return True


def _rows(invalid: pa.Table, query: str, batch_id: int, recorded_micros: int) -> pa.Table:
    count = invalid.num_rows
    origin = invalid[names.ORIGIN_COLUMN]
    known = {name: pc.struct_field(origin, name) for name in source_batch.ORIGIN_TYPE.names}
    known |= {
        "reasons": invalid[names.REASONS_COLUMN],
        "query": pa.array([query] * count),
        "batch_id": pa.array([batch_id] * count),
        "recorded_at": pa.array([recorded_micros] * count, pa.timestamp("us", tz="UTC")),
        "event": invalid[names.EVENT_COLUMN],
        "error": invalid[names.CORRUPT_COLUMN],
    }
    schema = pa.schema([(f.name, arrow_type(f.dataType)) for f in quarantine.SCHEMA.fields])
    filled = [known.get(field.name, pa.nulls(count, field.type)).cast(field.type) for field in schema]
    return pa.table(filled, schema=schema)
