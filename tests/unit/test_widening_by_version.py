"""Which types a column is given depends on what Delta can do beside this Spark."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T

from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import widening
from stream_merge.shapes.widening import TypeChange, alterable, statements

NARROW, WIDE = (T.StructType([T.StructField("n", dtype)]) for dtype in (T.ByteType(), T.IntegerType()))


@pytest.mark.parametrize(
    ("source", "stored", "on_spark_3", "on_spark_4"),
    [
        (T.ShortType(), T.ByteType(), T.ShortType(), T.ShortType()),
        (WIDE, NARROW, WIDE, WIDE),
        (T.LongType(), T.IntegerType(), None, T.LongType()),
        (T.ArrayType(T.DoubleType()), T.ArrayType(T.FloatType()), None, T.ArrayType(T.DoubleType())),
        (T.DecimalType(12, 2), T.DecimalType(10, 2), None, T.DecimalType(12, 2)),
        (T.StringType(), T.ByteType(), None, None),
    ],
)
def test_beside_spark_3_only_integers_of_32_bits_grow(
    monkeypatch: pytest.MonkeyPatch,
    source: T.DataType,
    stored: T.DataType,
    on_spark_3: T.DataType | None,
    on_spark_4: T.DataType | None,
) -> None:
    """What Delta 3.3 would refuse is a column that cannot hold the events, before anything is written."""
    for beyond, wanted in ((False, on_spark_3), (True, on_spark_4)):
        monkeypatch.setattr(widening, "WIDENS_BEYOND_INTEGERS", beyond)
        assert alterable(source, stored) == wanted


def test_beside_spark_3_each_column_is_altered_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [TypeChange(path=(name,), before=T.ByteType(), after=T.ShortType()) for name in ("a", "b")]
    enabled = {widening.PROPERTY: "true"}

    monkeypatch.setattr(widening, "ALTERS_SEVERAL_COLUMNS", False)
    one_by_one = statements(TableRef("t"), changes, enabled)
    monkeypatch.setattr(widening, "ALTERS_SEVERAL_COLUMNS", True)

    assert one_by_one == [f"ALTER TABLE t ALTER COLUMN `{name}` TYPE smallint" for name in ("a", "b")]
    assert statements(TableRef("t"), changes, enabled) == [
        "ALTER TABLE t ALTER COLUMN `a` TYPE smallint, `b` TYPE smallint"
    ]
