"""Location of a target's tombstones, whatever the target is called.

They are beside the target, under a name made of the target's. A table has more names than one: it is renamed, or named
by its path here and by a catalog there. So the target has a property that says where its tombstones are.
"""

from __future__ import annotations

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.errors import ConfigError, StreamMergeError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import columns
from stream_merge.spark.errors import reason
from stream_merge.tables import spark_table
from stream_merge.tables.side.tombstones import own_log
from stream_merge.tables.table import Tables

_BESIDE = "./"
"""Prefix of a location in the folder of the target, which may be moved or copied with it."""


def expect_here(session: SparkSession, spec: MergeSpec, tables: Tables, target: TableSnapshot) -> None:
    """Stop where a target's deletes are recorded under another of its names: an older event would win over them."""
    then = target.properties.get(names.TOMBSTONES_PROPERTY)
    if not spec.tombstones or then is None or then == _own(spec, tables):
        return
    if own_log(target.table_id, tables.tombstones.snapshot()) is not None:
        return
    there, unseen = _resolved(then, target), ""
    try:
        if own_log(target.table_id, spark_table.find(session, there)) is None:
            return  # no delete yet, or they were dropped; a clone has none of its source's
    except (StreamMergeError, Py4JJavaError) as err:
        unseen = f" (which cannot be read: {reason(err)})"
    forget = f"ALTER TABLE {spec.target.sql} UNSET TBLPROPERTIES ('{names.TOMBSTONES_PROPERTY}')"
    msg = (
        f"[TOMBSTONES_ELSEWHERE] the tombstones of target {spec.target!r} are in {there!r}{unseen}, not in"
        f" {spec.tombstone_target!r}; use the target's previous name, rename the tombstone table, or forget its"
        f" deletes: {forget}"
    )
    raise ConfigError(msg, target=spec.target)


def locate(session: SparkSession, target: TableRef, snapshot: TableSnapshot) -> TableRef:
    """The tombstones' table of a target, whatever the target is called here; beside it where none is known."""
    then = snapshot.properties.get(names.TOMBSTONES_PROPERTY)
    if then is not None:
        there = _resolved(then, snapshot)
        try:
            if own_log(snapshot.table_id, spark_table.find(session, there)) is not None:
                return there  # a clone says where its source's are
        except (StreamMergeError, Py4JJavaError):
            pass
    return target.tombstones


def recorded(
    spec: MergeSpec, tables: Tables, target: TableSnapshot | None, *, deletes: bool, is_prepared: bool
) -> dict[str, str]:
    """The property by which a target says where its tombstones are.

    A table that the sink creates or prepares says it from the beginning; any other from the first batch with deletes
    on: nobody needs the right to alter it before. Two streams may call a table by two names as long as there is no
    delete, and neither takes back what the other says.

    Requires: `expect_here`, of a table that is there.
    """
    if not spec.tombstones:
        return {}
    own = _own(spec, tables)
    then = None if target is None else target.properties.get(names.TOMBSTONES_PROPERTY)
    if target is None or then == own:
        is_said = True
    elif then is None:
        is_said = deletes or not is_prepared
    else:  # one log of two names, or nothing to remember yet
        is_said = deletes and own_log(target.table_id, tables.tombstones.snapshot()) is None
    return {names.TOMBSTONES_PROPERTY: own} if is_said else {}


def deletes(session: SparkSession, target: TableRef, *, retention_seconds: float | None) -> DataFrame | None:
    """The tombstones of a target that still count, overtaken ones included; None if there are none."""
    name = target.tombstones
    snapshot = spark_table.find(session, target)
    if snapshot is None or own_log(snapshot.table_id, spark_table.find(session, name)) is None:
        return None
    entries = spark_table.rows(session, name)
    if retention_seconds is None:
        return entries
    recorded_at = columns.column(names.RECORDED_AT_COLUMN)
    return entries.where(~columns.is_older(recorded_at, retention_seconds, now=F.current_timestamp()))


def _own(spec: MergeSpec, tables: Tables) -> str:
    """The location where a sink expects the tombstones, as the property has it."""
    name = spec.tombstone_target
    if name.path is None:
        return tables.tombstones.full_name.lower()
    location = name.canonical
    is_beside = _parent(location) == _parent(spec.target.canonical)  # not so where the target is a symbolic link
    return f"{_BESIDE}{name.last}" if is_beside else location


def _resolved(location: str, target: TableSnapshot) -> TableRef:
    """The table that the target's property names."""
    return TableRef(
        f"{_parent(TableRef(target.location).canonical)}/{location[2:]}" if location.startswith(_BESIDE) else location
    )


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
