"""Events of Oracle, as Debezium's documentation (3.4) has them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from stream_merge.sources.databases.base import AmbiguousTypeError, Modes
from stream_merge.sources.databases.oracle import ORACLE
from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.envelopes.debezium import Debezium, row_schema
from stream_merge.sources.wire.connect_json import ConnectJson
from stream_merge.sources.wire.strict_json import UndecodableError

SOURCE = {
    "version": "3.4.0.Final",
    "connector": "oracle",
    "name": "server1",
    "ts_ms": 1_520_085_154_000,
    "snapshot": "false",
    "db": "ORCLPDB1",
    "schema": "DEBEZIUM",
    "table": "CUSTOMERS",
    "txId": "6.28.807",
    "scn": "2122185",
    "commit_scn": "2122189",
    "lcr_position": None,
    "rs_id": "001234.00012345.0124",
    "ssn": 1,
    "redo_thread": 1,
    "user_name": "user",
    "row_id": "AAASgjAAMAAAACnAAA",
}
ROW = {
    "type": "struct",
    "optional": True,
    "name": "server1.DEBEZIUM.CUSTOMERS.Value",
    "fields": [
        {"type": "int32", "optional": False, "field": "ID"},
        {"type": "string", "optional": True, "field": "FIRST_NAME"},
        {
            "type": "struct",
            "optional": True,
            "name": "io.debezium.data.VariableScaleDecimal",
            "fields": [{"field": "scale", "type": "int32"}, {"field": "value", "type": "bytes"}],
            "field": "BALANCE",
        },
    ],
}
BLOCK = {"type": "struct", "fields": [{**ROW, "field": "before"}, {**ROW, "field": "after"}]}


def event(op: str, **changes: Any) -> bytes:
    row = {"ID": 1004, "FIRST_NAME": "Anne", "BALANCE": {"scale": 2, "value": "AMg="}}
    image = {"before": row, "after": None} if op == "d" else {"before": None, "after": row}
    payload = {**image, "source": {**SOURCE, **changes}, "op": op, "ts_ms": 1, "transaction": None}
    return json.dumps({"schema": BLOCK, "payload": payload}).encode()


def test_events_of_the_documentation_are_ordered_by_the_commit() -> None:
    """A change that was written before another one, and committed after it, is the later one."""
    form = Debezium(wire=ConnectJson(row_schema=row_schema), database=ORACLE)
    values = [
        event("r", scn="2122180", commit_scn=None, snapshot="last"),
        event("c"),
        event("u", scn="2122183", commit_scn="2122190"),
        event("d", commit_scn="2122195"),
    ]
    schema_id = form.read(None, values[0]).schema_id
    encodings = form.encodings(schema_id)
    by = Decoder(
        format=form,
        columns=T.StructType([T.StructField(name, one.dtype) for name, one in encodings.items()]),
        keys=("ID",),
        known=frozenset({schema_id}),
        max_value_bytes=20_000,
    )
    keys, partitions = pa.array([b'{"ID":1004}'] * len(values), pa.binary()), pa.array([0] * len(values), pa.int32())
    found = by.decode(Records(keys, pa.array(values, pa.binary()), partitions), set()).to_pylist()

    assert [row["kind"] for row in found] == [Kind.UPSERT, Kind.UPSERT, Kind.UPSERT, Kind.DELETE]
    assert [row["position"] for row in found] == [2_122_180, 2_122_189, 2_122_190, 2_122_195]
    assert [row["is_snapshot"] for row in found] == [True, False, False, False]
    assert found[1]["row"]["FIRST_NAME"] == "Anne"
    assert Decimal(found[1]["row"]["BALANCE"]) == Decimal("2.00")


@pytest.mark.parametrize(
    "changes",
    [{}, {"commit_scn": None}, {"scn": None}, {"scn": None, "commit_scn": None}, {"commit_scn": ""}, {"scn": "9" * 19}],
)
def test_positions_of_many_changes_are_those_of_each(changes: dict[str, Any]) -> None:
    source = {**SOURCE, **changes}
    many = ORACLE.positions({name: pa.array([source[name]], dtype) for name, dtype in ORACLE.fields.items()})
    try:
        one = ORACLE.position(source).position
    except UndecodableError:
        one = None
    assert many.position[0].as_py() == one


def test_declared_types_are_refused() -> None:
    with pytest.raises(AmbiguousTypeError, match="needs a schema block"):
        ORACLE.connect_schema("number(9)", Modes())
