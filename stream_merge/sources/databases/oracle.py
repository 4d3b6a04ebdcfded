"""Oracle in Debezium 3.4, by its documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.databases.base import AmbiguousTypeError, Database, LogPosition, LogPositions, Modes, Schema

_SCN = r"\A(?P<scn>[0-9]{1,18})\z"
"""For Arrow (RE2). Oracle's largest has 48 bits, or 63 since 12.2."""


class Oracle(Database):
    """Oracle.

    Changes come by commit, and a row stays locked until then: the SCN of the commit orders those of a key. Changes of
    one commit have one position, and Kafka's offsets order them. Reads of a snapshot have no commit, but their own SCN.
    """

    def position(self, source: Mapping[str, Any]) -> LogPosition:
        """The SCN of the commit."""
        name = "scn" if source.get("commit_scn") is None else "commit_scn"
        scn = source.get(name)
        if not isinstance(scn, str) or re.fullmatch(r"[0-9]{1,18}", scn) is None:
            self._refuse(name, source)
        return LogPosition(int(scn))

    def positions(self, source: Mapping[str, pa.Array]) -> LogPositions:
        """`position` of each event."""
        scn = pc.struct_field(pc.extract_regex(pc.coalesce(source["commit_scn"], source["scn"]), _SCN), "scn")
        return LogPositions(scn.cast(pa.int64()), pa.nulls(len(scn), pa.int64()), pa.nulls(len(scn), pa.string()))

    def connect_schema(self, declared: str, modes: Modes) -> Schema:
        """Refuses: how a NUMBER is written depends on more than its declaration."""
        msg = f"{declared!r} of Oracle needs a schema block; set the converter's schemas.enable in the connector"
        raise AmbiguousTypeError(msg)


ORACLE = Oracle(
    name="oracle",
    log="Oracle's redo log",
    ordering="oracle/1",
    required=("scn",),
    fields={"scn": pa.string(), "commit_scn": pa.string()},
    metadata=frozenset(
        (
            *("schema", "txId", "txSeq", "scn", "commit_scn", "lcr_position", "rs_id", "ssn", "redo_thread"),
            *("user_name", "redo_sql", "row_id", "commit_ts_ms", "start_scn", "start_ts_ms"),
        )
    ),
)
