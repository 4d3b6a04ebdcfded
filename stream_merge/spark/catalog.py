"""Catalogs: whether a name is a Delta table, and its location; the table's log is not read.

Calls go through Py4J to classes that are not public API, read and run on Spark 4.2.0 with Delta 4.4.0.
`DeltaTable.forName` would ask the catalog several times, and takes names of up to two parts in Spark's own catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError, MergeFailedError
from stream_merge.model.names import quote
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.errors import java_causes, reason
from stream_merge.spark.jvm import active, java_class, strings
from stream_merge.spark.places import no_table
from stream_merge.spark.versions import TAKES_CATALOGS

SESSION_CATALOG = "spark_catalog"
"""Spark's own, in memory or in a Hive metastore, unless a conf replaces it."""

_MEMORY_CATALOGS = (
    "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "org.apache.spark.sql.execution.datasources.v2.V2SessionCatalog",
)
"""Classes of `SESSION_CATALOG` that store nothing themselves."""
_MANAGED = "catalogManaged"
"""Delta's feature of tables to which their catalog commits."""
_MANAGED_ELSEWHERE = ("DELTA_PATH_BASED_ACCESS_TO_CATALOG_MANAGED_TABLE_BLOCKED", "Couldn't locate commit coordinator")
"""Delta 4.4's error for such a table without its catalog."""
_NO_TABLE = ("NoSuchTableException", "NoSuchDatabaseException", "NoSuchNamespaceException")
_WITH_CATALOG = 2
"""Fewest parts of a name that begins with a catalog."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A Delta table in a catalog."""

    name: str
    """Full name, as SQL."""
    location: str
    """As Hadoop writes it, without escapes."""
    table: Any
    """Delta's own handle (`DeltaTableV2`)."""

    def newest(self) -> Any:
        """Delta's own snapshot, freshly loaded.

        Raises:
            ConfigError: the catalog commits to the table, or its location has no Delta log.
        """
        try:
            loaded = self.table.update()
        except Py4JError as err:
            if is_managed(err):
                raise managed(self.name) from err
            raise
        if _MANAGED in str(loaded.protocol().json()):
            raise managed(self.name)
        if int(loaded.version()) < 0:
            msg = (
                f"[TABLE_NOT_FOUND] the catalog has {self.name} at {self.location!r}, but no Delta table is there;"
                " restore the table, or drop the name"
            )
            raise ConfigError(msg, target=self.name)
        return loaded


def entry(session: SparkSession, name: str) -> Entry | None:
    """The table of a name; None where there is none and one could be created.

    Cost: one call to the catalog, another one where there is nothing.

    Raises:
        ConfigError: the name is not one of a Delta table, or no table can be created under it.
        MergeFailedError: the catalog is unavailable, or denies access.
    """
    with active(session):
        catalog, namespace, table = _resolved(session, name)
        identifier = java_class(session, "org.apache.spark.sql.connector.catalog.Identifier")
        try:
            loaded = catalog.loadTable(identifier.of(_array(session, namespace), table))
        except (PySparkException, Py4JError) as err:
            if not any(class_name.rsplit(".", 1)[-1] in _NO_TABLE for class_name, _ in java_causes(err)):
                raise _refused(name, err) from err
            _expect_namespace(session, catalog, namespace, name)
            return None
        handle = _delta(loaded, name)
        return Entry(name=_sql(catalog, namespace, table), location=str(handle.path().toString()), table=handle)


def managed(target: str) -> ConfigError:
    """The error for a table that a catalog commits to."""
    msg = (
        f"[CATALOG_NOT_SUPPORTED] target {target!r} is managed by its catalog (Delta's feature {_MANAGED}), which the"
        " sink does not support; use an external table"
    )
    return ConfigError(msg, target=target)


def is_managed(err: Exception) -> bool:
    """Whether Delta refuses a table without the catalog that commits to it."""
    return any(sign in message for sign in _MANAGED_ELSEWHERE for _, message in java_causes(err))


def qualified(session: SparkSession, name: str) -> str:
    """A name as Delta takes it: it resolves short ones in Spark's own catalog (4.4)."""
    with active(session):
        catalog, namespace, table = _resolved(session, name)
    return _sql(catalog, namespace, table) if TAKES_CATALOGS else _within(namespace, table)


def full_name(session: SparkSession, name: str) -> str:
    """A name with its catalog and schema, as SQL: the same table in each session that has the catalog."""
    with active(session):
        return _sql(*_resolved(session, name))


def place_to_be(session: SparkSession, name: str) -> str:
    """The location of a table that is created under a name; the full name where its catalog chooses it."""
    with active(session):
        catalog, namespace, table = _resolved(session, name)
        if not _is_sparks_own(catalog):
            return _sql(catalog, namespace, table)
        state = session._jsparkSession.sessionState()
        identifier = state.sqlParser().parseTableIdentifier(_within(namespace, table))
        try:
            path = state.catalog().defaultTablePath(identifier)
        except (PySparkException, Py4JError) as err:
            raise _refused(name, err) from err
        return str(java_class(session, "org.apache.hadoop.fs.Path")(path).toString())


@contextmanager
def created_as(session: SparkSession, name: str) -> Iterator[str]:
    """A name for Delta's table builder, which knows no catalogs (4.4): the name's is the current one in the block."""
    with active(session):
        catalog, namespace, table = _resolved(session, name)
        manager = session._jsparkSession.sessionState().catalogManager()
        before, before_in = str(manager.currentCatalog().name()), manager.currentNamespace()
        wanted = str(catalog.name())
        if wanted != before:
            manager.setCurrentCatalog(wanted)
        try:
            yield _within(namespace, table)
        finally:
            if wanted != before:
                manager.setCurrentCatalog(before)
                manager.setCurrentNamespace(before_in)


def is_forgotten(session: SparkSession, name: TableRef) -> bool:
    """Whether a table of this name is lost when this process ends."""
    if name.path is not None or session.conf.get("spark.sql.catalogImplementation") != "in-memory":
        return False
    with active(session):
        catalog, _, _ = _resolved(session, name)
    return _is_sparks_own(catalog)


def _is_sparks_own(catalog: Any) -> bool:
    return str(catalog.name()) == SESSION_CATALOG and str(catalog.getClass().getName()) in _MEMORY_CATALOGS


def _resolved(session: SparkSession, name: str) -> tuple[Any, Sequence[str], str]:
    """Catalog, namespace and table of a name, as Spark resolves it (`LookupCatalog`, 4.2)."""
    state = session._jsparkSession.sessionState()
    try:
        parsed = state.sqlParser().parseMultipartIdentifier(name)
    except PySparkException as err:
        msg = f"[INVALID_TARGET] target {name!r} is not a valid table name in Spark: {reason(err)}"
        raise ConfigError(msg, target=name) from err
    if state.catalog().isTempView(parsed):
        raise _is_view(name)
    manager, parts = state.catalogManager(), strings(parsed)
    try:
        has_catalog = len(parts) >= _WITH_CATALOG and bool(manager.isCatalogRegistered(parts[0]))
        catalog = manager.catalog(parts[0]) if has_catalog else manager.currentCatalog()
        *namespace, table = parts[1:] if has_catalog else parts
        if not namespace and not has_catalog:
            namespace = [str(part) for part in manager.currentNamespace()]
    except (PySparkException, Py4JError) as err:
        raise _refused(name, err) from err
    if not namespace:
        msg = f"[INVALID_TARGET] target {name!r} has the catalog {parts[0]!r} but no schema; use catalog.schema.table"
        raise ConfigError(msg, target=name)
    if len(namespace) > 1 and str(catalog.name()) == SESSION_CATALOG:
        msg = f"[INVALID_TARGET] target {name!r} has too many parts for Spark's catalog; use schema.table"
        if not has_catalog:
            msg = (
                f"[INVALID_TARGET] target {name!r} begins with {parts[0]!r}, which is not a catalog of this session;"
                f" configure it (spark.sql.catalog.{parts[0]}), or correct the name"
            )
        raise ConfigError(msg, target=name)
    if str(catalog.name()) != SESSION_CATALOG and not TAKES_CATALOGS:
        msg = (
            f"[CATALOG_NOT_SUPPORTED] target {name!r} is in the catalog {str(catalog.name())!r}, but Delta before 4.0"
            f" supports only {SESSION_CATALOG!r}; use the table's path, or a newer Spark"
        )
        raise ConfigError(msg, target=name)
    return catalog, namespace, table


def _expect_namespace(session: SparkSession, catalog: Any, namespace: Sequence[str], name: str) -> None:
    """Raise a ConfigError if the schema of a name without a table is missing, too."""
    try:
        is_there = bool(catalog.namespaceExists(_array(session, namespace)))
    except (PySparkException, Py4JError) as err:
        raise _refused(name, err) from err
    if not is_there:
        schema = ".".join(quote(part) for part in [str(catalog.name()), *namespace])
        msg = (
            f"[SCHEMA_NOT_FOUND] the schema of target {name!r} does not exist; create it (CREATE SCHEMA {schema}), or"
            " correct the name"
        )
        raise ConfigError(msg, target=name)


def _delta(loaded: Any, name: str) -> Any:
    """Delta's handle of a catalog's table; a ConfigError for anything else."""
    kind = str(loaded.getClass().getSimpleName())
    if kind == "DeltaTableV2":
        return loaded
    if kind == "V1Table":
        table = loaded.v1Table()
        if str(table.tableType().name()) == "VIEW":
            raise _is_view(name)
        provider = str(table.provider().get()) if table.provider().isDefined() else ""
        if provider.lower() == "delta":
            msg = (
                f"[CATALOG_NOT_SUPPORTED] target {name!r} is in a catalog that does not support Delta; set"
                f" spark.sql.catalog.spark_catalog to {_MEMORY_CATALOGS[0]}"
            )
            raise ConfigError(msg, target=name)
    elif "View" in kind:
        raise _is_view(name)
    raise ConfigError(no_table(name), target=name)


def _is_view(name: str) -> ConfigError:
    msg = f"[NOT_A_DELTA_TABLE] target {name!r} is a view; use the table to merge into"
    return ConfigError(msg, target=name)


def _refused(name: str, err: Exception) -> MergeFailedError:
    msg = (
        f"[CATALOG_UNAVAILABLE] the catalog cannot load {name!r}: {reason(err)}; check its address, credentials and"
        " permissions, then run it again"
    )
    return MergeFailedError(msg, target=name)


def _sql(catalog: Any, namespace: Sequence[str], table: str) -> str:
    return f"{quote(str(catalog.name()))}.{_within(namespace, table)}"


def _within(namespace: Sequence[str], table: str) -> str:
    """A name without its catalog."""
    return ".".join(quote(part) for part in [*namespace, table])


def _array(session: SparkSession, texts: Sequence[str]) -> Any:
    gateway: Any = session.sparkContext._gateway
    array = gateway.new_array(java_class(session, "java.lang.String"), len(texts))
    for i, text in enumerate(texts):
        array[i] = text
    return array
