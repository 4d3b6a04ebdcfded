"""What lies in the quarantine tables of a job: read from their files, without Spark."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from rich.console import Console

from stream_merge.errors import ConfigError
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.watch.screen import escape_line, whole_table
from stream_merge.model.logs import counted
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.decode.events import PLACE
from stream_merge.tables import explain
from stream_merge.tables.log import handle
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.side import quarantine

_SHOWN = (
    "recorded_at",
    "replayed_at",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "error",
    "event",
    "raw_key",
    "raw_value",
)
_MOST_SHOWN = 2_000
"""Characters of a record that are shown."""


class Table(Protocol):
    """A table that events are merged into."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def target(self) -> TableRef:
        """Where it lies."""
        ...


class NamedTable(NamedTuple):
    """A table that no job file tells of."""

    name: str
    target: TableRef


def summary(query: Table) -> list[dict[str, Any]]:
    """Events by reason, topic and partition: how many, between which offsets, and when the last one came.

    Raises:
        ConfigError: the table cannot be read without Spark.
    """
    table = _opened(query)
    if table is None:
        return []
    found = _answer(
        query,
        table,
        'SELECT reason, topic, "partition", count(*) AS events, min("offset") AS first, max("offset") AS last,'
        " count(replayed_at) AS replayed, max(recorded_at) AS newest"
        ' FROM (SELECT unnest(reasons) AS reason, topic, "partition", "offset", replayed_at, recorded_at FROM log)'
        ' GROUP BY reason, topic, "partition" ORDER BY reason, topic, "partition"',
    )
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def replayable(query: Table) -> int | None:
    """Records that `quarantine replay` would take: with their bytes, not replayed before, each place once.

    Returns: None where no job file tells of the table.

    Raises:
        ConfigError: the table cannot be read without Spark.
    """
    if not isinstance(query, QuerySettings):
        return None
    table = _opened(query)
    if table is None:
        return 0
    topics = ", ".join(map(handle.text, query.topic))
    place = ", ".join(f'"{name}"' for name in PLACE)
    found = _answer(
        query,
        table,
        f"SELECT count(*) AS records FROM (SELECT DISTINCT {place} FROM log WHERE replayed_at IS NULL AND topic IN"
        f' ({topics}) AND "offset" IS NOT NULL AND (raw_key IS NOT NULL OR raw_value IS NOT NULL))',
    )
    return int(found["records"][0].as_py())


def events(query: Table, *, reason: str | None, offset: int | None, most: int) -> list[dict[str, Any]]:
    """Single events, the newest first.

    Args:
        query: whose.
        reason: only those with this reason.
        offset: only the record at this offset.
        most: so many.

    Raises:
        ConfigError: the table cannot be read without Spark.
    """
    table = _opened(query)
    if table is None:
        return []
    wanted = ["true"]
    if reason is not None:
        wanted.append(f"array_has(reasons, {handle.text(reason)})")
    if offset is not None:
        wanted.append(f'"offset" = {int(offset)}')
    found = _answer(
        query,
        table,
        # A producer may give a record any time, which Python need not have.
        'SELECT * REPLACE (CAST("timestamp" AS VARCHAR) AS "timestamp")'
        f' FROM log WHERE {" AND ".join(wanted)} ORDER BY recorded_at DESC, "offset" DESC LIMIT {int(most)}',
    )
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def _opened(query: Table) -> LogHandle | None:
    """The quarantine of a table; a quarantine, wherever it lies, is its own.

    Raises:
        ConfigError: where nobody but a person told of the table, there is neither it nor a quarantine beside it.
    """
    if isinstance(query, QuerySettings):
        return explain.find(query.target.quarantine)
    given = explain.find(query.target)
    if given is not None and _is_quarantine(given):
        return given
    beside = explain.find(query.target.quarantine)
    if given is None and beside is None:
        msg = f"[TABLE_NOT_FOUND] {query.target!r} is not a Delta table; give the path of a sink's target or quarantine"
        raise ConfigError(msg, target=query.target)
    return beside


def _is_quarantine(table: LogHandle) -> bool:
    return set(quarantine.SCHEMA.names) <= {field.name for field in table.snapshot().schema.fields}


def _answer(query: Table, table: LogHandle, sql_text: str) -> pa.Table:
    try:
        return table.query(sql_text)
    except Exception as err:
        msg = f"[NEEDS_SPARK] the quarantine of {query.target!r} cannot be read without Spark: {err}; read it in Spark"
        raise ConfigError(msg, target=query.target) from err


def show_summary(query: Table, found: list[dict[str, Any]], replayable: int | None, *, console: Console) -> None:
    """Print a line per reason, topic and partition, and how many records `replay` would take."""
    if not found:
        console.print(f"{escape_line(query.name)}: nothing in quarantine", highlight=False)
        return
    table = whole_table("reason", "topic", "partition", "events", "offsets", "replayed", "newest (UTC)")
    for row in found:
        place = tuple("" if row[name] is None else f"{row[name]}" for name in ("topic", "partition"))
        offsets = "" if row["first"] is None else f"{row['first']}-{row['last']}"
        newest = "" if row["newest"] is None else f"{row['newest']:%Y-%m-%d %H:%M:%S}"
        what = map(escape_line, (row["reason"], *place))
        table.add_row(*what, f"{row['events']:,}", offsets, f"{row['replayed']:,}", newest)
    console.print(f"{escape_line(query.name)}:", highlight=False)
    console.print(table)
    if replayable is None:
        return
    said = f"{counted(replayable, 'record')} to replay; above, one counts for each of its reasons and deliveries"
    console.print(said, highlight=False)


def show_events(found: list[dict[str, Any]], *, console: Console) -> None:
    """Print what is known of each event."""
    for row in found:
        console.rule(escape_line(f"batch {row['batch_id']}, {', '.join(row['reasons'] or [])}"))
        for name in _SHOWN:
            value = row[name]
            if value is not None:
                text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
                shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text):,} characters)"
                console.print(f"{name}: {escape_line(shown)}", highlight=False, soft_wrap=True)
