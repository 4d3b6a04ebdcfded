"""Records decoded all at once become what they become one by one: only the time differs."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from wire_rows import (
    COLUMNS,
    ODD,
    PLAIN,
    ROW,
    Record,
    debezium_json,
    fields_of,
    formats,
    raw,
)

from stream_merge.sources.decode import bulk, decoding
from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes import plain
from stream_merge.sources.envelopes.plain import PlainJson
from stream_merge.sources.wire import json_table, many
from stream_merge.sources.wire.encodings import decimal_from_bytes, decimal_from_text, decode
from stream_merge.sources.wire.keys import JsonKey
from stream_merge.sources.wire.strict_json import UndecodableError


@pytest.fixture(params=["debezium", "schema block", "flattened", "json", "plain"])
def decoder(request: pytest.FixtureRequest) -> tuple[Decoder, Callable[[Any, int], Record]]:
    form, encodings, known, write = formats()[request.param]
    columns = fields_of(encodings)
    return Decoder(format=form, columns=columns, keys=("id",), known=known, max_value_bytes=20_000), write


def decoded(by: Decoder, records: list[Record]) -> tuple[pa.StructArray, set[Any]]:
    deleted: set[Any] = set()
    keys, values = (pa.array([record[i] for record in records], pa.binary()) for i in (0, 1))
    partitions = pa.array([i % 3 for i in range(len(records))], pa.int32())
    return by.decode(Records(keys, values, partitions), deleted), deleted


def expect_the_same(by: Decoder, records: list[Record], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    at_once_found, at_once_deleted = decoded(by, records)
    with monkeypatch.context() as one_by_one:
        one_by_one.setattr(decoding, "FEWEST", len(records) + 1)
        found, deleted = decoded(by, records)
    assert at_once_found.type == found.type
    wanted = found.to_pylist()
    for record, got, want in zip(records, at_once_found.to_pylist(), wanted, strict=True):
        assert repr(got) == repr(want), record  # repr tells -0.0 from 0.0, and NaN is NaN
    assert at_once_deleted == deleted
    return list(wanted)


@pytest.fixture
def read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The values that were read one by one."""
    found: list[bytes] = []
    read = Decoder._read

    def noted(self: Decoder, key: bytes | None, value: bytes | None) -> Any:
        found.append(value or b"")
        return read(self, key, value)

    monkeypatch.setattr(Decoder, "_read", noted)
    return found


def test_a_batch_as_expected_is_decoded_at_once(decoder, read_one_by_one, monkeypatch):
    by, write = decoder
    records = [write({**ROW, "id": turn}, turn) for turn in range(500)]
    decoded(by, records[:400])  # what a schema block is like is learnt one by one
    read_one_by_one.clear()

    decoded(by, records)

    assert not read_one_by_one
    rows = expect_the_same(by, records, monkeypatch)
    assert {"upsert", "delete"} == {row["kind"] for row in rows}


def test_nulls_are_told_from_missing_fields_in_either_spacing(read_one_by_one, monkeypatch):
    """NULL in the table, and `absent` where the field is not there."""
    form, encodings, known, _ = formats()["json"]
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)
    row = {**dict.fromkeys(PLAIN), "id": 1, "turn": 1, "name": "a"}
    spaced = [json.dumps({**row, "id": i}).encode() for i in range(300)]
    compact = [raw({**row, "id": i}) for i in range(300)]
    lacking = [raw({name: value for name, value in row.items() if name != "doc"}), raw({**row, "name": ": null"})]

    decoded(by, [(None, value) for value in (*spaced, *compact, *lacking)])

    assert read_one_by_one == lacking
    rows = expect_the_same(by, [(None, value) for value in (*spaced, *compact, *lacking)], monkeypatch)
    assert [row["absent"] for row in rows[-3:]] == [None, ["doc"], None]


def test_a_null_marker_does_not_stand_for_a_missing_field(monkeypatch):
    """The text says `:null` once, and the row has one NULL: of another field, which is missing."""
    declared = {
        "id": plain.declared_encoding("bigint"),
        "name": plain.declared_encoding("string"),
    }
    form = PlainJson(declared=declared, deletes=("op", "d"))
    by = Decoder(format=form, columns=fields_of(declared), keys=("id",), known=frozenset({""}), max_value_bytes=900)
    records = [(None, raw({"id": i, "name": "a", "op": "u"})) for i in range(300)]
    records[7] = None, raw({"id": 7, "op": None})
    records[8] = None, raw({"id": 8, "name": None, "op": None})

    rows = expect_the_same(by, records, monkeypatch)

    assert [row["absent"] for row in rows[6:10]] == [None, ["name"], None, None]


def test_rows_that_a_snapshot_has_read_are_told_by_their_operation(monkeypatch):
    """Without `source.snapshot`: by their position they would hide changes that were open during the snapshot."""
    form, encodings, known, write = formats()["flattened"]
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)
    records = [write({**ROW, "id": turn}, 0) for turn in range(300)]
    records[5] = records[5][0], (records[5][1] or b"").replace(b'"__op":"c"', b'"__op":"r"')

    rows = expect_the_same(by, records, monkeypatch)

    assert [turn for turn, row in enumerate(rows) if row["is_snapshot"]] == [5]


def test_rows_whose_keys_may_have_changed_are_looked_at_one_by_one(read_one_by_one, monkeypatch):
    """The key that the record key has, one that it lacks, and rows of which nobody tells what they were."""
    form, encodings, known, write = formats()["debezium"]
    keys = ("id", "small", "tags")
    by = Decoder(format=form, columns=fields_of(encodings), keys=keys, known=known, max_value_bytes=20_000)
    records = []
    for turn in range(400):
        key, value = write({**ROW, "id": turn}, 4 * turn + 2)
        event = json.loads(value)
        event["before"] = [None, event["after"], {**event["after"], "small": turn}, {"id": -7, "small": None}][turn % 4]
        if turn % 4 == 3:
            event["before"] = {**dict.fromkeys(event["after"]), **event["before"]}
        records.append((key, raw(event)))

    kinds = [row["kind"] for row in expect_the_same(by, records, monkeypatch)]

    assert kinds == ["upsert", "upsert", "undecodable", "upsert"] * 100
    assert len(read_one_by_one) == 400 + 300  # all, and those of which something before is known: a key is an array


def test_a_schema_that_lacks_a_key_stops_no_other_from_being_read_at_once(monkeypatch, caplog):
    form, encodings, known, write = formats()["debezium"]
    columns = fields_of(encodings).add("later", "string")
    by = Decoder(format=form, columns=columns, keys=("id", "later"), known=known, max_value_bytes=20_000)

    found = expect_the_same(by, [write({**ROW, "id": turn}, 4 * turn + 2) for turn in range(300)], monkeypatch)

    assert {row["kind"] for row in found} == {"upsert"}
    assert [record.event for record in caplog.records] == []


@pytest.mark.parametrize("text", ["1_000", "\u0661\u0662", " 12 ", "12\n", "0x1", "1e", ".", ""])
def test_texts_that_only_python_takes_for_numbers_are_refused(text):
    assert list(decode(decimal_from_text(10, 2), [text, "+1.5e1"]).errors) == [0]


@pytest.mark.parametrize("fewest", [1, json_table.FEWEST])
def test_odd_values_leave_the_others_of_a_batch_alone(decoder, fewest, read_one_by_one, monkeypatch):
    """Wherever they are, and however many: each is what it is when read alone, also those that can be read at once."""
    for module in (decoding, json_table, bulk):
        monkeypatch.setattr(module, "FEWEST", fewest)
    by, write = decoder
    records = [write({**ROW, "id": turn}, turn) for turn in range(2_000)]
    decoded(by, records[:400])
    odd = [(name, value) for name, values in ODD.items() for value in values]
    for i, (name, value) in enumerate(odd):
        records[14 * i + 1] = write({**ROW, "id": i, name: value}, 14 * i + 1)
    for i, name in enumerate(COLUMNS):
        records[14 * i + 2] = write({other: value for other, value in ROW.items() if other != name}, 14 * i + 2)
    for at, value in enumerate((None, b"", b"null", b"{}", b"{}{}", b"\n", b'{"a":1', b'{"op":"c"}', b"x" * 30_000)):
        records[1_300 + at] = (records[1_300 + at][0], value)
        records[1_400 + at] = (None, value)
    read_one_by_one.clear()

    decoded(by, records)

    assert len(read_one_by_one) < len(records) * 0.95  # no odd value stands in the last halves
    expect_the_same(by, records, monkeypatch)


def test_null_value_records_see_the_deletes_before_them(decoder, monkeypatch):
    by, write = decoder
    records: list[Record] = []
    for turn in range(1_200):
        records += [write({**ROW, "id": turn}, turn), (raw({"id": turn - turn % 2}), None)]

    found = expect_the_same(by, records, monkeypatch)

    assert {row["kind"] for row in found} >= {"null_value"}


def test_a_null_value_record_repeats_a_delete_that_nothing_has_followed(monkeypatch):
    """Where the row has come back in between, or something that nobody can read, it may be a delete of its own."""
    form, encodings, known, _ = formats()["json"]
    form = replace(form, deletes=("name", "gone"))
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)
    row = {**dict.fromkeys(PLAIN), "turn": 1, "name": "a"}
    records: list[Record] = []
    for key in range(0, 1_200, 3):
        for turn in range(3):  # the keys of a partition stand three apart: each record of a key is in its partition
            at = raw({"id": key + turn})
            there, gone = raw({**row, "id": key + turn}), raw({**row, "id": key + turn, "name": "gone"})
            between = (there, b"{", None)[key // 3 % 3]
            for value in (gone, between, None):
                records.append((at, value))
    records.sort(key=lambda record: json.loads(record[0] or b"")["id"] // 3)  # stable
    partitions = [[record for record in records if json.loads(record[0] or b"")["id"] % 3 == p] for p in range(3)]
    records = [record for together in zip(*partitions, strict=True) for record in together]

    found = expect_the_same(by, records, monkeypatch)

    kinds = [row["kind"] for row in found]
    assert kinds[0:9:3] == ["delete", "upsert", "null_value"]
    assert kinds[9:18:3] == ["delete", "undecodable", "null_value"]
    assert kinds[18:27:3] == ["delete", "redundant", "redundant"]


def test_record_keys_hold_numbers_exactly(monkeypatch):
    """As values do: the decimal of a key with a fraction is that of its row."""
    form, _, known, _ = formats()["json"]
    declared = {
        **form.declared,
        "id": plain.declared_encoding("decimal(20,4)"),
        "x": plain.declared_encoding("double"),
    }
    form = replace(form, key=JsonKey(), declared=declared)
    by = Decoder(format=form, columns=fields_of(declared), keys=("id", "x"), known=known, max_value_bytes=20_000)
    keys = [b'{"id":1.50,"x":-0.0}', b'{"id":9999999999999999.9999,"x":1e300}', b'{"id":-1,"x":0.1}']

    found = expect_the_same(by, [(key, None) for key in keys], monkeypatch)

    assert [row["kind"] for row in found] == ["null_value"] * 3
    assert [repr((row["row"]["id"], row["row"]["x"])) for row in found] == [
        "(Decimal('1.5000'), -0.0)",
        "(Decimal('9999999999999999.9999'), 1e+300)",
        "(Decimal('-1.0000'), 0.1)",
    ]


def test_null_value_records_see_the_upserts_behind_those_deletes(decoder, monkeypatch):
    """Deletes, upserts and records that are read alone, of few keys, in any order and in several partitions."""
    by, write = decoder
    rng = random.Random(11)
    records: list[Record] = []
    for turn in range(2_400):
        value = rng.choice([write({**ROW, "id": turn}, turn)[1]] * 6 + [None, None, b"{}"])
        records.append((rng.choice([None, *(raw({"id": key}) for key in range(40))]), value))
    decoded(by, records[:400])

    found = expect_the_same(by, records, monkeypatch)

    last: dict[tuple[int, bytes], str] = {}
    for i, ((key, value), event) in enumerate(zip(records, found, strict=True)):
        if key is None:
            continue
        place = (i % 3, key)
        if value is None:
            assert (event["kind"] == "redundant") == (last.get(place) == "delete"), i
        else:
            last[place] = event["kind"]
    assert {row["kind"] for row in found} >= {"null_value", "redundant", "upsert", "delete"}


def test_who_has_read_a_row_is_told_as_one_by_one(monkeypatch):
    """By one of two fields, whichever a record has, and by values that no connector writes."""
    form, encodings, known, write = formats()["flattened"]
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)
    records = []
    for turn in range(1_200):
        key, value = write({**ROW, "id": turn}, turn)
        said = json.loads(value or b"")
        name = "__snapshot" if turn % 3 else "__source_snapshot"
        del said["__source_snapshot"]
        records.append((key, raw({**said, name: "true"})))
    assert all(row["is_snapshot"] for row in expect_the_same(by, records, monkeypatch))

    form, encodings, known, write = formats()["debezium"]
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)
    for odd in (b"1", b"0", b"{}", b"true", b"null"):
        records = [write({**ROW, "id": turn}, turn) for turn in range(600)]
        records = [
            (key, (value or b"").replace(b'"snapshot":"false"', b'"snapshot":' + odd).replace(b'"first"', odd))
            for key, value in records
        ]
        expect_the_same(by, records, monkeypatch)


SEQUENCES = [
    '["40","44"]',
    '[null,"44"]',
    '["44",null]',
    "[]",
    "",
    '["-40","44"]',
    '["9999999999999999999","44"]',
    40,
    None,
]
"""Two that connectors write, and others."""


@pytest.mark.parametrize("name", ["debezium", "flattened"])
def test_the_last_commit_before_an_event_is_told_as_one_by_one(name, read_one_by_one, monkeypatch):
    form, encodings, known, write = formats()[name]
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)

    def record(turn: int, sequence: Any, field: str = "__source_sequence") -> Record:
        key, value = write({**ROW, "id": turn}, turn)
        said = json.loads(value or b"")
        (said["source"] if name == "debezium" else said)["sequence" if name == "debezium" else field] = sequence
        return key, raw(said)

    for sequences in (SEQUENCES[:-2], SEQUENCES[-1:], SEQUENCES):
        records = [record(turn, sequences[turn % len(sequences)]) for turn in range(600)]
        read_one_by_one.clear()
        rows = expect_the_same(by, records, monkeypatch)
        if sequences is not SEQUENCES:
            assert len(read_one_by_one) == len(records)  # by the second way alone
        wanted = {'["40","44"]': 40, '["44",null]': 44}
        assert [row["last_commit"] for row in rows] == [
            wanted.get(str(sequences[turn % len(sequences)])) for turn in range(600)
        ]
    expect_the_same(
        by,
        [record(turn, SEQUENCES[0], ["__sequence", "__source_sequence"][turn % 2]) for turn in range(600)],
        monkeypatch,
    )


def test_keys_that_need_no_reading_can_be_read(read_one_by_one, monkeypatch):
    """A delete whose image has its keys; an unreadable record key still spoils it."""
    form, encodings, known, write = formats()["debezium"]
    by = Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)
    odd = [
        b'{"id":1}',
        b'{"id":"a b"}',
        b'{"id":-0}',
        b'{"id":01}',
        b'{"id":1}\n',
        b'{"id":1,"id":2}',
        b'{"id":1}x',
        b"7",
    ]
    odd += [
        b'{"id":"\xff"}',
        b'{"id":1.5}',
        b"{}",
        b"",
        b"null",
        b'{"id":' + b"9" * 30 + b"}",
        b'{"schema":1,"payload":2}',
    ]
    records = [(odd[turn % len(odd)], write(None, 4 * turn + 3)[1]) for turn in range(1_200)]

    rows = expect_the_same(by, records, monkeypatch)

    readable = form.key.are_readable(pa.array([*odd, None], pa.binary())).to_pylist()
    assert [key for key, is_sure in zip(odd, readable, strict=False) if is_sure] == odd[:3]
    assert readable[-1]
    assert {row["kind"] for row in rows} == {"delete", "undecodable"}


PIECES = [
    *(
        b":null",
        b"null",
        b"NaN",
        b"-0",
        b"1e5",
        b"}{",
        b"}\n{",
        b",",
        b'"',
        b"\\u0000",
        b"\\ud800",
        b"\xff",
        b" ",
        b"\n",
    ),
    *(b"[", b"]", b"{}", b'"id":1,', b'"name":null,', b'"op":"c",', b"-", b"0", b"\x00", b"9" * 20, b'\\"', b"true"),
]


def mutated(text: bytes, rng: random.Random) -> bytes:
    """The text with one to three small changes."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rng.randint(1, 4) :]
        elif kind == 2:
            text = text[:at] + rng.choice(PIECES) + text[at + rng.randint(1, 6) :]
        else:
            other = rng.randrange(len(text) + 1)
            text = text[: min(at, other)] + text[max(at, other) :] if rng.random() < 0.3 else text + text[at:other]
    return text


def test_whatever_is_changed_in_a_text_it_is_read_the_same(decoder, read_one_by_one, monkeypatch):
    by, write = decoder
    rng = random.Random(5)
    records = [write({**ROW, "id": turn}, turn) for turn in range(300)]
    decoded(by, records)
    for module in (decoding, json_table, bulk):
        monkeypatch.setattr(module, "FEWEST", 1)
    records = [(key, mutated(value or b"", rng)) for key, value in records * 5]
    read_one_by_one.clear()

    decoded(by, records)

    assert len(read_one_by_one) < len(records)  # some changes are none
    expect_the_same(by, records, monkeypatch)


ENDS = [(b"\x80", b"\0"), (b"\x7f", b"\xff"), (b"\xff", b"\xff"), (b"\0", b"\0")]
"""First byte and those behind it, of the least and the greatest integers and those around zero."""


@pytest.mark.parametrize("most_bytes", [6, 9])
def test_decimals_of_bytes_are_read_as_one_by_one(most_bytes):
    """Up to six bytes all of them at once, by shifts; a longer one has its batch read otherwise."""
    encoding = decimal_from_bytes(15, 2, written=2)
    assert encoding.many is not None
    rng = random.Random(most_bytes)
    kinds = set()
    for _ in range(500):
        lengths = [rng.randint(1, most_bytes) for _ in range(rng.randint(1, 12))]
        raws = [rng.choice([rng.randbytes(n), *(a + (n - 1) * b for a, b in ENDS)]) for n in lengths]
        texts = [None if rng.random() < 0.1 else base64.b64encode(raw).decode() for raw in raws]

        wanted = decode(encoding, texts)

        found = encoding.many(pa.array(texts, pa.string()))
        kinds.add(found is None)
        assert found is None if wanted.errors else found is not None and found.equals(wanted.values)
    assert kinds == ({False} if most_bytes == 6 else {False, True})


@pytest.mark.parametrize("text", ["", "AMg", "A===", "=AMg", "AM=g", "AMg=\n", "AM g", "AMg\u00e9", "\u00e9==", "****"])
def test_decimals_that_are_no_base64_are_left_to_be_read_one_by_one(text):
    encoding = decimal_from_bytes(14, 2, written=2)
    assert encoding.many is not None
    assert encoding.many(pa.array(["AMg=", text, None], pa.string())) is None


def test_bits_behind_a_decimals_last_byte_say_nothing():
    encoding = decimal_from_bytes(14, 2, written=2)
    assert encoding.many is not None
    assert encoding.many(pa.array(["AR==", "AMj="], pa.string())).to_pylist() == [Decimal("0.01"), Decimal("2.00")]
    assert decode(encoding, ["AR==", "AMj="]).values.to_pylist() == [Decimal("0.01"), Decimal("2.00")]


@pytest.mark.parametrize("text", ["0000-01-01", "0000-12-31Z"])
def test_days_that_python_lacks_are_left_to_be_read_one_by_one(text):
    assert many.dates_from_text(pa.array(["2026-11-21", text])) is None


def test_where_a_text_is_broken_is_told_alike_whether_its_schema_block_is_known_or_not():
    block = raw({"schema": {"type": "struct", "fields": []}, "payload": {"op": "c"}}).replace(b": ", b":")
    block = block.replace(b", ", b",")
    broken = block.replace(b'"op":"c"', b'"op":x')
    told = []
    wire = debezium_json().wire
    for known in (None, block):
        if known is not None:
            wire.parse(known)
        with pytest.raises(UndecodableError) as raised:
            wire.parse(broken)
        told.append(str(raised.value))

    assert told[0].startswith(f"not JSON at character {broken.index(b'x}')}")
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("decimal(38,38)", b"2147483648"),
        ("decimal(38,18)", b"22242774718563417756883513693"),
        ("decimal(18,0)", b"3562e-39"),
        ("decimal(18,1)", b"1e-40"),
        ("array<decimal(38,18)>", b"[22242774718563417756883513693]"),
        ("struct<a:decimal(18,0)>", b'{"a":3562e-39}'),
    ],
)
def test_a_decimal_that_arrows_reader_wraps_or_makes_zero_is_refused(kind, written, monkeypatch):
    declared = {"turn": plain.declared_encoding("bigint"), "v": plain.declared_encoding(kind)}
    form, columns = PlainJson(declared=declared, position="turn"), fields_of(declared)
    by = Decoder(format=form, columns=columns, keys=("turn",), known=frozenset({""}), max_value_bytes=20_000)
    records: list[Record] = [(None, b'{"turn":%d,"v":%b}' % (turn, written)) for turn in range(600)]

    rows = expect_the_same(by, records, monkeypatch)

    assert {row["kind"] for row in rows} == {"undecodable"}
