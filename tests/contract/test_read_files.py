"""`read_files`: what users pass to their own sinks; nothing of a file is lost, and the quarantine can be replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from rich.console import Console
from since import since
from typer.testing import CliRunner

from stream_merge import ConfigError, ContractError, MergeSink, MergeSinks
from stream_merge.cli.app import app
from stream_merge.cli.commands import shared
from stream_merge.jobs.files.run import FilesSettings, replay_quarantine, run
from stream_merge.model.names import CORRUPT_COLUMN
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.files import read_files
from stream_merge.sources.files.parquet import refuse_other_types
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema, parse, recorded
from stream_merge.tables import locks
from stream_merge.testing import target_rows

SCHEMA = "kind string, id bigint, lsn bigint, price decimal(9,2)"
GOOD = b'{"kind": "a", "id": 1, "lsn": 1, "price": 10.50}'
ROUNDED = b'{"kind": "a", "id": 1, "lsn": 2, "price": 10.505}'
TORN = b'{"kind": "b", "id": 2, "ls\xff'
KEYLESS = b'{"kind": "b", "lsn": 3, "price": 1}'


class World:
    """A folder of files, and the table beside it."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.root = root
        self.source = root / "in (1)"
        self.source.mkdir()
        self.target = str(root / "table")
        self.said = ""

    def put(self, name: str, *lines: bytes) -> str:
        """A file, as Spark spells its place."""
        (self.source / name).write_bytes(b"\n".join(lines))
        return f"{(self.source / name).as_uri()}".replace("file://", "file:").replace("%28", "(").replace("%29", ")")

    def merge(self, sink: Callable[[DataFrame, int], None], **options: Any) -> None:
        events = read_files(self.spark, str(self.source), **{"format": "json", "schema": SCHEMA, **options})
        writer = events.writeStream.foreachBatch(sink).option("checkpointLocation", str(self.root / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    def sink(self, table: str = "table", **settings: Any) -> MergeSink:
        return MergeSink(target=str(self.root / table), keys="id", sequence_by="lsn", **settings)

    def quarantined(self, table: str = "table") -> list[tuple[Any, ...]]:
        """(reasons, file, line, bytes, error, replayed) of what is in quarantine."""
        path = str(self.root / f"__stream_merge_quarantine_{table}")
        wanted = "reasons, topic, offset, raw_value, error, replayed_at IS NOT NULL"
        rows = self.spark.read.format("delta").load(path).selectExpr(*wanted.split(", ")).collect()
        return sorted((row[0], row[1], row[2], bytes(row[3]), *row[4:]) for row in rows)

    def settings(self, **options: Any) -> FilesSettings:
        folder = Folder(path=str(self.source), format=options.pop("format", "json"))
        given = {"schema": SCHEMA, "keys": ("id",), "sequence_by": ("lsn",), "once": True, **options}
        return FilesSettings(
            folder=folder, target=TableRef(self.target), checkpoint=str(self.root / "checkpoint"), **given
        )

    def files(self, **options: Any) -> None:
        console = Console(file=StringIO(), width=200)
        run(self.settings(**options), console=console, start_session=lambda: self.spark, metrics_url="nowhere")

    def replay(self, **options: Any) -> str:
        console = Console(file=StringIO(), width=200)
        return replay_quarantine(self.settings(**options), console=console, start_session=lambda: self.spark).summary()


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> World:
    return World(spark, tmp_path)


@pytest.mark.smoke
def test_a_plain_sink_quarantines_what_does_not_fit_with_place_and_bytes(world: World) -> None:
    """A stored value is never overwritten by NULL because a newer one does not fit its type."""
    file = world.put("a.json", GOOD, b"", ROUNDED, TORN, KEYLESS)
    sink = world.sink()

    world.merge(sink)

    assert [tuple(map(str, row)) for row in target_rows(world.spark, world.target)] == [("a", "1", "1", "10.50")]
    assert sink.last_result is not None
    assert sink.last_result.reasons == {"null_key": 1, "undecodable": 2}
    assert world.quarantined() == [
        (["null_key"], file, 5, KEYLESS, None, False),
        (["undecodable"], file, 3, ROUNDED, "column 'price': 10.505 has more than 2 digits after the point", False),
        (["undecodable"], file, 4, TORN, "byte 26 is not UTF-8", False),
    ]


def test_records_of_a_csv_are_quarantined_as_they_stand_in_the_file(world: World) -> None:
    """Also what is not UTF-8, behind a byte order mark, with other line ends and line breaks inside of quotes."""
    file = world.put(
        "a.csv", b"\xef\xbb\xbfid,lsn,name\r", b'1,1,"two\r', b'lines"\r', b"2,1,\xff\r", b'"3",x,"a\r', b'b"'
    )

    world.merge(world.sink(), format="csv", schema="id bigint, lsn bigint, name string")

    assert target_rows(world.spark, world.target) == [(1, 1, "two\r\nlines")]
    assert world.quarantined() == [
        (["undecodable"], file, None, b'"3",x,"a\r\nb"', "column 'lsn': 'x' is not an integer", False),
        (["undecodable"], file, None, b"2,1,\xff", "byte 4 is not UTF-8", False),
    ]


def test_a_csv_record_that_spark_sees_as_one_field_is_taken_as_it_is_written(world: World) -> None:
    """Without its quotes it would be split once more: values that nobody has written."""
    world.put("a.csv", b"id,lsn,name", b'"1,1,abc"', b'""', b"5,1,c", b'"2,1,y')
    world.put("b.csv", b'""', b"7,1,d")
    events: list[Any] = []

    def collect(batch_df: DataFrame, _: int) -> None:
        place = f"__stream_merge_origin.topic, {CORRUPT_COLUMN}, decode(__stream_merge_origin.raw_value, 'UTF-8')"
        events.extend(map(tuple, batch_df.selectExpr("*", *place.split(", ", 2)).collect()))

    with pytest.raises(StreamingQueryException, match=r"b\.csv: CSV header does not conform"):
        world.merge(collect, format="csv", schema="id bigint, lsn bigint, name string")
    (world.source / "b.csv").unlink()
    events.clear()
    world.merge(collect, format="csv", schema="id bigint, lsn bigint, name string")

    one = "the record has 1 field(s), the schema 3"
    assert sorted((row[0], row[-2], row[-1]) for row in events if row[0] is not None) == [(5, None, "5,1,c")]
    assert {row[-1]: row[-2] for row in events if row[0] is None} == {
        '"1,1,abc"': one,
        '""': one,
        '"2,1,y': "the quote at character 1 is not closed, or something but a delimiter stands behind it",
    }


def test_a_record_of_two_fields_is_refused_by_a_schema_of_one_and_lone_carriage_returns_end_records(
    world: World,
) -> None:
    """Half of it would be stored, or nothing."""
    (world.source / "a.csv").write_bytes(b'x\r1,5\r,5\r""\r"y"\r')
    events: list[Any] = []

    def collect(batch_df: DataFrame, _: int) -> None:
        events.extend(map(tuple, batch_df.select("v", CORRUPT_COLUMN, "__stream_merge_origin.raw_value").collect()))

    world.merge(collect, format="csv", schema="v string", header=False)

    two = "the record has 2 field(s), the schema 1"
    assert [(value, error, bytes(raw)) for value, error, raw in events] == [
        ("x", None, b"x"),
        (None, two, b"1,5"),
        (None, two, b",5"),
        ("", None, b'""'),
        ("y", None, b'"y"'),
    ]


def test_a_column_with_a_reserved_name_is_refused_from_others(world: World) -> None:
    """Only `read_files` may say that an event is none."""
    events = world.spark.sql(f"SELECT 1L AS id, 1L AS lsn, 'x' AS {CORRUPT_COLUMN}")

    with pytest.raises(ConfigError, match=f"{CORRUPT_COLUMN}.*is reserved"):
        world.sink()(events, 0)


def test_a_router_quarantines_what_it_cannot_read(world: World) -> None:
    """It belongs to no table, for its route is unknown."""
    file = world.put("a.json", GOOD, ROUNDED)
    sinks = {kind: world.sink(kind) for kind in ("a", "b")}

    with pytest.raises(StreamingQueryException, match=r"1 record of batch 0 cannot be read.*a\.json.*10\.505"):
        world.merge(MergeSinks(sinks, route_by="kind"))

    lost = str(world.root / "__stream_merge_quarantine_lost")
    world.merge(MergeSinks(sinks, route_by="kind", on_failure="quarantine", quarantine_target=lost))

    assert len(target_rows(world.spark, str(world.root / "a"))) == 1
    error = "column 'price': 10.505 has more than 2 digits after the point"
    assert world.quarantined("lost") == [(["undecodable"], file, 2, ROUNDED, error, False)]


@since((4, 0), "types wider than int")
def test_quarantined_records_of_files_are_replayed_with_another_schema(world: World) -> None:
    """Once; what still cannot be read stays, and what is older than the stored row changes nothing."""
    file = world.put("a.json", GOOD, ROUNDED, TORN, b'{"kind": "a", "id": 1, "lsn": 0, "price": 1.001}')
    world.files(schema=SCHEMA.replace("decimal(9,2)", "decimal(9,2)"))
    world.spark.sql(f"ALTER TABLE delta.`{world.target}` SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
    world.spark.sql(f"ALTER TABLE delta.`{world.target}` ALTER COLUMN price TYPE decimal(10,3)")
    wider = SCHEMA.replace("decimal(9,2)", "decimal(10,3)")

    assert world.replay(schema=wider) == (
        "2 of 3 records replayed (1 row changed, version 4); 1 still cannot be merged"
    )
    assert [str(row[3]) for row in target_rows(world.spark, world.target)] == ["10.505"]
    assert [(line, replayed) for _, where, line, _, _, replayed in world.quarantined() if where == file] == [
        (2, True),
        (3, False),
        (4, True),
    ]
    assert (
        world.replay(schema=wider)
        == "0 of 1 record replayed (0 rows changed, nothing to commit); 1 still cannot be merged"
    )
    kept = recorded(world.spark, str(world.root / "checkpoint"))
    assert str(kept) == SCHEMA.replace(",lsn", ", lsn")  # later runs read as before


def test_a_replayed_record_whose_key_no_partition_keeps_stays_in_quarantine(world: World) -> None:
    """Where it is: merged, it would come back to the quarantine as another row."""
    sql = "CREATE TABLE delta.`{}` (kind STRING, id BIGINT, lsn BIGINT, price DECIMAL(10,3)) USING delta"
    world.spark.sql(f"{sql.format(world.target)} PARTITIONED BY (KIND)")
    file = world.put("a.json", GOOD, ROUNDED.replace(b'"a"', b'""'), ROUNDED.replace(b'"a"', b'"b"'))
    world.files(keys=("kind", "id"))
    wider = SCHEMA.replace("decimal(9,2)", "decimal(10,3)")

    said = world.replay(schema=wider, keys=("kind", "id"))

    assert said.startswith("1 of 2 records replayed (1 row changed, ")
    assert [row[0] for row in target_rows(world.spark, world.target)] == ["a", "b"]
    assert [(where, line, replayed) for _, where, line, _, _, replayed in world.quarantined()] == [
        (file, 2, False),
        (file, 3, True),
    ]


def test_records_of_a_csv_are_replayed_by_the_names_of_its_header(world: World) -> None:
    """They have none of their own, in whatever order each file has its columns; nor do they make a table."""
    options = {"format": "csv", "except_columns": ("note",)}
    world.put("a.csv", b"\xef\xbb\xbfid,lsn,note", b"1,1,5", b"2,1,x")
    world.put("b.csv", b"note,LSN,ID", b"y,2,3", b"6,9,4")
    world.files(schema="id bigint, lsn bigint, note int", **options)
    assert target_rows(world.spark, world.target) == [(1, 1), (4, 9)]

    with pytest.raises(
        ContractError, match=r"cannot be replayed: .*it has .*; the schema has \['lsn', 'id'\]; pass --schema"
    ):
        world.replay(schema="lsn bigint, id bigint", **options)
    for file in world.source.iterdir():
        file.unlink()
    swapped = "lsn bigint, id bigint, note string"
    assert world.replay(schema=swapped, **options).startswith("2 of 2 records replayed")
    assert target_rows(world.spark, world.target) == [(1, 1), (2, 1), (3, 2), (4, 9)]

    shutil.rmtree(world.target)
    with pytest.raises(ConfigError, match=r"merged into"):
        world.replay(schema=swapped, **options)
    shutil.rmtree(world.root / "checkpoint")
    with pytest.raises(ConfigError, match=r"^\[TABLE_NOT_FOUND\] target .* to replay into does not exist"):
        world.replay(schema=swapped, **options)
    assert not Path(world.target).exists()


def test_records_of_other_folders_are_not_replayed(world: World, tmp_path: Path) -> None:
    """The same text may mean something else there."""
    world.put("a.json", ROUNDED)
    world.files()
    world.source = tmp_path / "in"
    world.source.mkdir()

    assert world.replay() == "no record of these files is in quarantine with its bytes and not replayed yet"


def test_only_one_process_merges_over_a_checkpoint(world: World) -> None:
    """A replay beside the running command would be a second writer."""
    with locks.locked(world.root / "checkpoint.lock", "query 'other'"):
        for work in (world.replay, world.files):
            with pytest.raises(ConfigError, match=r"query 'other'\) is using checkpoint"):
                work()


def test_the_quarantine_of_a_table_is_listed_without_a_job_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table, for who has no job file."""
    monkeypatch.setattr(shared.OUT, "width", 400)
    world.put("a.json", GOOD, ROUNDED)
    world.files()

    listed = CliRunner().invoke(app, ["quarantine", "list", world.target])
    shown = CliRunner().invoke(app, ["quarantine", "show", world.target])

    assert (listed.exit_code, shown.exit_code) == (0, 0), listed.output + shown.output
    assert "undecodable" in listed.output
    assert "a.json" in listed.output
    assert ROUNDED.decode() in shown.output


@pytest.mark.parametrize(
    ("written", "ddl"),
    [
        pytest.param(pa.int32(), "tinyint", id="wrapped by Spark"),
        pytest.param(pa.int32(), "date", id="taken for days by Spark"),
        pytest.param(pa.date32(), "int", id="days by Spark"),
        pytest.param(pa.uint32(), "double", id="negative by Spark"),
        pytest.param(pa.timestamp("ms", tz="UTC"), "bigint", id="a number by Spark"),
    ],
)
def test_a_parquet_file_whose_types_the_schema_does_not_hold_is_refused(
    world: World, written: pa.DataType, ddl: str
) -> None:
    """Also one that comes later: each batch's files are looked at."""
    table = pa.table({"id": pa.array([1], pa.int64()), "lsn": pa.array([1], pa.int64())})
    pq.write_table(table.append_column("v", pa.array([300], written)), world.source / "a.parquet")

    with pytest.raises(ContractError, match=r"^\[SOURCE_FILE_INVALID\] .*a\.parquet: column 'v' is .* cannot hold all"):
        world.files(format="parquet", schema=f"id bigint, lsn bigint, v {ddl}")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        pytest.param(
            pa.array([1], pa.timestamp("ns")),
            r"column 'v' is int64 \(TIMESTAMP\(NANOS,false\)\), which Spark cannot read; write it with"
            r' coerce_timestamps="us".*nanosAsLong=true$',
            id="nanoseconds",
        ),
        pytest.param(pa.array([1], pa.time64("us")), r"column 'v' is int64 \(TIME\(MICROS.*; write it as", id="time"),
        pytest.param(pa.array([1.5], pa.float16()), r"column 'v' is fixed.*FLOAT16\).*; write it as FLOAT$", id="half"),
        pytest.param(pa.nulls(1), r"column 'v' has only NULLs and no type", id="void"),
    ],
)
def test_a_parquet_column_that_spark_does_not_read_is_named(world: World, column: pa.Array, said: str) -> None:
    """Whether types are inferred or given: an INT for good, or one that is wrapped, helps nobody."""
    table = pa.table({"id": pa.array([1], pa.int64()), "lsn": pa.array([1], pa.int64()), "v": column})
    pq.write_table(table, world.source / "a.parquet", version="2.6")

    with pytest.raises(ConfigError, match=rf"^\[SCHEMA_NOT_INFERRED\] .*a\.parquet: {said}"):
        world.files(format="parquet", schema=None)
    with pytest.raises(ContractError, match=rf"a\.parquet: {said}"):
        world.files(format="parquet", schema="id bigint, lsn bigint, v string")


def test_a_parquet_column_is_that_of_its_name_in_any_case(world: World) -> None:
    """Nested ones as well, in a schema that is given and in one that was inferred from other files."""
    row = pa.array([{"a": 1}], pa.struct([("a", pa.int32())]))
    pq.write_table(pa.table({"id": [1], "lsn": [1], "v": row}), world.source / "a.parquet")
    world.files(format="parquet", schema=None)
    pq.write_table(
        pa.table({"ID": [2], "Lsn": [1], "V": pa.array([{"A": 1}], pa.struct([("A", pa.int32())]))}),
        world.source / "b.parquet",
    )
    world.files(format="parquet", schema=None)

    assert [(*row[:2], row[2].asDict()) for row in target_rows(world.spark, world.target)] == [
        (1, 1, {"a": 1}),
        (2, 1, {"a": 1}),
    ]


def test_a_column_without_a_type_in_one_parquet_file_has_that_of_another(world: World) -> None:
    """And where it is text there, the file without a type is named; `nanosAsLong` and a schema without it help."""
    ids = {"id": pa.array([1], pa.int64()), "lsn": pa.array([1], pa.int64())}
    pq.write_table(pa.table({**ids, "v": pa.nulls(1)}), world.source / "a.parquet")
    pq.write_table(pa.table({**ids, "v": pa.array([7], pa.int32())}), world.source / "b.parquet")
    folder = Folder(path=str(world.source), format="parquet")

    assert str(folder.infer(world.spark)) == "id bigint, lsn bigint, v int"
    pq.write_table(pa.table({**ids, "v": pa.array(["x"])}), world.source / "b.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: column 'v' has only NULLs and no type"):
        folder.infer(world.spark)
    pq.write_table(pa.table({**ids, "v": pa.array([1.5])}), world.source / "a.parquet")
    with pytest.raises(ConfigError, match=r"column 'v' is double in .*a\.parquet but string in .*b\.parquet; write it"):
        folder.infer(world.spark)


def test_a_later_parquet_file_with_columns_that_an_inferred_schema_lacks_is_refused(world: World) -> None:
    """Spark leaves out what it was not told of, nested fields as well; a schema that was given says so."""
    file = world.source / "b.parquet"
    row = pa.array([{"a": 1, "b": 2}], pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    pq.write_table(pa.table({"id": pa.array([1], pa.int64()), "v": row, "w": pa.array(["x"])}), file)
    given = parse("id bigint, v struct<a:bigint>")

    refuse_other_types(world.spark, [str(file)], given)
    with pytest.raises(ContractError, match=r"b\.parquet: it has column\(s\) \['v\.b', 'w'\] that the schema lacks"):
        refuse_other_types(world.spark, [str(file)], Schema(fields=given.fields, is_inferred=True))


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_column_that_is_twice_in_the_schema_is_refused(spark: SparkSession, tmp_path: Path, kind: Any) -> None:
    """Workers would fail for it, with another error."""
    fields = T.StructType([T.StructField("id", T.LongType()), T.StructField("id", T.StringType())])

    with pytest.raises(ConfigError, match="the schema has column 'id' twice"):
        read_files(spark, str(tmp_path), format=kind, schema=fields)
    with pytest.raises(ConfigError, match=r"has a field twice|holds no struct"):
        read_files(spark, str(tmp_path), format=kind, schema=T.StructType([T.StructField("v", fields)]))
