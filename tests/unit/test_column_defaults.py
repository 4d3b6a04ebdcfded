"""Defaults of new columns, from the schema block of their events: decoded by the column's own type, and told once."""

from __future__ import annotations

import base64
import logging
from typing import Any

import pytest
from pyspark.sql import types as T

from stream_merge.jobs.kafka.column_defaults import ColumnDefault, fills, warn
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.sources.wire.connect_schema import canonical, encoding

NUMERIC = {
    "type": "bytes",
    "name": "org.apache.kafka.connect.data.Decimal",
    "parameters": {"scale": "2", "connect.decimal.precision": "10"},
}
VARIABLE = {"type": "struct", "name": "io.debezium.data.VariableScaleDecimal", "fields": []}
ZONED = {"type": "string", "name": "io.debezium.time.ZonedTimestamp"}
TWELVE_AND_A_HALF = base64.b64encode((1250).to_bytes(2, "big")).decode()
NIL = "00000000-0000-0000-0000-000000000000"


def query(**changes: Any) -> QuerySettings:
    told = {"name": "q", "topic": "shop.public.orders", "target": "/t", "keys": "id", "checkpoint": "/c"}
    return QuerySettings.model_validate({**told, **changes})


def block(**columns: dict[str, Any]) -> str:
    """The id of a schema with a key and these columns."""
    fields = {"id": {"type": "int64"}, **columns}
    return canonical({"type": "struct", "fields": [{"field": name, **about} for name, about in fields.items()]})


@pytest.mark.parametrize(
    ("schema", "default", "value"),
    [
        ({"type": "string"}, "none", "none"),
        ({"type": "string"}, "", ""),
        ({"type": "int32"}, 0, "0"),
        ({"type": "boolean"}, False, "false"),
        ({"type": "double"}, 0.1, "0.1"),
        (NUMERIC, TWELVE_AND_A_HALF, "12.50"),
        (VARIABLE, {"scale": 1, "value": "fQ=="}, "12.5"),
        ({"type": "int32", "name": "io.debezium.time.Date"}, 19_723, "2024-01-01"),
        ({"type": "int64", "name": "io.debezium.time.MicroTimestamp"}, 1, None),
        ({"type": "int64", "name": "io.debezium.time.MicroTimestamp"}, 86_400_000_001, "1970-01-02 00:00:00.000001"),
        (
            {"type": "string", "name": "io.debezium.time.ZonedTimestamp"},
            "2024-01-01T02:00:00+02:00",
            "2024-01-01 00:00:00.000000Z",
        ),
        ({"type": "bytes"}, "AP8=", b"\x00\xff"),
        ({"type": "int32", "name": "io.debezium.time.Date"}, 0, None),
        ({"type": "string", "name": "io.debezium.data.Uuid"}, NIL, None),
        ({"type": "int32"}, "one", None),
        ({"type": "array", "items": {"type": "int32"}}, [1], None),
    ],
)
def test_a_default_is_decoded_as_its_column_is(schema: dict[str, Any], default: Any, value: str | bytes | None) -> None:
    """None: it cannot be stored, or stands for what a function computes."""
    written = encoding({**schema, "default": default})

    assert ColumnDefault.from_encoding(written, written.dtype, adds_column=True).value == value


def test_defaults_are_those_of_columns_that_the_target_lacked_at_the_last_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And those of which the block tells no value, or two, are told in `fill`, too, with the statements that help."""
    settings = query(on_column_default="fill")
    rows = RowSchema.of_query(settings)
    stored = [T.StructField("id", T.LongType()), T.StructField("old", T.LongType())]
    rows.start_from(T.StructType(stored))
    day = {"type": "int32", "name": "io.debezium.time.Date", "default": 0}
    first = {"old": {"type": "int64", "default": 1}, "note": {"type": "string", "default": "a"}, "day": day}

    rows.admit(block(**first, n={"type": "int32", "default": 1}), block(**first, n={"type": "int32", "default": 2}))

    assert {name: (one.value, one.adds_column) for name, one in rows.defaults.items()} == {
        "old": ("1", False),
        "note": ("a", True),
        "day": (None, True),
        "n": (None, True),
    }
    assert fills(rows.defaults, settings) == {"old": "1", "note": "a"}
    assert fills(rows.defaults, query()) == {}
    with caplog.at_level(logging.WARNING):
        warn(rows.defaults, ["note"], settings)
    assert [(record.column, record.default) for record in caplog.records] == [("day", "1970-01-01"), ("n", "1 or 2")]
    assert caplog.records[0].remedy == (
        'run in the source: UPDATE public.orders SET "day" = "day"; or trigger an incremental snapshot: INSERT INTO'
        " <signal table> (id, type, data) VALUES (gen_random_uuid()::text, 'execute-snapshot',"
        ' \'{"data-collections": ["public.orders"], "type": "incremental"}\')'
    )

    caplog.clear()
    new = RowSchema.of_query(query())
    new.admit(block(**first))
    warn(new.defaults, ["note"], query())
    assert [record.column for record in caplog.records] == ["note"]

    rows.start_from(T.StructType([*stored, T.StructField("note", T.StringType()), T.StructField("n", T.LongType())]))
    assert list(rows.defaults) == ["day"]
