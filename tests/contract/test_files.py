"""`stream-merge files`: change files written by other tools arrive in the table, and no line is lost without a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from files_job import Job as FilesJob
from pyspark.sql import SparkSession

from stream_merge import ConfigError, ContractError, MergeSink
from stream_merge.jobs.files.run import FilesSettings
from stream_merge.sources.files import reader
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema, parse, record, recorded
from stream_merge.tables import locks

POSTGRES = Path(__file__).parents[1] / "data" / "postgres"
CSV_SCHEMA = (
    "lsn bigint, op string, changed_at timestamp, id bigint, name string, note string,"
    " balance decimal(12,2), vip boolean"
)


class Job(FilesJob):
    """Of changes, ordered by `lsn`."""

    def settings(self, file_format: reader.Format = "json", **options: Any) -> FilesSettings:
        return super().settings(file_format, **{"sequence_by": ("lsn",), **options})

    def put(self, name: str, text: str) -> None:
        (self.source / name).write_text(text, encoding="utf-8", newline="")

    def undecodable(self) -> list[str]:
        path = str(Path(self.target).parent / "__stream_merge_quarantine_customers")
        rows = self.spark.read.format("delta").load(path).where("array_contains(reasons, 'undecodable')").collect()
        return sorted(bytes(row["raw_value"]).decode() for row in rows)


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


def test_json_lines_of_postgres_are_merged_once(job: Job) -> None:
    """Quotes, line breaks, emoji and arrays arrive as PostgreSQL had them; a second run merges nothing."""
    shutil.copy(POSTGRES / "changes.jsonl", job.source)
    options = {"apply_as_deletes": "op = 'd'", "except_columns": ("op", "changed_at")}

    (result,) = job(**options)

    assert result.events.received == 7
    assert job.rows("id", "lsn", "name", "note", "balance", "tags", "vip") == [
        (1, 1, 'O\'Brien, "Pat"', "two\nlines", 12.5, ["a", "b c"], True),
        (2, 5, "Zoë 🙂", "", 99999999.99, [], False),
        (3, 6, "Back\\slash", 'he said "no",\nthen\tleft', None, None, None),
    ]
    assert "inferred from the files that are there" in job.said
    assert job(**options) == []
    assert "0 events in 0 micro-batches" in job.said


@pytest.mark.smoke
def test_a_csv_of_postgres_is_merged(job: Job) -> None:
    """An empty string is not NULL, a line break inside quotes ends no row, and `t` is true."""
    shutil.copy(POSTGRES / "changes.csv", job.source)

    job("csv", schema=CSV_SCHEMA, apply_as_deletes="op = 'd'", except_columns=("op",))

    at = datetime(2024, 5, 1, 10, 0, 0, 123456, tzinfo=UTC).replace(tzinfo=None)
    assert job.rows("id", "lsn", "changed_at", "name", "note", "balance", "vip") == [
        (1, 1, at.replace(minute=1), 'O\'Brien, "Pat"', "two\nlines", Decimal("12.50"), True),
        (2, 5, at.replace(minute=2), "Zoë 🙂", "", Decimal("99999999.99"), False),
        (3, 6, at.replace(minute=3), "Back\\slash", 'he said "no",\nthen\tleft', None, None),
    ]


def test_bad_rows_of_a_csv_are_quarantined_with_their_text(job: Job) -> None:
    job.put(
        "a.csv",
        "id,lsn,name,amount\r\n"
        '1,1,"good, really",1.5\r\n'
        "2,1,too few\r\n"
        "3,1,too,many,1\r\n"
        '4,1,"not\na number",abc\r\n'
        "x,1,bad key,1\r\n"
        '"5","1","","1 2"\r\n',
    )

    (result,) = job("csv", schema="id bigint, lsn bigint, name string, amount decimal(9,2)")

    assert job.rows("id", "name", "amount") == [(1, "good, really", Decimal("1.50"))]
    assert result.reasons == {"undecodable": 5}
    assert job.undecodable() == [
        '"5","1","","1 2"',
        "2,1,too few",
        "3,1,too,many,1",
        '4,1,"not\na number",abc',
        "x,1,bad key,1",
    ]


def test_a_quoted_empty_number_is_null(job: Job) -> None:
    """Tools that quote every field have no other way to write it."""
    job.put("a.csv", 'id,lsn,name,amount\n"1","1","",""\n2,2,,\n')

    job("csv", schema="id bigint, lsn bigint, name string, amount double")

    assert job.rows("id", "name", "amount") == [(1, "", None), (2, None, None)]


def test_types_stay_as_they_were_inferred_first(job: Job) -> None:
    """A later file cannot turn a number into text: its lines are quarantined, and said so."""
    job.put("a.json", '{"id": 1, "lsn": 1, "n": 1}\n')
    job()
    job.put("b.json", '{"id": 2, "lsn": 1, "n": 2}\n{"id": 3, "lsn": 1, "n": "three"}\n{"id": 4, "lsn":\n')

    job()

    assert job.rows("id", "n") == [(1, 1), (2, 2)]
    assert job.undecodable() == ['{"id": 3, "lsn": 1, "n": "three"}', '{"id": 4, "lsn":']
    assert "2 events (2 undecodable) in " in job.said


def test_a_field_that_an_inferred_schema_lacks_is_refused_until_a_schema_decides(job: Job) -> None:
    """Never a silent drop; nothing of the file is lost when the schema comes."""
    job.put("a.json", '{"id": 1, "lsn": 1}\n')
    job()
    job.put("b.json", '{"id": 2, "lsn": 1, "extra": "x"}\n')

    with pytest.raises(ContractError, match=r"field\(s\) that the schema lacks: extra; pass --schema"):
        job()
    assert job.rows() == [(1, 1)]

    job(schema="id bigint, lsn bigint, extra string", schema_evolution=True)
    assert job.rows("id", "lsn", "extra") == [(1, 1, None), (2, 1, "x")]


def test_columns_of_a_csv_are_read_by_the_names_of_its_header(job: Job) -> None:
    """By position the values of another order, or of another column, would land in the wrong columns."""
    job.put("a.csv", "id,lsn,name\n1,1,a\n")
    job("csv")
    job.put("b.csv", "NAME,id,lsn\nb,2,1\n,3,1\n")
    job("csv")
    assert job.rows("id", "lsn", "name") == [(1, 1, "a"), (2, 1, "b"), (3, 1, None)]

    job.put("other.csv", "lsn,id,names\n1,2,x\n")
    with pytest.raises(ContractError, match=r"other\.csv: CSV header does not conform.*fix the file"):
        job("csv")


def test_types_of_csv_files_in_several_orders_are_not_guessed(job: Job) -> None:
    """Spark infers them by position: a sequence that shares its place with a name would be compared as text."""
    job.put("a.csv", "id,lsn,name\n1,9,a\n")
    job.put("b.csv", "id,name,lsn\n1,b,10\n")

    with pytest.raises(ConfigError, match=r"have their columns in different orders; pass --schema"):
        job("csv")
    job("csv", schema="id bigint, lsn bigint, name string")
    assert job.rows("id", "lsn", "name") == [(1, 10, "b")]


def test_a_field_of_json_is_the_column_of_its_name_in_any_case(job: Job) -> None:
    """With a given schema and with an inferred one; two that are one are undecodable."""
    job.put("a.json", '{"id": 1, "qty": 5, "lsn": 1}\n{"id": 1, "Qty": 6, "lsn": 2}\n')
    job(schema="id bigint, qty int, lsn bigint")
    job.put("b.json", '{"id": 2, "QTY": 7, "lsn": 1.0}\n{"id": 3, "qty": 7, "Qty": 8, "lsn": 1}\n')

    (result,) = job()

    assert job.rows("id", "qty", "lsn") == [(1, 6, 2), (2, 7, 1)]
    assert result.reasons == {"undecodable": 1}
    assert job.undecodable() == ['{"id": 3, "qty": 7, "Qty": 8, "lsn": 1}']


def test_fields_that_a_given_schema_lacks_are_counted_and_named_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Left out, but not without a word: in the result, on the screen and in the log."""
    options = {"schema": "id bigint, lsn bigint"}
    job.put("a.json", '{"id": 1, "lsn": 1, "extra": "x"}\n{"id": 2, "lsn": 1, "extra": null}\n')
    (first,) = job(**options)
    job.put("b.json", '{"id": 3, "lsn": 1, "extra": "x"}\n{"id": 4, "extra": 5}\n')
    (second,) = job(**options)

    assert [(one.events.received, one.events.with_unknown_fields) for one in (first, second)] == [(2, 1), (2, 2)]
    assert "fields that the schema lacks, of 2 events" in job.said
    (warning,) = [record for record in caplog.records if getattr(record, "event", "") == "fields_left_out"]
    assert warning.__dict__["fields"] == ("extra",)
    assert job.rows() == [(1, 1), (2, 1), (3, 1)]


def test_files_in_another_format_than_it_is_said_stop_the_job(job: Job) -> None:
    """An array is no line of JSON; of a large batch a share of undecodable records is too much, of a small one none."""
    job.put("a.json", '[\n{"id": 1, "lsn": 1},\n{"id": 2, "lsn": 1}\n]\n')
    with pytest.raises(ContractError, match=r"a\.json: the file is a JSON array or .*; write one"):
        job(schema="id bigint, lsn bigint")
    job.put("a.json", '{"id": 1, "lsn": 1}\n' * 401 + "x\n" * 600)
    with pytest.raises(
        ContractError, match=r"600 of 1001 records .* more than --max-quarantine-share \(0\.5\); .*a\.json"
    ):
        job(schema="id bigint, lsn bigint")
    assert not Path(job.target).exists()

    (result,) = job(schema="id bigint, lsn bigint", max_quarantine_share=0.6)

    assert (result.reasons, job.rows()) == ({"undecodable": 600}, [(1, 1)])


def test_parquet_files_are_merged_and_a_new_column_is_refused(job: Job) -> None:
    job.spark.sql("SELECT 1L AS id, 1L AS lsn").write.parquet(str(job.source / "one"))
    job("parquet")
    job.spark.sql("SELECT 2L AS id, 1L AS lsn, 'x' AS extra").write.parquet(str(job.source / "two"))

    with pytest.raises(ContractError, match=r"two/part.*: it has column\(s\) \['extra'\] that the schema lacks"):
        job("parquet")
    assert job.rows() == [(1, 1)]


def test_a_catalog_name_is_refused_because_the_catalog_would_forget_it(job: Job) -> None:
    job.target = "customers"

    with pytest.raises(ConfigError, match=r"use a path \('\./customers'\)"):
        job()


def decoded(
    spark: SparkSession, file_format: reader.Format, records: list[str | bytes], ddl: str, **options: Any
) -> list[Any]:
    """Records of one file as events."""
    binary = [(record.encode() if isinstance(record, str) else record,) for record in records]
    lines = (
        spark.createDataFrame(binary, "value binary")
        .coalesce(1)
        .selectExpr(
            "value", "'file:/in/a' AS path", "timestamp'2024-05-01 10:00:00' AS modified", "NULL AS line", "1L AS file"
        )
    )
    folder = Folder(path="in", format=file_format, **options)
    return folder.decoded(lines, parse(ddl), has_header=False).collect()


LINES: dict[str, tuple[int | None, bool]] = {
    '{"id": 1, "name": "x"}': (1, True),
    '{"id": 1}': (1, True),
    "{}": (None, True),
    '{"id": "1x"}': (None, False),
    '{"id": 1.5}': (None, False),
    '{"id": 99999999999999999999}': (None, False),
    '{"id": 1': (None, False),
    '{"id": 1}{"id": 2}': (None, False),
    '{"id": 1}, {"id": 2}': (None, False),
    '{"id": 1} half a li': (None, False),
    '[{"id": 1}]': (None, False),
    "[]": (None, False),
    "null": (None, False),
    "not json": (None, False),
}


def test_a_json_line_is_one_object_or_undecodable(spark: SparkSession) -> None:
    """Whatever is not exactly one object with fitting types keeps its whole text, and says why."""
    found = decoded(spark, "json", [*LINES, "", "  "], "id bigint, name string")

    assert len(found) == len(LINES)
    for row, (line, (key, is_good)) in zip(found, LINES.items(), strict=True):
        assert (row["__stream_merge_corrupt"] is None) == is_good
        assert bytes(row["__stream_merge_origin"]["raw_value"]).decode() == line
        assert row["id"] == (key if is_good else None)


def test_an_old_file_below_the_folder_is_read(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would pass over files much older than the newest, and make columns of folders like day=1."""
    source = tmp_path / "in"
    (source / "day=1").mkdir(parents=True)
    (source / "new.json").write_text('{"id": 1}\n')
    events = Folder(path=str(source), format="json").events(spark, parse("id int"), max_files_per_trigger=1)
    seen: list[tuple[Any, ...]] = []

    def once() -> list[tuple[Any, ...]]:
        seen.clear()
        writer = events.writeStream.foreachBatch(lambda df, _: seen.extend(map(tuple, df.select("id").collect())))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return list(seen)

    assert once() == [(1,)]
    (source / "day=1" / "old.json").write_text('{"id": 2}\n')
    os.utime(source / "day=1" / "old.json", (1e9, 1e9))
    assert once() == [(2,)]


def test_integers_of_a_csv_are_inferred_with_room_to_grow(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,at,name\n1,2024-01-01 10:00:00,x\n")

    schema = Folder(path=str(tmp_path), format="csv").infer(spark)

    assert str(schema) == "id bigint, at timestamp, name string"


def test_a_csv_number_whose_spelling_says_more_is_text(job: Job) -> None:
    """As numbers 007 and 7 would be one key. Where earlier files said nothing of it, such a line is quarantined."""
    job.put("a.csv", "id,lsn,phone,zip,rate\n7,1,+491,1234,0.5\n07,1,,01234,-0.25\n")
    job("csv")
    assert "id string, lsn bigint, phone string, zip string, rate double" in job.said
    assert job.rows("id", "phone", "zip", "rate") == [("07", None, "01234", -0.25), ("7", "+491", "1234", 0.5)]

    job.put("b.csv", "id,lsn,phone,zip,rate\n8,0,,,\n9,02,,,\n10,2,,,00.5\n")
    job("csv")
    assert job.rows("id") == [("07",), ("7",), ("8",)]
    assert job.undecodable() == ["10,2,,,00.5", "9,02,,,"]
    job("csv", schema="id string, lsn bigint, phone string, zip string, rate double")


def test_a_recorded_schema_is_read_back(spark: SparkSession, tmp_path: Path) -> None:
    schema = Schema(fields=parse("id bigint, `a b` struct<c: map<string, int>>").fields, is_inferred=True)

    assert recorded(spark, str(tmp_path / "checkpoint")) is None
    record(spark, str(tmp_path / "checkpoint"), schema)
    assert recorded(spark, str(tmp_path / "checkpoint")) == schema


@pytest.mark.parametrize("ddl", ["nonsense", "bigint", "", "id biggint", "id varchar(3)"])
@pytest.mark.usefixtures("spark")
def test_a_schema_that_cannot_be_used_is_refused(ddl: str) -> None:
    with pytest.raises(ConfigError, match="--schema"):
        parse(ddl)


@pytest.mark.parametrize(
    "fill",
    [
        pytest.param(lambda _: None, id="no folder"),
        pytest.param(lambda folder: folder.mkdir(), id="empty folder"),
        pytest.param(lambda folder: (folder.mkdir(), (folder / "a.json").write_text("garbage\n")), id="no event"),
    ],
)
def test_a_source_that_gives_no_schema_says_what_to_do(
    spark: SparkSession, tmp_path: Path, fill: Callable[[Path], None]
) -> None:
    fill(tmp_path / "in")

    with pytest.raises(ConfigError, match=r"/in'.*pass --schema"):
        Folder(path=str(tmp_path / "in"), format="json").infer(spark)


def test_a_lost_table_is_not_built_from_the_new_files_alone(job: Job) -> None:
    """The checkpoint has the old ones as done: they would be missing, and nobody would know."""
    job.put("1.json", '{"id": 1, "lsn": 1}\n')
    job()
    shutil.rmtree(job.target)
    job.put("2.json", '{"id": 2, "lsn": 2}\n')

    with pytest.raises(ConfigError, match=r"query 'customers' has merged into .*there is no table.*new checkpoint"):
        job()
    assert not Path(job.target).exists()


def test_a_second_run_beside_the_first_is_refused_before_spark_starts(job: Job) -> None:
    """By checkpoint and by table, however the path is spelled; nothing is written."""
    job.put("a.json", '{"id": 1, "lsn": 1}\n')
    root = job.source.parent
    (root / "same").symlink_to(root)
    for lock, said in (("checkpoint.lock", "is using checkpoint"), ("__stream_merge_lock_customers", "is writing")):
        job.target = str(root / "same" / "customers")
        with locks.locked(root / lock, "query 'other'"), pytest.raises(ConfigError) as refused:
            job()
        assert f"process {os.getpid()} (query 'other') {said}" in str(refused.value)
        assert "end that" in str(refused.value)
    assert not Path(job.checkpoint).exists()

    job()

    assert job.rows() == [(1, 1)]


def test_a_sink_stays_away_from_a_table_that_a_job_of_another_process_writes(job: Job) -> None:
    """In one process they know of each other."""
    events = job.spark.sql("SELECT 1L AS id, 1L AS lsn")
    sink = MergeSink(target=job.target, keys="id", sequence_by="lsn")
    with locks.locked(job.source.parent / "__stream_merge_lock_customers", "query 'other'"):
        with pytest.raises(ConfigError, match=r"process \d+ \(query 'other'\) is writing to '.*customers'"):
            sink(events, 0)
        assert not Path(job.target).exists()

    with locks.only_writer(job.target, "query 'mine'"), locks.only_writer(f"{job.target}/", "query 'mine, too'"):
        sink(events, 0)

    assert job.rows() == [(1, 1)]
