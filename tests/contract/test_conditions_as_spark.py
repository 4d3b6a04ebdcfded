"""The driver's conditions over Arrow hold for the same pairs of events and rows as those that Spark executes.

Needs a JVM: what equals what, and what comes first, is Spark's to say, in generated code and in interpreted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema

from stream_merge.engines.driver.conditions import holds
from stream_merge.engines.spark import render
from stream_merge.model import names
from stream_merge.shapes.clauses import (
    And,
    Changed,
    Condition,
    IsDelete,
    Newer,
    Not,
    Or,
    SamePosition,
    SameSequence,
)
from stream_merge.shapes.layout import Layout, StoredColumn
from stream_merge.spark import columns
from stream_merge.spark.versions import arrow_frame, arrow_table, arrow_type

SCALARS: Mapping[str, Sequence[Any]] = {
    "boolean": [False, True],
    "tinyint": [-128, 0, 127],
    "smallint": [-1, 0],
    "int": [-1, 0, 2**31 - 1],
    "bigint": [-(2**63), 2**53, 2**53 + 1],
    "float": [0.0, -0.0, math.nan, math.inf, 1.5],
    "double": [0.0, -0.0, math.nan, -math.inf, 1.5],
    "decimal(10,2)": [Decimal("0.00"), Decimal("-1.50"), Decimal("1.50")],
    "decimal(38,10)": [Decimal("1e-10"), Decimal("9999999999999999999999999999"), Decimal("-1")],
    "string": ["", "a", "a ", "B", "é", "e\u0301", "\uffff", "\U0001f600"],
    "binary": [b"", b"\x00", b"\x7f", b"\x80"],
    "date": [date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31)],
    "timestamp": [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)],
    "timestamp_ntz": [datetime(1, 1, 1), datetime(1969, 12, 31, 23, 59, 59, 999999)],
}
NESTED = (
    "struct<x:double,y:string>",
    "struct<p:struct<x:float>,q:array<decimal(10,2)>,r:map<string,double>>",
    "array<double>",
    "array<array<float>>",
    "array<struct<x:double,y:binary>>",
    "array<map<string,timestamp>>",
    "map<string,bigint>",
    "map<double,double>",
    "map<date,struct<x:double,m:map<int,string>>>",
    "map<struct<x:int,y:float>,array<double>>",
    "map<array<boolean>,boolean>",
    "map<string,map<string,float>>",
)


@pytest.fixture(params=["generated", "interpreted"])
def evaluating(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[SparkSession]:
    """Spark compares by code that it generates, or by classes of its own."""
    is_generated = request.param == "generated"
    wanted = {
        "spark.sql.codegen.factoryMode": "CODEGEN_ONLY" if is_generated else "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": str(is_generated).lower(),
    }
    before = {name: spark.conf.get(name) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    yield spark
    for name, kept in before.items():
        spark.conf.set(name, kept)


def test_every_type_is_compared_as_spark_compares_it(evaluating: SparkSession, seed: int):
    """Each of a dozen values with each other, of every type: NULLs, empty values, other orders of entries too."""
    rng = random.Random(seed)
    types = {f"v{i}": T._parse_datatype_string(ddl) for i, ddl in enumerate((*SCALARS, *NESTED))}
    values = {name: a_dozen(rng, dtype) for name, dtype in types.items()}
    places = [(i, j) for i in range(12) for j in range(12)]
    events, rows = (
        pa.table(
            {
                **{name: held([values[name][pair[side]] for pair in places], dtype) for name, dtype in types.items()},
                names.SEQUENCE_COLUMN: held([{"c1": rng.choice([1, 2])} for _ in places], SEQUENCE),
                names.DELETE_COLUMN: pa.array([rng.random() < 0.3 for _ in places]),
            }
        )
        for side in (0, 1)
    )
    one_by_one = [layout([stored(name, dtype)]) for name, dtype in types.items()]
    together = layout([stored(name, dtype) for name, dtype in types.items()])
    few = layout([stored("v0", types["v0"]), stored(f"v{len(SCALARS) + 6}", types[f"v{len(SCALARS) + 6}"])])
    asked = [(wanted, one) for one in one_by_one for wanted in (Changed(), Not(Changed()))]
    asked += [(wanted, one) for one in (together, few) for wanted in (Changed(), UPDATING, SKIPPING, Not(SKIPPING))]

    expected = by_spark(evaluating, asked, events, rows)

    for (condition, of), answers in zip(asked, expected, strict=True):
        said = [column.dtype.simpleString() for column in of.stored]
        assert holds(condition, of, events, rows).to_pylist() == answers, (condition, said)
        assert (True in answers and False in answers) or of is together, (condition, said)


def test_what_a_sources_structs_lack_is_the_rows_own_as_in_spark(evaluating: SparkSession, seed: int):
    rng = random.Random(seed)
    dtype = T._parse_datatype_string("struct<p:struct<x:double,y:int>,q:int,r:array<int>>")
    source = T._parse_datatype_string("struct<P:struct<X:double>,r:array<int>>")
    values = a_dozen(rng, dtype)
    rows = [rng.choice(values) for _ in range(300)]
    events = [other_in(rng, row) if rng.random() < 0.6 else rng.choice(values) for row in rows]
    of = layout([stored("a", dtype, source)])
    tables = [
        pa.table({"a": held(side, dtype), names.SEQUENCE_COLUMN: held([{"c1": 1}] * 300, SEQUENCE)})
        for side in (events, rows)
    ]

    [answers] = by_spark(evaluating, [(Changed(), of)], *tables)

    assert holds(Changed(), of, *tables).to_pylist() == answers
    assert {True, False} == set(answers)


@pytest.mark.parametrize("kept", ["in one column", "in columns of the row", "alone", "alone in a column"])
def test_sequences_of_every_type_compare_as_in_spark(evaluating: SparkSession, seed: int, kept: str):
    """Pairs are the same in their first components, some in all; those of rows may be NULL."""
    rng = random.Random(seed)
    ddls = [*SCALARS, "struct<x:double,y:struct<z:string,a:array<float>>>", "array<struct<x:double>>"]
    rng.shuffle(ddls)
    if kept.startswith("alone"):
        ddls = ["struct<x:double,y:struct<z:string,a:array<float>>>"]
    types = [T._parse_datatype_string(ddl) for ddl in ddls]
    sequence = T.StructType([T.StructField(f"c{i}", dtype) for i, dtype in enumerate(types, 1)])
    events, rows = zip(*(a_pair(rng, types) for _ in range(600)), strict=True)
    of_events = pa.table({names.SEQUENCE_COLUMN: held([named(event, sequence) for event in events], sequence)})
    in_columns = kept in ("in columns of the row", "alone in a column")
    if in_columns:
        kept_in = tuple(f"v{i}" for i in range(len(types)))
        of_rows = pa.table({name: held([row[i] for row in rows], types[i]) for i, name in enumerate(kept_in)})
    else:
        told = [None if rng.random() < 0.1 else named(row, sequence) for row in rows]
        of_rows = pa.table({names.SEQUENCE_COLUMN: held(told, sequence)})
    of = layout([], sequence=sequence, kept_in=kept_in if in_columns else None)
    conditions: list[Condition] = [Newer(), SameSequence(), *(SamePosition(i) for i in range(1, len(types) + 1))]
    asked = [(wanted, of) for one in conditions for wanted in (one, Not(one))]

    expected = by_spark(evaluating, asked, of_events, of_rows)

    for (condition, _), answers in zip(asked, expected, strict=True):
        assert holds(condition, of, of_events, of_rows).to_pylist() == answers, (condition, ddls)
        assert {True, False} == set(answers), condition


SEQUENCE = T.StructType([T.StructField("c1", T.LongType())])
UPDATING = And(Not(IsDelete()), Or(Newer(), And(SameSequence(), Changed())))
SKIPPING = And(Not(IsDelete()), Or(And(Newer(), Changed()), And(SameSequence(), Changed())))


def by_spark(
    spark: SparkSession, asked: Sequence[tuple[Condition, Layout]], events: pa.Table, rows: pa.Table
) -> list[list[bool]]:
    """What Spark says of each condition, for the pairs in their order."""
    pair = pa.array(range(events.num_rows))
    paired = (table.append_column("pair", pair) for table in (events, rows))
    s, t = (arrow_frame(spark, table, from_arrow_schema(table.schema)) for table in paired)
    answers = [render.condition(wanted, of).alias(f"a{i}") for i, (wanted, of) in enumerate(asked)]
    joined = s.alias("s").join(t.alias("t"), columns.column("pair", "s") == columns.column("pair", "t"))
    found = arrow_table(joined.select(columns.column("pair", "s"), *answers)).sort_by("pair")
    return [found[f"a{i}"].to_pylist() for i in range(len(asked))]


def layout(
    stored_columns: Sequence[StoredColumn],
    sequence: T.StructType = SEQUENCE,
    kept_in: tuple[str, ...] | None = None,
) -> Layout:
    return Layout(
        stored=tuple(stored_columns),
        keys=(),
        sequence_fields=tuple(sequence.fields),
        sequence_columns=kept_in,
        sequence_source=(),
        deletes=None,
        new_columns=(),
        type_changes=(),
        definition="",
        case_sensitive=False,
    )


def stored(name: str, dtype: T.DataType, source: T.DataType | None = None) -> StoredColumn:
    return StoredColumn(name=name, source_name=name, source_type=source or dtype, field=T.StructField(name, dtype))


def held(values: Sequence[Any], dtype: T.DataType) -> pa.Array:
    return pa.array(values, arrow_type(dtype))


def named(values: Sequence[Any], sequence: T.StructType) -> dict[str, Any]:
    return dict(zip(sequence.names, values, strict=True))


def a_dozen(rng: random.Random, dtype: T.DataType) -> list[Any]:
    """NULL, an empty value where there is one, and others, some of them equal but for the order of entries."""
    found = [None, hollow(dtype), *(any_value(rng, dtype) for _ in range(6))]
    return [*found, *(other_in(rng, rng.choice(found)) for _ in range(4))]


def hollow(dtype: T.DataType) -> Any:
    if isinstance(dtype, T.StructType):
        return dict.fromkeys(dtype.names)
    return [] if isinstance(dtype, T.ArrayType | T.MapType) else SCALARS[dtype.simpleString()][0]


def any_value(rng: random.Random, dtype: T.DataType, nulls: float = 0.0) -> Any:
    if rng.random() < nulls:
        return None
    if isinstance(dtype, T.StructType):
        return {field.name: any_value(rng, field.dataType, 0.2) for field in dtype.fields}
    if isinstance(dtype, T.ArrayType):
        return [any_value(rng, dtype.elementType, 0.2) for _ in range(rng.choice([0, 1, 2, 2]))]
    if isinstance(dtype, T.MapType):
        keys: dict[str, Any] = {}
        for _ in range(rng.choice([0, 1, 2, 3])):
            key = any_value(rng, dtype.keyType)
            keys[repr(key).replace("-0.0", "0.0")] = key  # Spark's maps have equal keys once
        return [(key, any_value(rng, dtype.valueType, 0.2)) for key in keys.values()]
    return rng.choice(SCALARS[dtype.simpleString()])


def other_in(rng: random.Random, value: Any) -> Any:
    """The same value for Spark: entries of maps in another order, the other zero."""
    if isinstance(value, dict):
        return {name: other_in(rng, part) for name, part in value.items()}
    if isinstance(value, list):
        parts = [other_in(rng, part) for part in value]
        return rng.sample(parts, len(parts)) if parts and isinstance(parts[0], tuple) else parts
    if isinstance(value, tuple):
        return tuple(other_in(rng, part) for part in value)
    return -value if isinstance(value, float) and value == 0.0 else value


def a_pair(rng: random.Random, types: Sequence[T.DataType]) -> tuple[list[Any], list[Any]]:
    """Components of an event, none of which is NULL, and of a row."""
    event = [without_null(rng, dtype) for dtype in types]
    same = rng.randrange(len(types) + 1)
    row = [other_in(rng, component) for component in event[:same]]
    return event, [*row, *(any_value(rng, dtype, 0.2) for dtype in types[same:])]


def without_null(rng: random.Random, dtype: T.DataType) -> Any:
    """A component of a valid event: NULL in no field; arrays may hold NULLs."""
    if isinstance(dtype, T.StructType):
        return {field.name: without_null(rng, field.dataType) for field in dtype.fields}
    return any_value(rng, dtype)
