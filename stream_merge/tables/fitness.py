"""Checks that a sink can merge a source into a target, by schemas and properties alone, before any write."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, StructType, TimestampType

from stream_merge.errors import ConfigError
from stream_merge.model import locations, names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import FEED_PROPERTY, VECTORS_PROPERTY, TableSnapshot, is_on
from stream_merge.shapes import finder, shape_of, target_filter, widening
from stream_merge.shapes.base import filled_as
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.layouts import plan_layout
from stream_merge.spark import columns, object_stores, places
from stream_merge.spark.jvm import zones
from stream_merge.spark.log_store import remedy
from stream_merge.spark.versions import SHIFTS_PARTITION_TIMES
from stream_merge.tables import create_table
from stream_merge.tables.files import eligibility


def check_target(session: SparkSession, target: TableSnapshot | None, spec: MergeSpec, layout: Layout) -> None:
    """Refuse a target that the sink cannot merge into, with every problem; writes nothing."""
    problems: list[str] = []
    case_sensitive = layout.case_sensitive
    above = places.table_above(spec.target, target)
    if above is not None:
        problems.append(
            f"[INVALID_TARGET] target {spec.target!r} is located inside the Delta table at {above!r}; use that table,"
            " or a folder outside it"
        )
    if target is None:
        if not spec.create_target:
            problems.append(
                f"[TABLE_NOT_FOUND] target {spec.target!r} does not exist and create is False; create the table,"
                " or remove create=False"
            )
        stored = [c.name for c in layout.stored]
        problems.extend(
            f"[COLUMN_NOT_FOUND] {setting} names column {name!r}, which is not stored; stored columns are {stored!r}"
            for setting, wanted in (("partition_by", spec.partition_by), ("cluster_by", spec.cluster_by))
            for name in wanted
            if columns.resolve(name, stored, case_sensitive=case_sensitive) is None
        )
    else:
        problems.extend(_recorded_problems(target, spec, layout, case_sensitive=case_sensitive))
        if not spec.only_inserts and is_on(target.properties, "delta.appendOnly"):
            problems.append(
                f"[TARGET_IS_APPEND_ONLY] target {spec.target!r} has delta.appendOnly, but a merge updates and deletes;"
                " unset the property"
            )
        refused = eligibility.layout_obstacle(layout) if spec.engine == "driver" else None
        if refused is not None:
            problems.append(
                f"[DRIVER_NOT_POSSIBLE] engine='driver' cannot merge this batch: {refused.detail}; use engine='auto' or"
                " 'spark'"
            )
        if layout.type_changes:
            properties = target.properties
            problems.extend(widening.obstacles(layout.type_changes, target.schema, properties, session))
        problems.extend(_unwritable_problems(spec, layout))
        odd = [name for name in layout.new_columns if names.needs_column_mapping(name)]
        if odd and not target.maps_columns:
            problems.append(
                f"[COLUMN_NOT_WRITABLE] new column(s) {odd!r} need column mapping, which target {spec.target!r} does"
                " not have; set delta.columnMapping.mode='name', or rename them in the stream"
            )
    schema = StructType(list(layout.target_fields)) if target is None else target.schema
    problems.extend(shape_of(spec).misfits(session, layout, schema))
    if spec.target_filter is not None:
        problems.extend(target_filter.misfits(session, spec.target_filter, layout, schema))
    problems.extend(_reserved_by_delta(target, spec, layout))
    problems.extend(_shifted_times(session, target, spec, schema))
    problems.extend(places.permission_problems(spec, target))
    problems.extend(_unpromised_problems(session, spec, target))
    if problems:
        raise ConfigError(problems, target=spec.target)


def expect_fitting(events: DataFrame, spec: MergeSpec, target: TableSnapshot | None) -> None:
    """Check before a query starts what its first batch would be refused for, by columns and types alone."""
    layout = plan_layout(events, spec, None if target is None else target.schema)
    check_target(events.sparkSession, target, spec, layout)


def _reserved_by_delta(target: TableSnapshot | None, spec: MergeSpec, layout: Layout) -> Iterable[str]:
    """Columns of the target, as it is or would be, whose names Delta needs for its own when it reads the table."""
    properties = {**create_table.NEW_TARGETS, **spec.table_properties} if target is None else target.properties
    has_feed = spec.change_data_feed or is_on(properties, FEED_PROPERTY)
    reserved = {
        "the reader": names.SCAN_COLUMNS,
        "deletion vectors": names.VECTOR_SCAN_COLUMNS if is_on(properties, VECTORS_PROPERTY) else (),
        "the change data feed": names.CHANGE_FEED_COLUMNS if has_feed else (),
    }
    table = spec.target.sql
    for what, taken in reserved.items():
        for name in [] if target is None else target.schema.names:
            if name.lower() in taken:
                rename = (
                    f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name');"
                    f" ALTER TABLE {table} RENAME COLUMN {names.quote(name)} TO …"
                )
                yield (
                    f"[RESERVED_COLUMN_NAME] target {spec.target!r} has a column {name!r}, a name that Delta reserves"
                    f" for {what}; rename it there and in the stream: {rename}"
                )
        for field in layout.target_fields:
            if field.name.lower() in taken and (target is None or field.name not in target.schema.names):
                yield (
                    f"[RESERVED_COLUMN_NAME] column {field.name!r} has a name that Delta reserves for {what}; rename it"
                    f" in the stream: withColumnRenamed({field.name!r}, …), or omit it with except_column_list"
                )


def _unwritable_problems(spec: MergeSpec, layout: Layout) -> Iterable[str]:
    """Columns of an existing target that Delta's MERGE cannot write from events (4.4)."""
    table = spec.target.sql
    for stored in layout.stored:
        required = list(_not_null_inside(names.quote(stored.name), stored.dtype))
        if required:
            statements = "; ".join(f"ALTER TABLE {table} ALTER COLUMN {path} DROP NOT NULL" for path in required)
            yield (
                f"[COLUMN_NOT_WRITABLE] column {stored.name!r} of target {spec.target!r} has NOT NULL fields, which"
                f" Delta's MERGE cannot write; allow NULL: {statements}"
            )
        if names.IDENTITY in stored.field.metadata and not (spec.only_inserts or layout.whole):
            yield (
                f"[COLUMN_NOT_WRITABLE] column {stored.name!r} of target {spec.target!r} is an identity column, which"
                " Delta fills itself; omit it with except_column_list"
            )


def _not_null_inside(path: str, dtype: DataType) -> Iterable[str]:
    """Quoted paths of the NOT NULL fields in a column; Delta has none inside arrays and maps."""
    for field in dtype.fields if isinstance(dtype, StructType) else ():
        inner = f"{path}.{names.quote(field.name)}"
        if not field.nullable:
            yield inner
        yield from _not_null_inside(inner, field.dataType)


def _shifted_times(
    session: SparkSession, target: TableSnapshot | None, spec: MergeSpec, schema: StructType
) -> Iterable[str]:
    """Refuse timestamps as partition columns where Delta would shift them."""
    parts = {name.lower() for name in (spec.partition_by if target is None else target.partition_columns)}
    times = [f.name for f in schema.fields if f.name.lower() in parts and isinstance(f.dataType, TimestampType)]
    differ = zones(session) if times and SHIFTS_PARTITION_TIMES else None
    if differ is not None:
        theirs, own = differ
        yield (
            f"[COLUMN_NOT_WRITABLE] target {spec.target!r} is partitioned by {times!r}, whose values Delta shifts"
            f" on Spark 3.5 if spark.sql.session.timeZone ({theirs}) is not the JVM's zone ({own}); set it to {own}, or"
            f" use -Duser.timezone={theirs}"
        )


def _unpromised_problems(session: SparkSession, spec: MergeSpec, target: TableSnapshot | None) -> Iterable[str]:
    """Refuse engine='driver' on an object store where only Spark may write."""
    location = spec.target.plain if target is None and spec.target.path is not None else None
    location = location if target is None else target.location
    if spec.engine != "driver" or spec.single_writer or location is None or locations.local_path(location) is not None:
        return
    if object_stores.excludes_driver(session, location, spec.storage_options):
        return
    log_store = remedy(location) if locations.is_on_s3(location) else None
    yield (
        f"[DRIVER_NOT_POSSIBLE] engine='driver' cannot merge into {spec.target!r}: on this object store commits of"
        " the driver and of Spark do not exclude each other; set single_writer=True if nobody else writes, or"
        " engine='auto'"
        f"{'' if log_store is None else f', or {log_store}'}"
    )


def _recorded_problems(target: TableSnapshot, spec: MergeSpec, layout: Layout, *, case_sensitive: bool) -> list[str]:
    problems: list[str] = []
    version = target.properties.get(names.FORMAT_PROPERTY)
    if version is not None and version != names.FORMAT_VERSION:
        problems.append(
            f"[VERSION_MISMATCH] target {spec.target!r} has format {version!r} of another version of stream_merge, this"
            f" one supports {names.FORMAT_VERSION!r}; upgrade stream_merge"
        )
        return problems
    problem = keys_problem(target, spec.target, layout.keys, case_sensitive=case_sensitive)
    if problem is not None:
        problems.append(problem)
    sequence = target.properties.get(names.SEQUENCE_PROPERTY)
    if sequence is not None and filled_as(sequence) != filled_as(layout.definition):
        was, now = filled_as(sequence), filled_as(layout.definition)
        problems.append(
            f"[DEFINITION_CHANGED] target {spec.target!r} was filled as {was} and would now be as {now}; use the"
            " recorded shape, or another table with its own checkpoint"
        )
    elif sequence is not None and not _same_sequence(sequence, layout.definition, case_sensitive=case_sensitive):
        problems.append(
            f"[DEFINITION_CHANGED] target {spec.target!r} is sequenced by {_definition(sequence)}, now by"
            f" {_definition(layout.definition)}; use the recorded definition, or rebuild the table"
        )
    elif sequence is not None and create_table.lacks_reserved(target, layout):
        problems.append(finder.lacks_reserved(spec.target))
    return problems


def keys_problem(table: TableSnapshot, target: str, keys: Iterable[str], *, case_sensitive: bool) -> str | None:
    """Why these keys do not match the keys recorded in the table; None if they do."""

    def folded(keys: Iterable[str]) -> set[str]:
        return {key if case_sensitive else key.lower() for key in keys}

    recorded = json.loads(table.properties.get(names.KEYS_PROPERTY, "null"))
    if recorded is None or folded(recorded) == folded(keys):
        return None
    return (
        f"[DEFINITION_CHANGED] target {target!r} is merged by keys {recorded!r}, now keys={list(keys)!r}; use the"
        " recorded keys, or rebuild the table"
    )


def _same_sequence(recorded: str, now: str, *, case_sensitive: bool) -> bool:
    old, new = json.loads(recorded), json.loads(now)
    if not case_sensitive and "columns" in old and "columns" in new:
        old, new = [name.lower() for name in old["columns"]], [name.lower() for name in new["columns"]]
    return bool(old == new)


def _definition(recorded: str) -> str:
    loaded = json.loads(recorded)
    return repr(loaded.get("columns", loaded.get("expression")))
