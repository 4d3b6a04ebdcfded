"""Deletion vectors are read and written byte by byte as the Delta protocol has them."""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap, BitMap64

from stream_merge.tables.files import vectors
from stream_merge.tables.files.vectors import Descriptor, VectorError, read, write

BY_SPARK = bytes.fromhex(
    "0100000026d1d339640100000000000000000000003a300000010000000000020010000000000007000e00fd54c000"
)
"""A file that Spark wrote, of Delta's own tests (golden tables)."""
OF_SPARK = {
    "storageType": "u",
    "pathOrInlineDv": "^jP?.<zvDfIGb{C.FPij",
    "offset": 1,
    "sizeInBytes": 38,
    "cardinality": 3,
}
MAGIC = bytes.fromhex("d1d33964")

LAST = 2**63 - 1
SETS = {
    "none": [],
    "first": [0],
    "one": [17],
    "dense": range(100_000),
    "all but one": [*range(50_000), *range(50_001, 100_000)],
    "every other": range(0, 200_000, 2),
    "sparse": [0, 70_000, 5_000_000, 2**32 - 1],
    "beyond 32 bits": [5, 2**32, 2**32 + 1, 3 * 2**32 + 9],
    "last": [LAST],
}
"""Arrays, bitmaps and runs of Roaring, in one part of 32 bits and in several."""


def as_z85(data: bytes) -> str:
    """As the log has it; the alphabet is that of the specification, spelled once more."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    padded = data + bytes(-len(data) % 4)
    numbers = [int.from_bytes(padded[i : i + 4], "big") for i in range(0, len(padded), 4)]
    return "".join(digits[number // 85**power % 85] for number in numbers for power in (4, 3, 2, 1, 0))


def inline(data: bytes, cardinality: int) -> dict[str, Any]:
    return {"storageType": "i", "pathOrInlineDv": as_z85(data), "sizeInBytes": len(data), "cardinality": cardinality}


def file_of(descriptor: dict[str, Any], root: Path) -> Path:
    file = Descriptor.parse(descriptor).file(root)
    assert file is not None
    return file


@pytest.fixture
def by_spark(tmp_path: Path) -> Path:
    """A table's folder with the file that Spark wrote."""
    file_of(OF_SPARK, tmp_path).write_bytes(BY_SPARK)
    return tmp_path


def test_a_vector_of_spark_is_read(by_spark):
    assert list(read(OF_SPARK, by_spark)) == [0, 7, 14]


def test_a_vector_is_written_as_spark_writes_it(tmp_path):
    """Byte by byte, but for the name of the file."""
    descriptor = write(tmp_path, {"part-0": BitMap64([0, 7, 14])})["part-0"]

    assert descriptor | {"pathOrInlineDv": OF_SPARK["pathOrInlineDv"]} == OF_SPARK
    assert file_of(descriptor, tmp_path).read_bytes() == BY_SPARK
    assert [re.sub(r"[0-9a-f]{4,}", "x", file.name) for file in tmp_path.iterdir()] == ["deletion_vector_x-x-x-x-x.bin"]


@pytest.mark.parametrize("name", SETS)
def test_what_was_written_is_read(tmp_path, name):
    positions = BitMap64(SETS[name])
    written = BitMap64(positions)

    descriptor = write(tmp_path, {"part-0": written})["part-0"]

    assert read(descriptor, tmp_path) == positions
    assert descriptor["cardinality"] == len(positions)
    assert written == positions


@pytest.mark.parametrize("name", SETS)
def test_what_is_in_the_log_itself_is_read(tmp_path, name):
    positions = BitMap64(SETS[name])

    assert read(inline(MAGIC + positions.serialize(), len(positions)), tmp_path) == positions


def test_random_vectors_come_back(tmp_path):
    """Dense stretches, single rows and gaps, as merges leave them."""
    rng = random.Random(4)
    given = {}
    for number in range(50):
        positions = BitMap64()
        for _ in range(rng.randrange(6)):
            start = rng.randrange(2 ** rng.choice([4, 16, 20, 34]))
            positions |= BitMap64(range(start, start + rng.choice([1, 2, 70, 9_000]), rng.choice([1, 1, 3])))
        given[f"part-{number}"] = positions

    descriptors = write(tmp_path, given)

    assert {name: read(descriptor, tmp_path) for name, descriptor in descriptors.items()} == given


def test_rows_in_a_stretch_take_few_bytes(tmp_path):
    """Also where the positions came one by one: Delta's own writers look for runs as well."""
    positions = BitMap64()
    for position in range(60_000):
        positions.add(position)

    assert write(tmp_path, {"part-0": positions})["part-0"]["sizeInBytes"] < 50


def test_vectors_are_packed_in_one_file(tmp_path):
    """Version, then for each vector its size, its bytes and their CRC-32, big endian; an offset is that of the size."""
    given = {f"part-{number}": BitMap64(range(number, 9_000, number + 1)) for number in range(40)}

    descriptors = write(tmp_path, given)

    assert list(descriptors) == list(given)
    (file,) = tmp_path.iterdir()
    stored, end = file.read_bytes(), 1
    assert stored[0] == 1
    for name, descriptor in descriptors.items():
        assert file_of(descriptor, tmp_path) == file
        assert descriptor["offset"] == end
        size = int.from_bytes(stored[end : end + 4], "big")
        data = stored[end + 4 : end + 4 + size]
        end += size + 8
        assert descriptor["sizeInBytes"] == size
        assert data == MAGIC + given[name].serialize()
        assert int.from_bytes(stored[end - 4 : end], "big") == zlib.crc32(data)
    assert end == len(stored)


def test_without_vectors_nothing_is_written(tmp_path):
    assert write(tmp_path, {}) == {}
    assert list(tmp_path.iterdir()) == []


def test_each_write_makes_a_file_of_its_own(tmp_path):
    first = write(tmp_path, {"part-0": BitMap64([1])})["part-0"]
    second = write(tmp_path, {"part-0": BitMap64([1, 2])})["part-0"]

    assert list(read(first, tmp_path)) == [1]
    assert list(read(second, tmp_path)) == [1, 2]


def test_a_prefix_is_a_folder(tmp_path):
    write(tmp_path, {"part-0": BitMap64([1])}, prefix="ab")
    descriptor = write(tmp_path, {"part-0": BitMap64([3])}, prefix="ab")["part-0"]

    assert descriptor["pathOrInlineDv"].startswith("ab")
    assert len(descriptor["pathOrInlineDv"]) == 22
    assert file_of(descriptor, tmp_path).parent == tmp_path / "ab"
    assert list(read(descriptor, tmp_path)) == [3]


def test_the_path_is_as_in_the_protocols_example():
    """Delta protocol, "Deletion Vector Descriptor Schema", JSON example 1."""
    example = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "sizeInBytes": 40, "cardinality": 6}

    file = Descriptor.parse({**example, "offset": 4}).file(Path("/mytable"))

    assert file == Path("/mytable/ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin")


def test_the_protocols_inline_example_is_refused_as_by_spark(tmp_path):
    """JSON example 3, of rows 3, 4, 7, 11, 18, 29: its header is not the one that the protocol's own text wants."""
    bitmap = BitMap([3, 4, 7, 11, 18, 29]).serialize()
    example = inline(bytes.fromhex("6439d3d0 00000001 0000001c") + bitmap, 6)
    assert example["pathOrInlineDv"] == "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    assert example["sizeInBytes"] == 40

    with pytest.raises(VectorError, match="is of format 3503503716, which the protocol does not define"):
        read(example, tmp_path)


def test_an_absolute_path_is_read(by_spark, tmp_path_factory):
    """Clones refer to the files of their source so; the path is a URL, or an absolute path escaped as in one."""
    odd = tmp_path_factory.mktemp("ä b%20c") / "v.bin"
    odd.write_bytes(BY_SPARK)
    absolute = OF_SPARK | {"storageType": "p"}

    for path in (odd.as_uri(), odd.as_uri().replace("file:///", "file:/"), odd.as_uri().removeprefix("file://")):
        assert list(read(absolute | {"pathOrInlineDv": path}, Path("/nowhere"))) == [0, 7, 14]


@pytest.mark.parametrize(
    "path", ["s3://bucket/v.bin", "file://host/v.bin", "v.bin", "", "file:v.bin", "/v.bin?x=1", "//[/v", "/%ff"]
)
def test_a_path_that_is_not_local_is_refused(tmp_path, path):
    with pytest.raises(VectorError, match="is not in a local file"):
        read(OF_SPARK | {"storageType": "p", "pathOrInlineDv": path}, tmp_path)


def test_deltas_own_descriptor_of_no_rows_is_read(tmp_path):
    empty = {"storageType": "i", "pathOrInlineDv": "", "sizeInBytes": 0, "cardinality": 0}

    assert len(read(empty, tmp_path)) == 0
    with pytest.raises(VectorError, match="is of format"):
        read(empty | {"cardinality": 1}, tmp_path)


def test_empty_parts_are_read(tmp_path):
    """Spark writes a bitmap for each 32 bits up to the last row, empty ones too; pyroaring leaves them out."""
    parts = [part.to_bytes(4, "little") + BitMap(rows).serialize() for part, rows in enumerate([[], [7], [], [1]])]
    data = MAGIC + (4).to_bytes(8, "little") + b"".join(parts)

    assert list(read(inline(data, 2), tmp_path)) == [2**32 + 7, 3 * 2**32 + 1]


def test_an_absent_offset_is_the_start_of_the_file(by_spark):
    """So says the protocol; there stands the file's version, so that no vector of this version can start there."""
    without = {name: value for name, value in OF_SPARK.items() if name != "offset"}

    with pytest.raises(VectorError, match=r"at byte 0 of .* has 16777216 bytes where the log says 38"):
        read(without, by_spark)
    assert list(read(OF_SPARK | {"maxRowIndex": None}, by_spark)) == [0, 7, 14]


@pytest.mark.parametrize("position", range(len(BY_SPARK)))
def test_no_damaged_byte_of_a_file_goes_unnoticed(by_spark, position):
    damaged = bytearray(BY_SPARK)
    damaged[position] ^= 0x10
    file_of(OF_SPARK, by_spark).write_bytes(damaged)

    with pytest.raises(VectorError):
        read(OF_SPARK, by_spark)


@pytest.mark.parametrize("length", range(len(BY_SPARK)))
def test_no_file_that_is_cut_off_goes_unnoticed(by_spark, length):
    file_of(OF_SPARK, by_spark).write_bytes(BY_SPARK[:length])

    with pytest.raises(VectorError, match=r"is cut off|file of format version none"):
        read(OF_SPARK, by_spark)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"cardinality": 2}, "removes 3 rows where the log says 2"),
        ({"cardinality": 0}, "removes 3 rows where the log says 0"),
        ({"sizeInBytes": 37}, "has 38 bytes where the log says 37"),
        ({"sizeInBytes": 39}, "is cut off: its file ends after 47 bytes"),
        ({"sizeInBytes": 2**31}, "is cut off"),
        ({"offset": 2}, "is cut off"),
        ({"maxRowIndex": 13}, "removes row 14, beyond the last possible one, 13"),
        ({"pathOrInlineDv": "^jP?.<zvDfIGb{C.FPii"}, "cannot be read .*No such file"),
        ({"pathOrInlineDv": "\0^jP?.<zvDfIGb{C.FPij"}, "cannot be read"),
        ({"pathOrInlineDv": "^jP?.<zvDfIGb{C.FPi"}, "has no UUID"),
        ({"pathOrInlineDv": "^jP?.<zvDfIGb{C.FPi;"}, "is no Z85"),
        ({"pathOrInlineDv": "^jP?.<zvDfIGb{C.FPiä"}, "is no Z85"),
        ({"pathOrInlineDv": "^jP?.<zvDfIGb{C#####"}, "is no Z85"),
        ({"storageType": "x"}, "storageType 'x', which the protocol does not know"),
        ({"storageType": None}, "None as storageType"),
        ({"pathOrInlineDv": 5}, "5 as pathOrInlineDv"),
        ({"sizeInBytes": None}, "None as sizeInBytes"),
        ({"sizeInBytes": "38"}, "'38' as sizeInBytes"),
        ({"cardinality": True}, "True as cardinality"),
        ({"cardinality": -3}, "-3 as cardinality"),
        ({"offset": -1}, "-1 as offset"),
        ({"offset": 1.0}, "1.0 as offset"),
    ],
)
def test_a_descriptor_of_another_vector_is_refused(by_spark, other, why):
    with pytest.raises(VectorError, match=why):
        read(OF_SPARK | other, by_spark)


def test_the_offset_alone_tells_vectors_of_a_file_apart(tmp_path):
    """It is exact: no vector is looked for in the neighbourhood."""
    descriptors = write(tmp_path, {"a": BitMap64([1, 2]), "b": BitMap64([3, 4])})

    assert list(read(descriptors["a"] | {"offset": descriptors["b"]["offset"]}, tmp_path)) == [3, 4]
    with pytest.raises(VectorError):
        read(descriptors["a"] | {"offset": descriptors["b"]["offset"] - 1}, tmp_path)


def framed(data: bytes) -> bytes:
    """A file of one vector, whatever its bytes are."""
    return b"\x01" + len(data).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is of format 0,"),
        (b"\xd1\xd3", "is of format"),
        ((1681511376).to_bytes(4, "little") + bytes(4), "is of format 1681511376, which the protocol does not define"),
        (MAGIC, "is no bitmap"),
        (MAGIC + bytes(7), "is no bitmap"),
        (MAGIC + (2).to_bytes(8, "little") + BitMap64([7]).serialize()[8:], "is no bitmap"),
        (MAGIC + (2**60).to_bytes(8, "little"), "is no bitmap"),
        (MAGIC + BitMap64([3, 4, 7]).serialize()[:-4] + bytes([9, 0, 7, 0]), "is no bitmap .*not strictly increasing"),
        (MAGIC + BitMap64([2**63]).serialize(), "removes row 9223372036854775808, beyond the last possible one"),
    ],
)
def test_bytes_that_are_no_vector_are_refused(tmp_path, data, why):
    """With a right checksum: as a faulty writer would leave them."""
    (tmp_path / "v.bin").write_bytes(framed(data))
    in_file = {"storageType": "p", "pathOrInlineDv": f"{tmp_path}/v.bin", "offset": 1}

    with pytest.raises(VectorError, match=why):
        read(in_file | {"sizeInBytes": len(data), "cardinality": 1}, tmp_path)
    with pytest.raises(VectorError, match=why):
        read(inline(data, 1), tmp_path)


def test_a_file_of_another_version_is_refused(by_spark):
    file_of(OF_SPARK, by_spark).write_bytes(b"\x02" + BY_SPARK[1:])

    with pytest.raises(VectorError, match="is in a file of format version 02, not 01"):
        read(OF_SPARK, by_spark)


@pytest.mark.parametrize("size", [4, 30, 32, 37, 10_000])
def test_an_inline_vector_of_another_size_is_refused(tmp_path, size):
    described = inline(MAGIC + BitMap64([5, 9]).serialize(), 2)
    assert described["sizeInBytes"] == 36

    with pytest.raises(VectorError, match="has 36 bytes where the log says"):
        read(described | {"sizeInBytes": size}, tmp_path)


def test_a_position_that_java_cannot_hold_is_not_written(tmp_path):
    with pytest.raises(VectorError, match="row 9223372036854775808 of 'part-0' cannot be removed"):
        write(tmp_path, {"part-0": BitMap64([LAST + 1])})
    assert list(tmp_path.iterdir()) == []


def test_more_than_a_file_may_hold_is_not_written(tmp_path, monkeypatch):
    """Offsets and sizes are integers of 32 bits."""
    monkeypatch.setattr(vectors, "_MOST_BYTES", 100)

    assert len(write(tmp_path, {"a": BitMap64([1]), "b": BitMap64([1])})) == 2
    with pytest.raises(VectorError, match=r"3 deletion vectors .* more than the 100 bytes"):
        write(tmp_path, {"a": BitMap64([1]), "b": BitMap64([1]), "c": BitMap64([1])})
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unwritable_folder_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "none", {"a": BitMap64([1])})
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "none", {"a": BitMap64([1])}, prefix="ab")
