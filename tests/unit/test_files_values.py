"""Values of files: exactly as they were written, whatever the type, or refused with the reason; nothing in between."""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from stream_merge.sources.envelopes import plain
from stream_merge.sources.files import csv_records
from stream_merge.sources.files.csv_records import CsvRecords
from stream_merge.sources.files.decoding import FileDecoder, JsonLines, json_encoding

MANY = 600
"""Enough records for the way that takes them all at once."""


class Refused(str):
    """Part of the reason that a value is refused for."""


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("UTC"))  # as Arrow gives it


JSON: dict[str, dict[str, Any]] = {
    "tinyint": {
        "127": 127,
        "-128": -128,
        "200": Refused("200"),
        "1.0": 1,
        "1.5": Refused("1.5 is not a valid tinyint"),
        '"1"': Refused("tinyint"),
    },
    "smallint": {"32767": 32767, "32768": Refused("32768")},
    "int": {
        "2147483647": 2147483647,
        "-2147483649": Refused("-2147483649"),
        "1e2": 100,
        "1e1000000": Refused("out of range"),
        "null": None,
    },
    "bigint": {
        "9223372036854775807": 9223372036854775807,
        "9223372036854775808": Refused("9223372036854775808"),
        "true": Refused("true is not"),
    },
    "decimal(10,2)": {
        "1.23": Decimal("1.23"),
        "1.230": Decimal("1.23"),
        "1.239": Refused("more than 2 digits"),
        "1e3": Decimal("1000.00"),
        "99999999.99": Decimal("99999999.99"),
        "100000000": Refused("does not fit"),
        '"1.5"': Decimal("1.50"),
        "0": Decimal("0.00"),
        "-0.001": Refused("more than 2 digits"),
    },
    "decimal(38,0)": {"9" * 38: Decimal("9" * 38), "9" * 39: Refused("does not fit")},
    "decimal(38,18)": {
        "22242774718563417756883513693": Refused("does not fit"),
        "-22242774718563417756.5": Decimal("-22242774718563417756.500000000000000000"),
    },
    "decimal(38,38)": {"2147483648": Refused("does not fit"), "0.5": Decimal(f"0.5{'0' * 37}")},
    "decimal(18,0)": {"3562e-39": Refused("more than 0 digits"), "35620e-1": Decimal(3562)},
    "decimal(18,1)": {"1e-40": Refused("more than 1 digits"), "10E-01": Decimal("1.0"), "0e-41": Decimal("0.0")},
    "double": {
        "0.1": 0.1,
        "9007199254740992": 9007199254740992.0,
        "9007199254740993": Refused("no exact double"),
        "1e400": Refused("out of range"),
        '"NaN"': math.nan,
        "NaN": Refused("not JSON"),
        '"1"': Refused("not a number"),
    },
    "float": {"0.5": 0.5, "16777217": Refused("no exact float"), "3.5e38": Refused("out of range")},
    "boolean": {"true": True, "false": False, '"true"': Refused("boolean"), "1": Refused("boolean")},
    "string": {
        '"x"': "x",
        '""': "",
        r'"\ud83d\ude00"': "\U0001f600",
        r'"\ud83d"': Refused("does not fit string"),
        "1.10": "1.10",
        "12345678901234567890": "12345678901234567890",
        '{"a": [1, 2.50, "\u00e4"]}': '{"a":[1,2.50,"\u00e4"]}',
        "true": "true",
    },
    "binary": {'"AP8="': b"\x00\xff", '"%%"': Refused("base64")},
    "date": {
        '"2024-02-29"': date(2024, 2, 29),
        '"2023-02-29"': Refused("2023-02-29"),
        '"2024-1-5"': date(2024, 1, 5),
        '"2024-01-01T10:00:00"': Refused("not a date"),
        "19000": Refused("date"),
    },
    "timestamp": {
        '"2024-05-01T10:00:00.123456Z"': at("2024-05-01T10:00:00.123456"),
        '"2024-05-01 10:00:00+02"': at("2024-05-01T08:00:00"),
        '"2024-05-01T10:00:00"': at("2024-05-01T10:00:00"),
        '"2024-05-01"': at("2024-05-01T00:00:00"),
        '"2024-05-01T10:00:00.1234567Z"': Refused("whole number of microseconds"),
        '"2024-05-01T10:00:00.123456000Z"': at("2024-05-01T10:00:00.123456"),
        '"9999-12-31T23:59:59.999999Z"': at("9999-12-31T23:59:59.999999"),
        '"9999-12-31T23:59:59-01:00"': Refused("years 1 to 9999"),
        '"0001-01-01T00:00:00Z"': at("0001-01-01T00:00:00"),
        '"10:00:00"': Refused("not a time"),
        "1714557600": Refused("timestamp"),
    },
    "timestamp_ntz": {
        '"2024-05-01T10:00:00"': datetime(2024, 5, 1, 10),
        '"2024-05-01T10:00:00+02:00"': Refused("without zone"),
        '"2024-13-01T10:00:00"': Refused("2024-13-01"),
    },
    "array<decimal(38,38)>": {"[2147483648]": Refused("does not fit"), "[0.5]": [Decimal(f"0.5{'0' * 37}")]},
    "array<decimal(18,0)>": {"[3562e-39]": Refused("more than 0 digits"), "[1e3]": [Decimal(1000)]},
    "struct<a:decimal(10,2)>": {'{"a": 100000000}': Refused("does not fit"), '{"a": 1.5}': {"a": Decimal("1.50")}},
    "array<tinyint>": {"[1, null]": [1, None], "[200]": Refused("200"), "1": Refused("array")},
    "array<struct<a:int>>": {'[{"a": 1, "b": 2}]': [{"a": 1}], '[{"a": 1.5}]': Refused("1.5")},
    "struct<a:decimal(3,1),b:date>": {
        '{"a": 1.5, "b": "2024-01-01"}': {"a": Decimal("1.5"), "b": date(2024, 1, 1)},
        '{"a": 1.55}': Refused("more than 1 digits"),
        '{"a": 1, "a": 2}': Refused("'a' is there twice"),
        '{"b": null, "c": 1}': {"a": None, "b": None},
    },
    "map<string,int>": {'{"x": 1}': [("x", 1)], '{"x": 1, "x": 2}': Refused("'x' is there twice")},
}
CSV: dict[str, dict[str, Any]] = {
    "tinyint": {"127": 127, " 5 ": 5, "+5": 5, "007": 7, "200": Refused("200"), "1.0": Refused("not an integer")},
    "bigint": {"-9223372036854775808": -9223372036854775808, "9223372036854775808": Refused("out of range"), "": None},
    "decimal(10,2)": {
        "1.239": Refused("more than 2 digits"),
        "1.230": Decimal("1.23"),
        ".5": Decimal("0.50"),
        "-99999999.99": Decimal("-99999999.99"),
        "1e-1": Decimal("0.10"),
        "100000000": Refused("does not fit"),
        "1,5": Refused("2 field(s)"),
        "NaN": Refused("not a number"),
    },
    "double": {
        "0.1": 0.1,
        "nan": math.nan,
        "-Infinity": -math.inf,
        "9007199254740993": Refused("no exact double"),
        "1e400": Refused("out of range"),
        "1d": Refused("not a number"),
    },
    "float": {"0.25": 0.25, "16777217": Refused("no exact float")},
    "boolean": {"t": True, "FALSE": False, "1": True, "2": Refused("not a boolean")},
    "string": {
        "x": "x",
        " x ": " x ",
        '""': "",
        "": None,
        '"a""b"': 'a"b',
        '"a\nb"': "a\nb",
        'a"b': 'a"b',
        '"a"b': Refused("not closed"),
        '"a': Refused("not closed"),
    },
    "binary": {"x": b"x"},
    "date": {"2024-01-01": date(2024, 1, 1), "2024-01-01 10:00:00": Refused("not a date"), '""': None},
    "timestamp": {
        "2024-05-01 10:00:00.123456+00": at("2024-05-01T10:00:00.123456"),
        "2024-05-01 10:00": at("2024-05-01T10:00:00"),
        "2024-05-01 24:00:00": Refused("not a time within"),
        "2024-05-01 10:00:00.1234567": Refused("whole number of microseconds"),
    },
    "timestamp_ntz": {"2024-05-01 10:00:00": datetime(2024, 5, 1, 10), "2024-05-01 10:00:00+01": Refused("zone")},
}
CASES = [
    pytest.param(kind, ddl, text, expected, id=f"{kind} {ddl} {text}")
    for kind, cases in (("json", JSON), ("csv", CSV))
    for ddl, texts in cases.items()
    for text, expected in texts.items()
]


def read(kind: str, ddl: str, records: list[bytes], **options: Any) -> list[Any]:
    """What becomes of records with a column `v`: its value, or why they are refused."""
    rows = events(kind, ddl, records, **options)
    return [Refused(row["fatal"] or row["error"]) if row["fatal"] or row["error"] else row["row"]["v"] for row in rows]


def events(
    kind: str,
    ddl: str,
    records: list[bytes],
    *,
    zone: str = "UTC",
    is_inferred: bool = False,
    case_sensitive: bool = False,
) -> list[dict[str, Any]]:
    """What becomes of records with a column `v`."""
    columns = ddl if " " in ddl else f"v {ddl}"
    fields = plain.declared_type(f"struct<{','.join(column.replace(' ', ':', 1) for column in columns.split(', '))}>")
    assert isinstance(fields, T.StructType)
    records_of: Any
    if kind == "json":
        declared = {f.name: json_encoding(f.dataType, zone) for f in fields.fields}
        records_of = JsonLines(declared=declared, fields=fields, is_inferred=is_inferred, case_sensitive=case_sensitive)
    else:
        declared = {f.name: csv_records.encoding(f.dataType, zone) for f in fields.fields}
        records_of = CsvRecords(declared=declared, delimiter=",", has_header=False, case_sensitive=False)
    batch = (pa.array(records, pa.binary()), pa.array([1] * len(records), pa.int64()))
    (found,) = FileDecoder(records=records_of, fields=fields)(iter([batch]))
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN is NaN, 1 is not True, and 1.0 is not 1


@pytest.mark.parametrize(("kind", "ddl", "text", "expected"), CASES)
def test_a_value_is_exact_or_refused(kind: str, ddl: str, text: str, expected: Any) -> None:
    """The same alone, and among many that are read at once."""
    record = (f'{{"v": {text}}}' if kind == "json" else text).encode()

    (alone,) = read(kind, ddl, [record])
    many = read(kind, ddl, [record] * MANY)

    if isinstance(expected, Refused):
        assert isinstance(alone, Refused)
        assert expected in alone
    else:
        assert same(alone, expected)
    assert all(same(one, alone) for one in many)


def test_one_bad_line_spoils_no_other() -> None:
    """Of many lines that are read at once those that cannot be read are refused, each in its place."""
    good = [f'{{"v": {n}, "left out": {{"a": {n}}}}}'.encode() for n in range(3_000)]
    good[1_234], good[2_999] = b'{"v": 1.5}', b'{"v": "\xff"}'

    found = read("json", "bigint", good)

    assert {i: str(one) for i, one in enumerate(found) if isinstance(one, Refused)} == {
        1_234: "column 'v': 1.5 is not a valid bigint",
        2_999: "byte 7 is not UTF-8",
    }
    assert [one for one in found if not isinstance(one, Refused)] == [
        n for n in range(3_000) if n not in (1_234, 2_999)
    ]


@pytest.mark.parametrize("record", [b"a,\xff", b"\xff,a", b'"\xff",a'])
def test_a_csv_record_that_is_not_utf8_is_refused(record: bytes) -> None:
    """It would be stored with a replacement character."""
    found = read("csv", "v string, w string", [b"good,1", record, b"\xc3\xa4,2"])

    assert [found[0], found[2]] == ["good", "\u00e4"]
    assert "is not UTF-8" in found[1]


@pytest.mark.parametrize("count", [1, MANY])
def test_a_clock_without_zone_is_that_of_the_session(count: int) -> None:
    """An hour that clocks show twice, or never, is not guessed."""
    texts = ["2024-07-01 10:00:00", "2024-10-27 02:30:00", "2024-03-31 02:30:00"]
    found = [read("csv", "timestamp", [text.encode()] * count, zone="Europe/Berlin")[-1] for text in texts]

    assert found == [
        at("2024-07-01T08:00:00"),
        "column 'v': '2024-10-27 02:30:00' has no zone, and clocks in Europe/Berlin show it twice",
        "column 'v': '2024-03-31 02:30:00' has no zone, and clocks in Europe/Berlin show it never",
    ]


def test_a_nested_field_that_an_inferred_schema_lacks_is_refused() -> None:
    """As one at the top; a schema that was given leaves it out."""
    line = b'{"v": {"a": 1, "b": {"c": 1}}}'

    assert read("json", "struct<a:int>", [line]) == [{"a": 1}]
    assert read("json", "struct<a:int>", [line], is_inferred=True) == ["a line has field(s) that the schema lacks: v.b"]


def test_a_field_is_the_column_of_its_name_in_any_case() -> None:
    """Alone and among many, nested or not; two of one name are refused, unless names are compared with case."""
    ddl, twice = "v struct<a:int>, w int", "field 'w' appears twice, in different case"
    cases = {
        b'{"V": {"A": 1}, "w": 2}': ({"v": {"a": 1}, "w": 2}, None),
        b'{"v": {"a": 1}, "W": 2}': ({"v": {"a": 1}, "w": 2}, None),
        b'{"v": null, "W": 2, "w": 2}': ({"v": None, "w": None}, twice),
    }

    for record, expected in cases.items():
        for count in (1, MANY):
            found = [(row["row"], row["error"]) for row in events("json", ddl, [record] * count)]
            assert found == [expected] * count
    assert [(row["row"], row["error"]) for row in events("json", ddl, [*cases] * MANY)] == [*cases.values()] * MANY
    for count in (1, MANY):
        found = events("json", ddl, [b'{"v": {"A": 1}, "W": 2, "w": 3}'] * count, case_sensitive=True)
        assert [(row["row"], row["left_out"]) for row in found] == [({"v": {"a": None}, "w": 3}, "W, v.A")] * count


def test_fields_that_a_given_schema_lacks_are_named_where_they_have_a_value() -> None:
    records = [b'{"v": 1, "x": "a", "y": {"z": 1}}', b'{"v": 2, "x": null}', b'{"v": 3}', b'{"v": 4, "y": {"z": 2}}']

    for count in (1, MANY):
        found = events("json", "int", records * count)
        assert [(row["row"]["v"], row["left_out"]) for row in found] == [
            (1, "x, y"),
            (2, None),
            (3, None),
            (4, "y"),
        ] * count


def test_a_file_of_an_array_or_of_an_object_on_several_lines_is_refused() -> None:
    """Its single lines are no events; a later line like that is a broken one."""
    for first in (b"[", b'[{"v": 1},', b" { "):
        found = events("json", "int", [first, b'{"v": 1}'])
        assert found[0]["fatal"].startswith("the file is a JSON array or")
    assert [row["fatal"] for row in events("json", "int", [b'{"v": 1}', b"["])] == [None, None]
