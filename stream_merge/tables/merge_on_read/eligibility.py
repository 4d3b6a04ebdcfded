"""Whether a batch may be merged on read: only where it is proven. Read from log, footers and batch, never tried out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model import locations
from stream_merge.model.snapshot import TableSnapshot, name_in_files
from stream_merge.shapes.arrow_text import is_legible
from stream_merge.shapes.clauses import Always, Clause, Delete, DeleteMissing, Insert, Update
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.merge_on_read import features, partitions
from stream_merge.tables.merge_on_read.find import odd_names
from stream_merge.tables.merge_on_read.footers import GLOB
from stream_merge.tables.merge_on_read.table import Touched
from stream_merge.tables.whitelist import (
    ENFORCED_BY_SPARK,
    EVERYWHERE,
    IN_FILES,
    Ineligible,
    Place,
    Whitelist,
    columns_of,
    keys_of,
    of_mapping,
    of_shape,
    of_structs,
    recorded_columns,
    with_inner,
)

PROVEN: Mapping[type[DataType], frozenset[Place]] = {
    BooleanType: EVERYWHERE,
    ByteType: EVERYWHERE,
    ShortType: EVERYWHERE,
    IntegerType: EVERYWHERE,
    LongType: EVERYWHERE,
    DateType: EVERYWHERE,
    StringType: EVERYWHERE,
    DecimalType: IN_FILES,
    TimestampType: IN_FILES,
    TimestampNTZType: IN_FILES,
    BinaryType: IN_FILES,
    # Spark joins -0.0 with 0.0 and NaN with NaN.
    FloatType: frozenset({"payload", "nested", "carried"}),
    DoubleType: frozenset({"payload", "nested", "carried"}),
    ArrayType: frozenset({"payload", "nested", "carried"}),
    StructType: frozenset({"payload", "nested", "carried"}),
    MapType: frozenset({"payload", "nested", "carried"}),
}
"""For which types and where merge-on-read does what Spark would.

What delta-rs' list has as well, tests/contract/test_whitelist.py merges at its edges; comparing and writing of all is
held to Spark by test_conditions_as_spark.py and test_data_file_as_spark.py.
"""
_WHITELIST = Whitelist(engine="merge-on-read", proven=PROVEN)


def of_table(table: NativeTable | None, snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Whether merge-on-read may write this table, by where it lies, its protocol, properties and columns."""
    if table is None:
        return Ineligible(reason="storage", detail=f"{what} is not where the driver may write")
    is_local = locations.local_path(table.location) is not None
    if not (is_local or locations.is_on_s3(table.location) or locations.is_on_azure(table.location)):
        return Ineligible(reason="storage", detail=f"{what} is neither on a local disk nor on S3 nor on Azure")
    odd = GLOB.search(table.location)
    if is_local and odd is not None:
        return Ineligible(
            reason="storage", detail=f"{what} lies in a path with {odd.group()!r}, which stands for any name"
        )
    protocol = table.protocol
    refused = features.refusal(protocol.reader_version, protocol.writer_version, protocol.features, snapshot.properties)
    if refused is not None:
        return Ineligible(reason="table_feature", detail=f"{what}: {refused}")
    return of_mapping(snapshot, what) or _of_fields(snapshot, what)


def of_recorded(snapshot: TableSnapshot) -> Ineligible | None:
    """Whether all columns of a table can be carried and compared, as far as the table itself tells."""
    return _of_columns(recorded_columns(snapshot))


def of_layout(layout: Layout) -> Ineligible | None:
    """Whether the batch's columns can be carried and compared; looked at once per layout."""
    return layout.once("ineligible_on_read", lambda: _of_layout(layout))


def of_keys(layout: Layout) -> Ineligible | None:
    """Whether keys and sequences can be carried and compared, which are all that a tombstone has of an event."""
    return layout.once("ineligible_keys", lambda: _of_columns(keys_of(layout)))


def of_clauses(clauses: Iterable[Clause]) -> Ineligible | None:
    """Whether no clause needs SQL: of rows without an event all are deleted, or none."""
    for clause in clauses:
        is_whole = isinstance(clause, DeleteMissing) and clause.when == Always()
        if not is_whole and not isinstance(clause, Delete | Update | Insert):
            return Ineligible(
                reason="shape", detail="some rows without an event are concerned, by SQL that Spark executes"
            )
    return None


def of_files(touched: Sequence[Touched], what: str) -> Ineligible | None:
    """Whether the files hold the table's columns in a way that is read as Spark reads it."""
    problem = next((one.candidate.footer.problem for one in touched if one.candidate.footer.problem), None)
    return None if problem is None else Ineligible(reason="column", detail=f"{problem} ({what})")


def of_events(events: pa.Table, partition_columns: Sequence[str]) -> Ineligible | None:
    """Whether the very values of a batch can be carried."""
    if not is_legible(events):
        return Ineligible(reason="column", detail="the batch holds text that is not valid UTF-8")
    odd = partitions.holds_odd_text(events, [name for name in partition_columns if name in events.column_names])
    if odd is None:
        return None
    return Ineligible(reason="column", detail=f"partition column {odd!r} holds a text that Spark keeps as NULL")


def _of_layout(layout: Layout) -> Ineligible | None:
    refused = of_shape(layout)
    if refused is None and (layout.new_columns or layout.type_changes):
        changed = [*layout.new_columns, *map(str, layout.type_changes)]
        refused = Ineligible(reason="schema_change", detail=f"column(s) {changed!r} are new or wider")
    return refused or of_structs(layout) or _of_columns(columns_of(layout))


def _of_columns(used: Iterable[tuple[str, DataType, Place]]) -> Ineligible | None:
    for name, dtype, place in used:
        problem = _WHITELIST.problem(dtype, place)
        if problem:
            return Ineligible(reason="column", detail=f"column {name!r} {problem}")
    return None


def _of_fields(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    fields = snapshot.schema.fields
    odd = odd_names([*(field.name for field in fields), *map(name_in_files, fields)])
    if odd:
        return Ineligible(
            reason="column", detail=f"column {odd[0]!r} of {what} has a name that the reader of files uses"
        )
    for field in snapshot.schema.fields:
        for key, meaning in ENFORCED_BY_SPARK.items():
            if any(key in one.metadata for one in with_inner(field)):
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        placed: list[Place] = ["carried", *(("partition",) if field.name in snapshot.partition_columns else ())]
        refused = _of_columns((field.name, field.dataType, place) for place in placed)
        if refused is not None:
            return refused
    return None
