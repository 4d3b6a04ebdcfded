"""Where a target's deletes are remembered, whatever the target is called.

The log lies beside the target, under a name made of the target's. A table has more names than one: it is renamed, or
named by its path here and by a catalog there. So the target says by a property where its log is.
"""

from __future__ import annotations

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError, StreamMergeError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.errors import reason
from stream_merge.tables import spark_table
from stream_merge.tables.reader import Store
from stream_merge.tables.tombstones.rules import log_of

_BESIDE = "./"
"""Begins the place of a log that lies in the folder of its target, which may be moved with it, or copied."""


def expect_here(session: SparkSession, spec: MergeSpec, store: Store, found: TableSnapshot) -> None:
    """Stop where the deletes of a target are remembered under another of its names: an older event would win over them.

    Cost: nothing where the target is called as ever; else a look at two logs.

    Raises:
        ConfigError: naming both places, or that the other one cannot be seen.
    """
    then = found.properties.get(names.TOMBSTONES_PROPERTY)
    if not spec.tombstones or then is None or then == _own(session, spec, store):
        return
    if log_of(found.table_id, store.find(session, spec.tombstone_target)) is not None:
        return
    there, unseen = TableRef(_resolved(then, found)), ""
    try:
        if log_of(found.table_id, spark_table.find(session, there)) is None:
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


def of_table(session: SparkSession, target: TableRef, found: TableSnapshot) -> TableRef:
    """Where the deletes of a table are remembered, whatever it is called here; beside it where none are known.

    Cost: nothing where the table does not say so; else a look at a log.
    """
    beside, then = target.tombstones, found.properties.get(names.TOMBSTONES_PROPERTY)
    if then is None:
        return beside
    there = TableRef(_resolved(then, found))
    try:
        log = log_of(found.table_id, spark_table.find(session, there))
    except (StreamMergeError, Py4JJavaError):
        return beside
    return beside if log is None else there  # a clone says where its source's are


def recorded(
    session: SparkSession,
    spec: MergeSpec,
    store: Store,
    found: TableSnapshot | None,
    *,
    deletes: bool,
    is_prepared: bool,
) -> dict[str, str]:
    """What a target is to say of its log, as a property.

    A table that the sink makes, or prepares, says it from the beginning; any other from the first batch with deletes
    on: nobody needs the right to alter it before. Two streams may call a table by two names as long as there is no
    delete, and neither takes back what the other says.

    Requires: `expect_here`, of a table that is there.

    Cost: as of that.

    Args:
        session: the sink's own.
        spec: what the sink was told.
        store: of its tables.
        found: the target; None while there is none.
        deletes: whether the batch has some.
        is_prepared: whether it has all else that a sink needs on it.
    """
    if not spec.tombstones:
        return {}
    own = _own(session, spec, store)
    then = None if found is None else found.properties.get(names.TOMBSTONES_PROPERTY)
    if found is None or then == own:
        return {names.TOMBSTONES_PROPERTY: own}
    if then is None:
        return {names.TOMBSTONES_PROPERTY: own} if deletes or not is_prepared else {}
    begins = deletes and log_of(found.table_id, store.find(session, spec.tombstone_target)) is None
    return {names.TOMBSTONES_PROPERTY: own} if begins else {}  # else one log of two names, or nothing to remember yet


def _own(session: SparkSession, spec: MergeSpec, store: Store) -> str:
    """Where a sink looks for the log, as the property says it."""
    log = spec.tombstone_target
    if log.path is None:
        return store.full_name(session, log).lower()
    place = TableRef(log).canonical
    is_beside = _parent(place) == _parent(TableRef(spec.target).canonical)  # not so where the target is a symbolic link
    return f"{_BESIDE}{log.last}" if is_beside else place


def _resolved(place: str, found: TableSnapshot) -> str:
    """A table by what the property of its target says."""
    return f"{_parent(TableRef(found.location).canonical)}/{place[2:]}" if place.startswith(_BESIDE) else place


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
