"""Types of the columns of a query, where PostgreSQL's numeric has no digits, or odd ones."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from pyspark.sql import types as T

from stream_merge import ConfigError
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.sources.wire import connect_schema
from stream_merge.sources.wire.connect_schema import canonical
from stream_merge.sources.wire.encodings import decode

VARIABLE = {"type": "struct", "name": "io.debezium.data.VariableScaleDecimal", "fields": []}
SAID = "[COLUMN_TYPE_CHANGED] column 'c' of '/t' is {}, new events have {}; "


def numeric(precision: int, scale: int) -> dict[str, Any]:
    parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    return {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": parameters}


def block(column: dict[str, Any]) -> str:
    """The id of a schema with a key and this column, `c`."""
    fields = [{"field": "id", "type": "int64"}, {"field": "c", **column}]
    return canonical({"type": "struct", "fields": fields})


def rows_of(stored: T.DataType | None, types: dict[str, str], **query: Any) -> RowSchema:
    """The columns of a query whose table has the column `c` already, where a type is given."""
    told = {"name": "q", "topic": "t", "target": "/t", "keys": "id", "checkpoint": "/c", **query}
    settings = QuerySettings.model_validate({**told, "value_format": {"type": "debezium", "types": types}})
    rows = RowSchema.of_query(settings)
    if stored is not None:
        rows.start_from(T.StructType([T.StructField("id", T.LongType()), T.StructField("c", stored)]))
    return rows


@pytest.mark.parametrize(
    ("stored", "brought", "sentence"),
    [
        (
            None,
            [numeric(10, 2), VARIABLE],
            SAID.format("decimal(10,2)", "string")
            + "set 'types: {c: string}' or 'types: {c: \"decimal(38,10)\"}', which hold both",
        ),
        (
            T.DecimalType(10, 2),
            [VARIABLE],
            SAID.format("decimal(10,2)", "string")
            + "set 'types: {c: \"decimal(38,10)\"}' and 'schema_evolution: widen',"
            " or 'types: {c: string}' and point the job at a new table and a new checkpoint",
        ),
        (
            T.StringType(),
            [numeric(10, 2)],
            SAID.format("string", "decimal(10,2)") + "set 'types: {c: string}', which holds both",
        ),
    ],
    ids=["new table", "table of decimals", "table of texts"],
)
def test_a_numeric_that_loses_its_digits_is_told_with_the_types_that_hold_both(
    stored: T.DataType | None, brought: list[dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(stored, {}).admit(*map(block, brought))

    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (None, "string"),
        (None, "decimal(38,10)"),
        (T.DecimalType(10, 2), "decimal(38,10)"),
        (T.StringType(), "string"),
    ],
)
def test_these_types_hold_both(stored: T.DataType | None, wanted: str) -> None:
    rows = rows_of(stored, {"c": wanted}, schema_evolution="widen")

    rows.admit(block(numeric(10, 2)), block(VARIABLE))

    assert rows.columns["c"].dataType.simpleString() == wanted


@pytest.mark.parametrize(
    ("brought", "wanted", "stored"),
    [
        (numeric(5, 2046), None, "decimal(7,0)"),
        (numeric(5, 2046), "decimal(10,0)", "decimal(10,0)"),
        (numeric(5, 2046), "string", "string"),
        (numeric(2, 4), None, "decimal(4,4)"),
        (numeric(50, 2), "decimal(38,2)", "decimal(38,2)"),
    ],
)
def test_a_numeric_with_more_or_fewer_digits_than_a_decimal_says_is_stored(
    brought: dict[str, Any], wanted: str | None, stored: str
) -> None:
    """numeric(5,-2) comes with the scale 2046. Larger values than wanted are quarantined."""
    rows = rows_of(None, {} if wanted is None else {"c": wanted})

    rows.admit(block(brought))

    assert rows.columns["c"].dataType.simpleString() == stored


def test_whole_hundreds_are_texts_without_the_zeros_that_the_connector_adds() -> None:
    encoding = connect_schema.encoding(numeric(5, 2046), wanted=T.StringType())
    written = base64.b64encode((-1200 * 10**2046).to_bytes(900, "big", signed=True)).decode()

    assert decode(encoding, [written]).values.to_pylist() == ["-1200"]


def test_a_numeric_that_no_decimal_holds_wants_a_declared_type() -> None:
    rows = rows_of(None, {})

    rows.admit(block(numeric(50, 2)))

    assert list(rows.broken.values()) == [
        "numeric(50,2) exceeds the 38 digits of Delta's decimals; in 'types' declare string, or a decimal that holds"
        " its values"
    ]
