"""Data files of the driver: names, types and NULLs as the table has them, and bounds that hold."""

from __future__ import annotations

import datetime
import json
import math
import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from stream_merge.spark.versions import arrow_type
from stream_merge.tables.files import data_file
from stream_merge.tables.files.data_file import NullViolationError, write_change_file, write_data_file
from stream_merge.tables.files.statistics import statistics

UTC = datetime.UTC
MOMENT = datetime.datetime(2024, 1, 1, 12, 30, 15, 123456)


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, dtype) for name, dtype in columns.items()])


def table(of: StructType, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    arrow = pa.schema([pa.field(field.name, arrow_type(field.dataType)) for field in of.fields])
    return pa.Table.from_pylist(list(rows), arrow)


def told(dtype: DataType, values: Sequence[Any], **properties: str) -> tuple[Any, Any, int]:
    """Least and greatest value of a column `c` as the statistics have them, and the number of NULLs."""
    of = schema(c=dtype)
    found = json.loads(statistics(table(of, [{"c": value} for value in values]), of, delta(**properties)))
    assert found["numRecords"] == len(values)
    return found["minValues"].get("c"), found["maxValues"].get("c"), found["nullCount"]["c"]


def delta(**properties: str) -> dict[str, str]:
    return {f"delta.{name}": value for name, value in properties.items()}


def write(root: Path, of: StructType, rows: Sequence[Mapping[str, Any]], **properties: str) -> dict[str, Any]:
    return write_data_file(root, table(of, rows), of, partition={}, properties=delta(**properties), now_ms=17)


def stats_of(of: StructType, rows: Sequence[Mapping[str, Any]], **properties: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(statistics(table(of, rows), of, delta(**properties)))
    return found


# -- statistics: ends ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "values", "least", "greatest"),
    [
        (ByteType(), [-128, 127, None], -128, 127),
        (ShortType(), [5], 5, 5),
        (IntegerType(), [2**31 - 1, -(2**31)], -(2**31), 2**31 - 1),
        (LongType(), [2**63 - 1, -(2**63)], -(2**63), 2**63 - 1),
        (DoubleType(), [0.1, -1e300], -1e300, 0.1),
        (FloatType(), [0.1, -2.5], -2.5, 0.10000000149011612),
        (DateType(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)], "0001-01-01", "9999-12-31"),
        (TimestampNTZType(), [MOMENT], "2024-01-01T12:30:15.123", "2024-01-01T12:30:15.123"),
        (TimestampType(), [MOMENT.replace(tzinfo=UTC)], "2024-01-01T12:30:15.123Z", "2024-01-01T12:30:15.123Z"),
        (StringType(), ["b", "", None, "é"], "", "é"),
        (StringType(), ["\uffff", "\U0001f600"], "\uffff", "\U0001f600"),
    ],
    ids=repr,
)
def test_ends_of_a_column(dtype, values, least, greatest):
    assert told(dtype, values) == (least, greatest, values.count(None))


def test_times_before_1970_are_cut_off_downwards_too():
    """One microsecond before 1970 belongs to the millisecond that ends with it."""
    moment = datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)

    assert told(TimestampNTZType(), [moment])[:2] == ("1969-12-31T23:59:59.999", "1969-12-31T23:59:59.999")
    assert told(TimestampNTZType(), [datetime.datetime(1, 1, 1)])[0] == "0001-01-01T00:00:00.000"


@pytest.mark.parametrize(
    ("dtype", "arrow", "value"),
    [
        (DateType(), pa.date32(), 3_000_000),
        (DateType(), pa.date32(), -800_000),
        (TimestampType(), pa.timestamp("us", "UTC"), 2**63 - 1),
        (TimestampNTZType(), pa.timestamp("us"), -(2**63)),
    ],
    ids=repr,
)
def test_years_without_four_digits_are_no_ends(dtype, arrow, value):
    """Spark writes +10000-01-01, which not every reader takes; without an end the file is always read."""
    rows = pa.table({"c": pa.array([value, 0], pa.int32() if arrow == pa.date32() else pa.int64()).cast(arrow)})

    found = json.loads(statistics(rows, schema(c=dtype), {}))

    assert list(found["minValues" if value > 0 else "maxValues"]) == ["c"]
    assert found["maxValues" if value > 0 else "minValues"] == {}


@pytest.mark.parametrize(("precision", "scale"), [(5, 2), (18, 18), (38, 0), (38, 18), (38, 38)])
def test_decimals_keep_all_their_digits_and_have_no_exponent(precision, scale):
    greatest = Decimal((0, (9,) * precision, -scale))
    least = greatest.copy_negate()
    of = schema(c=DecimalType(precision, scale))

    text = statistics(table(of, [{"c": greatest}, {"c": least}, {"c": Decimal(0)}]), of, {})

    found = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    assert (found["minValues"]["c"], found["maxValues"]["c"]) == (least, greatest)
    assert "E" not in text.split('"nullCount"')[0].replace("numRecords", "")


@pytest.mark.parametrize("dtype", [FloatType(), DoubleType()], ids=repr)
def test_floats_without_a_number_have_no_end_on_that_side(dtype):
    """NaN is greatest for Spark and unordered for others; infinities are no JSON."""
    assert told(dtype, [1.5, math.nan, 2.5]) == (1.5, None, 0)
    assert told(dtype, [math.nan, None]) == (None, None, 1)
    assert told(dtype, [1.5, math.inf]) == (1.5, None, 0)
    assert told(dtype, [1.5, -math.inf]) == (None, 1.5, 0)


def test_zeros_have_the_outer_sign():
    """Readers that order floats by their bits take -0.0 for less than 0.0."""
    for values in ([0.0], [-0.0], [0.0, -0.0], [-0.0, 0.0]):
        least, greatest, _ = told(DoubleType(), values)
        assert (math.copysign(1, least), math.copysign(1, greatest)) == (-1, 1)


@pytest.mark.parametrize(
    ("text", "greatest"),
    [
        ("a" * 32, "a" * 32),
        ("a" * 33, "a" * 32 + "\x7f"),
        ("a" * 32 + "\x7f", "a" * 32 + "\U0010ffff"),
        ("a" * 32 + "é", "a" * 32 + "\U0010ffff"),
        ("\U0001f600" * 16, "\U0001f600" * 16),
        ("\U0001f600" * 17, "\U0001f600" * 16 + "\U0010ffff"),
        ("a" + "\U0001f600" * 20, "a" + "\U0001f600" * 16 + "\U0010ffff"),
        ("a" * 32 + "\U0010ffff" + "b", "a" * 32 + "\U0010ffff" + "\x7f"),
        ("a" * 32 + "\U0010ffff", "a" * 32 + "\U0010ffff"),
        ("\U0010ffff" * 32, "\U0010ffff" * 32),
        ("\U0010ffff" * 40, None),
    ],
)
def test_the_greatest_text_is_cut_and_padded(text, greatest):
    """32 UTF-16 units and a character that is greater than the one left out, as Delta's truncateMaxStringAgg."""
    assert told(StringType(), [text])[1] == greatest


def test_the_least_text_is_cut_after_32_characters():
    assert told(StringType(), ["\U0001f600" * 40])[0] == "\U0001f600" * 32
    assert told(StringType(), ["a" * 40], dataSkippingStringPrefixLength="3")[:2] == ("aaa", "aaa\x7f")
    assert told(StringType(), ["a" * 40], dataSkippingStringPrefixLength="0")[:2] == ("", None)
    assert told(StringType(), [""], dataSkippingStringPrefixLength="0")[:2] == ("", "")


def test_texts_that_are_no_unicode_have_no_ends():
    """Spark casts any bytes to a string."""
    raw = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))

    found = json.loads(statistics(pa.table({"c": raw}), schema(c=StringType()), {}))

    assert (found["minValues"], found["maxValues"], found["nullCount"]) == ({}, {}, {"c": 0})


def test_no_text_lies_outside_of_its_file_s_ends(seed):
    """As Spark compares: by bytes of UTF-8."""
    rng = random.Random(seed)
    alphabet = ["a", "b", "~", "\x7f", "\x80", "é", "\ud7ff", "\uffff", "\U00010000", "\U0010ffff", "\0", '"', "\\"]
    for _ in range(300):
        common = "".join(rng.choices(alphabet, k=rng.choice([0, 5, 30, 31, 32])))
        values = [
            common + "".join(rng.choices(rng.sample(alphabet, 3), k=rng.randrange(50)))
            for _ in range(rng.randrange(1, 5))
        ]
        least, greatest, _ = told(StringType(), values)
        for value in values:
            assert least.encode() <= value.encode()
            assert greatest is None or value.encode() <= greatest.encode()


@pytest.mark.parametrize("dtype", [ByteType(), LongType(), FloatType(), DoubleType(), DecimalType(20, 4)], ids=repr)
def test_no_number_lies_outside_of_its_file_s_ends(dtype, seed):
    rng = random.Random(seed)
    for _ in range(50):
        values: list[Any] = [rng.choice([None, 0, 1, -1, rng.randrange(-128, 128)]) for _ in range(rng.randrange(1, 6))]
        if isinstance(dtype, FloatType | DoubleType):
            values = [value and value * rng.choice([0.1, 1e-30, 1e30]) for value in values]
        kept = [
            value for value in table(schema(c=dtype), [{"c": v} for v in values])["c"].to_pylist() if value is not None
        ]
        least, greatest, nulls = told(dtype, values)
        assert nulls == len(values) - len(kept)
        if kept:
            assert all(Decimal(repr(least)) <= Decimal(value) <= Decimal(repr(greatest)) for value in kept) or (
                least <= min(kept) <= max(kept) <= greatest
            )


# -- statistics: which columns ------------------------------------------------------------------

NESTED = schema(a=LongType(), s=schema(x=StringType(), deep=schema(y=LongType(), z=BinaryType())), b=LongType())
NESTED_ROWS = [{"a": 1, "s": {"x": "t", "deep": None}, "b": None}, {"a": None, "s": None, "b": None}]


def test_fields_of_a_null_struct_are_null():
    assert stats_of(NESTED, NESTED_ROWS) == {
        "numRecords": 2,
        "minValues": {"a": 1, "s": {"x": "t", "deep": {}}},
        "maxValues": {"a": 1, "s": {"x": "t", "deep": {}}},
        "nullCount": {"a": 1, "s": {"x": 1, "deep": {"y": 2, "z": 2}}, "b": 2},
    }


def test_types_without_an_order_have_their_nulls_counted():
    of = schema(
        yes=BooleanType(),
        raw=BinaryType(),
        list=ArrayType(LongType()),
        map=MapType(StringType(), LongType()),
        words=StringType("UNICODE_CI"),
    )

    assert stats_of(of, [{"yes": True, "raw": b"x"}]) == {
        "numRecords": 1,
        "nullCount": {"yes": 0, "raw": 0, "list": 1, "map": 1, "words": 1},
    }


@pytest.mark.parametrize(
    ("count", "nulls"),
    [
        ("0", None),
        ("1", {"a": 1}),
        ("2", {"a": 1, "s": {"x": 1}}),
        ("3", {"a": 1, "s": {"x": 1, "deep": {"y": 2}}}),
        ("-1", {"a": 1, "s": {"x": 1, "deep": {"y": 2, "z": 2}}, "b": 2}),
    ],
)
def test_only_the_first_leaves_count(count, nulls):
    """`delta.dataSkippingNumIndexedCols` counts leaves, 32 unless it is set."""
    assert stats_of(NESTED, NESTED_ROWS, dataSkippingNumIndexedCols=count).get("nullCount") == nulls
    wide = schema(**{f"c{i}": LongType() for i in range(40)})
    assert len(stats_of(wide, [{}])["nullCount"]) == 32


@pytest.mark.parametrize(
    ("names", "nulls"),
    [
        ("b", {"b": 2}),
        ("B, s.X", {"s": {"x": 1}, "b": 2}),
        ("s.deep", {"s": {"deep": {"y": 2, "z": 2}}}),
        ("`s`.`deep`.y,nothing,a.b", {"s": {"deep": {"y": 2}}}),
        ("", None),
    ],
)
def test_named_columns_count_instead(names, nulls):
    """`delta.dataSkippingStatsColumns` ignores case and names that are not there; a struct means all its leaves."""
    found = stats_of(NESTED, NESTED_ROWS, dataSkippingStatsColumns=names, dataSkippingNumIndexedCols="1")

    assert found.get("nullCount") == nulls


def test_names_in_backticks_may_hold_anything():
    of = schema(**{"a.b": LongType(), "c,`d": LongType(), "e": LongType()})

    assert set(stats_of(of, [{}], dataSkippingStatsColumns="`a.b`,`c,``d`")["nullCount"]) == {"a.b", "c,`d"}
    for odd in ("a b", "a,", "a..b", "`a"):
        with pytest.raises(ValueError, match="dataSkippingStatsColumns"):
            stats_of(of, [{}], dataSkippingStatsColumns=odd)


def test_bounds_are_said_to_be_tight_where_deletion_vectors_can_make_them_wide():
    of = schema(a=LongType())

    assert stats_of(of, [{"a": 1}], enableDeletionVectors="true")["tightBounds"] is True
    assert "tightBounds" not in stats_of(of, [{"a": 1}])


# -- files --------------------------------------------------------------------------------------

MAPPED = StructType(
    [
        StructField(
            "s",
            StructType(
                [
                    StructField(
                        "x", LongType(), True, {"delta.columnMapping.id": 2, "delta.columnMapping.physicalName": "p2"}
                    )
                ]
            ),
            True,
            {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "p1"},
        ),
        StructField(
            "list",
            ArrayType(
                StructType(
                    [
                        StructField(
                            "y",
                            LongType(),
                            True,
                            {"delta.columnMapping.id": 4, "delta.columnMapping.physicalName": "p4"},
                        )
                    ]
                )
            ),
            True,
            {"delta.columnMapping.id": 3, "delta.columnMapping.physicalName": "p3"},
        ),
        StructField("day", DateType(), True, {"delta.columnMapping.id": 5, "delta.columnMapping.physicalName": "p5"}),
    ]
)
MAPPED_DATA = StructType(MAPPED.fields[:2])
MAPPING = {"delta.columnMapping.mode": "name"}


def test_mapped_columns_have_their_physical_names_and_ids_at_every_depth(tmp_path: Path):
    rows = table(MAPPED_DATA, [{"s": {"x": 7}, "list": [{"y": 8}, None]}, {}, {"s": {"x": None}, "list": []}]).slice(1)
    rows = pa.concat_tables([rows, table(MAPPED_DATA, [{"s": {"x": 7}, "list": [{"y": 8}, None]}])])

    add = write_data_file(tmp_path, rows, MAPPED, partition={"p5": "2024-01-01"}, properties=MAPPING, now_ms=17)

    file = pq.ParquetFile(tmp_path / add["path"])
    assert file.read().to_pylist() == [
        {"p1": None, "p3": None},
        {"p1": {"p2": None}, "p3": []},
        {"p1": {"p2": 7}, "p3": [{"p4": 8}, None]},
    ]
    text = str(file.schema)
    assert all(f"field_id={number} p{number}" in text for number in range(1, 5))
    assert add["partitionValues"] == {"p5": "2024-01-01"}
    assert add["path"].startswith("p5=2024-01-01/on-read-")
    assert json.loads(add["stats"])["nullCount"] == {"p1": {"p2": 2}, "p3": 1}


def test_a_schema_that_contradicts_the_mode_of_mapping_is_refused(tmp_path: Path):
    rows = table(MAPPED_DATA, [{}])

    with pytest.raises(ValueError, match="does not map columns"):
        write_data_file(tmp_path, rows, MAPPED_DATA, partition={}, properties={}, now_ms=1)
    with pytest.raises(ValueError, match="physical name None while the table maps columns"):
        write(tmp_path, schema(a=LongType()), [{"a": 1}], **{"columnMapping.mode": "id"})
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_the_types_that_spark_reads_fastest(tmp_path: Path):
    """Times are microseconds and never INT96, decimals integers up to 18 digits; nothing of Arrow's in the footer."""
    of = schema(
        at=TimestampType(),
        wall=TimestampNTZType(),
        p9=DecimalType(9, 2),
        p18=DecimalType(18, 2),
        p38=DecimalType(38, 2),
    )

    add = write(tmp_path, of, [{"at": MOMENT.replace(tzinfo=UTC), "wall": MOMENT}])

    file = pq.ParquetFile(tmp_path / add["path"])
    leaves = [file.schema.column(i) for i in range(5)]
    assert [leaf.physical_type for leaf in leaves] == ["INT64", "INT64", "INT32", "INT64", "FIXED_LEN_BYTE_ARRAY"]
    assert json.loads(leaves[0].logical_type.to_json())["isAdjustedToUTC"] is True
    assert json.loads(leaves[1].logical_type.to_json())["isAdjustedToUTC"] is False
    assert all(leaf.max_definition_level == 1 for leaf in leaves)
    assert set(file.metadata.metadata) == {b"org.apache.spark.version"}
    assert file.metadata.row_group(0).column(0).compression == "SNAPPY"
    assert add["size"] == (tmp_path / add["path"]).stat().st_size
    assert (add["modificationTime"], add["dataChange"], add["partitionValues"]) == (17, True, {})


def test_no_footer_tells_ends_of_floats(tmp_path: Path):
    """Those of pyarrow pass over NaN, and Spark would skip the row group although NaN is greater than all."""
    of = schema(
        d=DoubleType(),
        i=LongType(),
        s=schema(f=FloatType(), t=StringType()),
        l=ArrayType(DoubleType()),
        m=MapType(LongType(), FloatType()),
    )

    add = write(tmp_path, of, [{"d": math.nan, "i": 1, "s": {"f": 1.0, "t": "x"}, "l": [1.0], "m": [(1, 1.0)]}])

    group = pq.ParquetFile(tmp_path / add["path"]).metadata.row_group(0)
    leaves = [group.column(i) for i in range(group.num_columns)]
    assert {leaf.path_in_schema for leaf in leaves if leaf.is_stats_set} == {"i", "s.t", "m.key_value.key"}
    only = write(tmp_path, schema(d=DoubleType()), [{"d": 1.0}])
    assert not pq.ParquetFile(tmp_path / only["path"]).metadata.row_group(0).column(0).is_stats_set


def test_row_groups_are_bounded_by_rows_and_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One long text makes its own group small and no other."""
    monkeypatch.setattr(data_file, "_MOST_ROWS", 8)
    monkeypatch.setattr(data_file, "_MOST_BYTES", 1000)
    rows = [{"t": "x"} for _ in range(31)] + [{"t": "y" * 5000}]

    add = write(tmp_path, schema(t=StringType()), rows)

    file = pq.ParquetFile(tmp_path / add["path"])
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [8, 8, 8, 4, 2, 1, 1]
    assert file.read().to_pylist() == rows


def test_a_change_file_ends_with_the_kind_of_change(tmp_path: Path):
    of = schema(id=LongType(), day=StringType())
    rows = pa.table({"id": pa.array([1, 2], pa.int64()), "_change_type": ["insert", "delete"]})

    cdc = write_change_file(tmp_path, rows, of, partition={"day": "a b"}, properties={})

    assert cdc == {
        "path": cdc["path"],
        "partitionValues": {"day": "a b"},
        "size": (tmp_path / unquote(cdc["path"])).stat().st_size,
        "dataChange": False,
    }
    assert cdc["path"].startswith("_change_data/day=a%20b/cdc-00000-")
    assert pq.ParquetFile(tmp_path / unquote(cdc["path"])).read().to_pylist() == rows.to_pylist()


@pytest.mark.parametrize(
    ("value", "folder", "url"),
    [
        ("plain", "p=plain", "p=plain"),
        (None, "p=__HIVE_DEFAULT_PARTITION__", "p=__HIVE_DEFAULT_PARTITION__"),
        ("", "p=__HIVE_DEFAULT_PARTITION__", "p=__HIVE_DEFAULT_PARTITION__"),
        ("a/b", "p=a%2Fb", "p=a%252Fb"),
        ("100%", "p=100%25", "p=100%2525"),
        ("2024-01-01 00:00:00", "p=2024-01-01 00%3A00%3A00", "p=2024-01-01%2000%253A00%253A00"),
        ("ä€\U0001f600", "p=ä€\U0001f600", "p=ä€\U0001f600"),
        ("a\u00a0\u2028\x85b", "p=a\u00a0\u2028\x85b", "p=a%C2%A0%E2%80%A8%C2%85b"),
        ("<|>`", "p=<|>`", "p=%3C%7C%3E%60"),
        ("\\{x}^[y]", "p=%5C%7Bx}%5E%5By%5D", "p=%255C%257Bx%7D%255E%255By%255D"),
        ("\"#'*?=", "p=%22%23%27%2A%3F%3D", "p=%2522%2523%2527%252A%253F%253D"),
        ("x\n\x7f", "p=x%0A%7F", "p=x%250A%257F"),
        ("~!$&()+,;@-_.", "p=~!$&()+,;@-_.", "p=~!$&()+,;@-_."),
    ],
)  # fmt: skip
def test_a_partition_s_folder_is_escaped_as_hive_does_and_its_path_as_java_s_urls(tmp_path: Path, value, folder, url):
    of = schema(id=LongType(), p=StringType())
    rows = table(schema(id=LongType()), [{"id": 1}])

    add = write_data_file(tmp_path, rows, of, partition={"p": value}, properties={}, now_ms=1)

    assert [path.name for path in tmp_path.iterdir()] == [folder]
    assert add["path"].rpartition("/")[0] == url
    assert (tmp_path / unquote(add["path"])).is_file()
    assert add["partitionValues"] == {"p": value or None}


# -- what is refused ----------------------------------------------------------------------------


def required(name: str, dtype: DataType) -> StructType:
    return StructType([StructField("id", LongType()), StructField(name, dtype, nullable=False)])


@pytest.mark.parametrize(
    ("of", "row", "column"),
    [
        (required("a", LongType()), {"a": None}, "a"),
        (schema(s=required("x", LongType())), {"s": {"x": None}}, "s.x"),
        (schema(s=required("x", LongType())), {"s": None}, "s.x"),
        (schema(s=schema(t=required("x", LongType()))), {"s": {"t": None}}, "s.t.x"),
        (schema(a=ArrayType(LongType(), containsNull=False)), {"a": [1, None]}, "a.element"),
        (schema(a=ArrayType(required("x", LongType()))), {"a": [None, {"x": None}]}, "a.element.x"),
        (schema(m=MapType(StringType(), LongType(), valueContainsNull=False)), {"m": [("k", None)]}, "m.value"),
        (schema(m=MapType(StringType(), required("x", LongType()))), {"m": [("k", {"x": None})]}, "m.value.x"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_null_where_the_table_allows_none_is_refused_before_anything_is_written(tmp_path: Path, of, row, column):
    """In structs as Delta does, where a NULL struct's fields are NULL; in arrays and maps more strictly."""
    with pytest.raises(NullViolationError, match=f"column '{column}' is NOT NULL"):
        write(tmp_path, of, [row])
    assert list(tmp_path.iterdir()) == []


def test_null_beside_what_is_required_is_allowed(tmp_path: Path):
    of = StructType(
        [
            StructField("id", LongType(), nullable=False),
            StructField("a", ArrayType(required("x", LongType()))),
            StructField("m", MapType(StringType(), ArrayType(LongType(), containsNull=False))),
        ]
    )
    rows = [
        {"id": 0, "a": [{"x": None}], "m": [("z", [None])]},
        {"id": 1, "a": [None, {"id": None, "x": 1}], "m": [("k", None)]},
        {"id": 2, "a": None, "m": None},
        {"id": None, "a": [{"x": None}], "m": [("z", [None])]},
    ]

    add = write_data_file(tmp_path, table(of, rows).slice(1, 2), of, partition={}, properties={}, now_ms=1)

    assert pq.ParquetFile(tmp_path / add["path"]).read().to_pylist() == rows[1:3]


def test_columns_may_be_null_altogether(tmp_path: Path):
    of = schema(
        m=MapType(StringType(), required("x", LongType())),
        a=ArrayType(required("x", LongType())),
        s=schema(m=MapType(StringType(), LongType())),
        l=ArrayType(MapType(StringType(), LongType())),
    )
    rows = [dict.fromkeys(of.names), {"m": None, "a": [], "s": {"m": None}, "l": [None, []]}]

    for kept in (rows, rows[:1], rows[1:]):
        add = write(tmp_path, of, kept)
        assert pq.ParquetFile(tmp_path / add["path"]).read().to_pylist() == kept


def test_a_required_partition_column_needs_a_value(tmp_path: Path):
    of = required("p", StringType())

    with pytest.raises(NullViolationError, match="column 'p'"):
        write_data_file(tmp_path, pa.table({"id": [1]}), of, partition={"p": ""}, properties={}, now_ms=1)


@pytest.mark.parametrize("dtype", [NullType(), VariantType(), StructType([])], ids=repr)
def test_types_that_only_spark_writes_are_refused(tmp_path: Path, dtype):
    for within in (dtype, ArrayType(dtype), schema(x=dtype)):
        with pytest.raises(ValueError, match="only Spark writes"):
            write_data_file(
                tmp_path, pa.table({"c": pa.nulls(1)}), schema(c=within), partition={}, properties={}, now_ms=1
            )


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (pa.table({"a": [1], "b": [{"x": 1}]}).slice(1), "without rows"),
        (pa.table({"a": [1]}), "have the columns"),
        (pa.table({"b": [{"x": 1}], "a": [1]}), "have the columns"),
        (pa.table({"a": pa.array([1], pa.int32()), "b": [{"x": 1}]}), "'a' came as int32"),
        (pa.table({"a": [1], "b": [{"y": 1}]}), "'b' came as struct<y: int64>"),
        (pa.table({"a": [1], "b": [{"x": 1, "y": 1}]}), "'b' came as struct"),
        (pa.table({"a": pa.array([1]).dictionary_encode(), "b": [{"x": 1}]}), "'a' came as dictionary"),
    ],
    ids=["none", "missing", "order", "type", "name", "more", "dictionary"],
)
def test_rows_of_another_schema_are_refused(tmp_path: Path, rows, problem):
    of = schema(a=LongType(), b=schema(x=LongType()))

    with pytest.raises(ValueError, match=problem):
        write_data_file(tmp_path, rows, of, partition={}, properties={}, now_ms=1)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_partition_column_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no partition columns \\['q'\\]"):
        write_data_file(
            tmp_path, pa.table({"a": [1]}), schema(a=LongType()), partition={"q": "1"}, properties={}, now_ms=1
        )


def test_a_file_that_could_not_be_finished_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        msg = "No space left on device"
        raise OSError(msg)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)

    with pytest.raises(OSError, match="No space"):
        write(tmp_path, schema(a=LongType()), [{"a": 1}])
    assert list(tmp_path.iterdir()) == []
