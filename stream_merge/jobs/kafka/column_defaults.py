"""Defaults of columns that the source adds: CDC sends no events for existing rows, only the default."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as T

from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.model.logs import tell
from stream_merge.sources.wire.encodings import Encoding, decode
from stream_merge.spark.versions import arrow_type
from stream_merge.tables.log.handle import quote

log = logging.getLogger(__name__)

_STAND_INS = ("1970-01-01", "00000000-0000-0000-0000-000000000000")
"""What Debezium writes for the default of a date, timestamp or UUID that a function computes (3.4,
`PostgresDefaultValueConverter`). For other types it writes 0, false or an empty text, which may be real defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnDefault:
    """The default of a column in the schema block of its events."""

    shown: str
    """For log messages."""
    value: str | bytes | None
    """As Spark casts it to the column's type; None where the block does not tell the value of earlier rows."""
    adds_column: bool | None
    """Whether the target lacks the column; None: there is no target yet."""

    @classmethod
    def from_encoding(cls, encoding: Encoding, dtype: T.DataType, *, adds_column: bool | None) -> ColumnDefault:
        """Decode a default by the logical type of its column.

        Args:
            encoding: of the column, with a default.
            dtype: type that the target stores.
            adds_column: as the field.
        """
        value: str | bytes | None = None
        if isinstance(dtype, T.AtomicType):
            stored = decode(encoding, [encoding.default]).values.cast(arrow_type(dtype))
            value = (stored if isinstance(dtype, T.BinaryType) else stored.cast(pa.string()))[0].as_py()
        shown = str(encoding.default if value is None else value)
        return cls(shown=shown, value=None if shown.startswith(_STAND_INS) else value, adds_column=adds_column)


def fills(defaults: Mapping[str, ColumnDefault], settings: QuerySettings) -> dict[str, str | bytes]:
    """Column -> value for existing rows, if the job fills defaults."""
    if settings.on_column_default == "warn":
        return {}
    return {name: default.value for name, default in defaults.items() if default.value is not None}


def warn(defaults: Mapping[str, ColumnDefault], missing: Collection[str], settings: QuerySettings) -> None:
    """Warn of each new column whose default existing rows do not get, with the statements that bring it.

    Args:
        defaults: column -> default.
        missing: columns that some event of the batch does not carry.
        settings: the query.
    """
    filled = fills(defaults, settings)
    tables = [".".join(topic.split(".")[-2:]) for topic in settings.topic]
    listed = ", ".join(f'"{table}"' for table in tables)
    for name, default in defaults.items():
        has_earlier_rows = name in missing if default.adds_column is None else default.adds_column
        if name in filled or not has_earlier_rows:
            continue
        updates = "; ".join(f"UPDATE {table} SET {quote(name)} = {quote(name)}" for table in tables)
        tell(
            log.warning,
            "column_default_not_applied",
            query=settings.name,
            column=name,
            default=default.shown,
            effect="existing rows stay NULL: the source sends no events for them",
            remedy=f"run in the source: {updates}; or trigger an incremental snapshot: INSERT INTO"
            " <signal table> (id, type, data) VALUES (gen_random_uuid()::text, 'execute-snapshot',"
            f' \'{{"data-collections": [{listed}], "type": "incremental"}}\')',
        )
