"""Tables on S3: what a sink does there, against a real S3 server. Needs a JVM: Spark's file system for S3 is Java.

What Hadoop's settings are to delta-rs is text: `tests/unit/test_s3_settings.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import engines
import pytest
import scenario
from deliveries import DEFAULTS, ChangeStream, delete, ledger, upsert
from delta_log import check_table
from grouped import sink_with
from prometheus_client import CollectorRegistry, generate_latest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from services import command_lines, running, s3
from since import since
from story import tell
from typer.testing import CliRunner

from stream_merge import ConfigError, Maintenance, RetryPolicy
from stream_merge.cli import app as cli
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import object_stores
from stream_merge.spark.versions import SPARK
from stream_merge.tables.explain import explain
from stream_merge.tables.files import folder as folders
from stream_merge.tables.files.commit import Commit
from stream_merge.tables.files.folder import CopiedFolder
from stream_merge.tables.maintenance import maintain
from stream_merge.testing import batch, run

PROMISED = {"single_writer": True}
WHERE_NEEDED = {} if SPARK >= (4, 1) else PROMISED
"""Older file systems for S3 know no condition, by which the store would keep commits apart."""
CONDITION = since((4, 1), "a file system for S3 that puts on a condition")
THEIRS = '{"commitInfo":{"operation":"WRITE"}}\n'
"""A commit of somebody else."""


class OnS3(ChangeStream):
    """A change stream into a table in a folder of a bucket."""

    def __init__(self, spark: SparkSession, bucket: s3.Bucket, **settings: Any) -> None:
        self.place = f"{uuid4().hex[:8]}/orders"
        self.way = ""
        """In which it is merged, where one was asked for."""
        super().__init__(spark, bucket.uri(self.place), folder=(bucket.folder / self.place).parent, **settings)

    def spelled(self, scheme: str) -> OnS3:
        """The same stream, whose sinks are told another spelling of the table."""
        self.settings["target"] = self.target.replace("s3a:", f"{scheme}:")
        return self


@pytest.fixture(params=engines.WAYS)
def stream(request: pytest.FixtureRequest, spark: SparkSession, bucket: s3.Bucket) -> Iterator[OnS3]:
    """Merged in one way; the store keeps commits of all apart, so that nobody has to promise anything."""
    way = request.param
    settings: dict[str, Any] = {} if way == "spark" else {"table_properties": {"delta.checkpointInterval": "2"}}
    settings |= WHERE_NEEDED
    with engines.judged(way, "S3"):
        found = OnS3(spark, bucket, engine=engines.asked(way), **settings)
        found.way = way
        yield found
    if way != "spark":
        check_table(bucket.folder / found.place)


@pytest.fixture
def looks_then_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sink sees of a Spark that was given no log store for S3: Delta's own has a lock in the JVM only."""
    monkeypatch.setattr(object_stores, "log_stores", lambda *_: [])


def test_a_stream_is_merged_as_on_a_disk(stream: OnS3) -> None:
    """Create, update, delete, late events, broken ones; each again; the place is spelled in several ways."""
    told = tell(stream, lambda: stream.spelled("s3"), lambda: stream.spelled("s3a"))

    assert [engines.way(one) for one in told] == [stream.way] * 2


def test_columns_are_added_and_files_put_together(spark: SparkSession, bucket: s3.Bucket) -> None:
    """What the driver leaves to Spark: both write one log, one after the other."""
    wider = "id bigint, lsn bigint, op string, name string, price int"
    stream = OnS3(spark, bucket, **PROMISED, maintenance=Maintenance(every=1), schema_evolution=True)
    done = [stream.deliver(upsert(number, "narrow", lsn=1)) for number in range(4)]
    done.append(stream.deliver((9, 1, "u", "wide", 7), schema=wider))
    done.append(stream.deliver((1, 2, "u", "wide, too", 8), schema=wider))

    assert [one.engine for one in done] == ["driver"] * 4 + ["spark", "driver"]
    assert stream.rows("id", "name", "price") == [
        (0, "narrow", None),
        (1, "wide, too", 8),
        (2, "narrow", None),
        (3, "narrow", None),
        (9, "wide", 7),
    ]
    operations = [commit["operation"] for commit in stream.sql("DESCRIBE HISTORY {target}").collect()]
    assert "OPTIMIZE" in operations
    by_hand = maintain(spark, TableRef(stream.target.replace("s3a:", "s3:")), Maintenance(vacuum=True))
    assert by_hand.vacuumed


def test_a_table_is_explained_without_spark(
    spark: SparkSession, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the environment says; in Python also by options."""
    stream = OnS3(spark, bucket, **PROMISED)
    stream.deliver(upsert(1, "one", lsn=1))
    for name, value in bucket.storage_options().items():
        monkeypatch.setenv(name, value)

    said = CliRunner().invoke(cli.app, ["explain", stream.target.replace("s3a:", "s3:")])
    found = explain(stream.target, storage_options=bucket.storage_options())

    assert said.exit_code == 0, said.output
    assert "driver" in said.stdout
    assert [merge.engine for merge in found.merges] == ["driver"]
    assert found.driver is None


# -- who may write ------------------------------------------------------------------------------


@pytest.mark.usefixtures("looks_then_puts")
def test_without_a_promise_spark_alone_merges_and_says_what_may_happen_once(
    spark: SparkSession, bucket: s3.Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    stream = OnS3(spark, bucket)
    sink = stream.sink()
    with caplog.at_level(logging.WARNING, "stream_merge"):
        results = [run(sink, batch(spark, stream.schema, upsert(1, "x", lsn=n)), n) for n in (1, 2)]

    assert [result.engine for result in results] == ["spark", "spark"]
    assert results[1].plan.startswith("spark: the target is not where the driver may write")
    (warning,) = [record for record in caplog.records if record.event == "commits_not_kept_apart"]
    assert "single_writer=True" in warning.remedy


@pytest.mark.usefixtures("looks_then_puts")
def test_engines_in_the_driver_are_refused_without_a_promise(spark: SparkSession, bucket: s3.Bucket) -> None:
    """Before anything is written, the table included."""
    stream = OnS3(spark, bucket, engine="driver")
    refused = r"engine='driver' cannot merge into 's3a://.*set single_writer=True if nobody else writes"

    with pytest.raises(ConfigError, match=refused):
        run(stream.sink(), batch(spark, stream.schema, upsert(1, "x", lsn=1), upsert(None, "y", lsn=1)), 0)

    assert not stream.folder.exists()


# -- files of a store ---------------------------------------------------------------------------


@pytest.mark.engines("auto", "rewrite")
def test_rows_of_files_that_others_wrote_are_merged_in_the_driver(spark: SparkSession, bucket: s3.Bucket) -> None:
    """Spark's files are copied when a batch touches them, with their vectors; partitions, and names with escapes."""
    stream = OnS3(spark, bucket, partition_by=["name"], **WHERE_NEEDED)
    stream.deliver(*(upsert(key, f"a b%{key % 2}", lsn=1) for key in range(6)))
    stream.sql("DELETE FROM {target} WHERE id = 4").collect()
    stream.sql("INSERT INTO {target} SELECT 9, 1, 'a b%0'").collect()

    done = stream.deliver(upsert(2, "a b%0", lsn=2), upsert(4, "back", lsn=2), delete(9, lsn=2), delete(3, lsn=2))

    assert (done.engine, ledger(done)) == ("driver", {"received": 4, "inserted": 1, "updated": 1, "deleted": 2})
    assert stream.rows("id", "lsn", "name") == [
        (0, 1, "a b%0"),
        (1, 1, "a b%1"),
        (2, 2, "a b%0"),
        (4, 2, "back"),
        (5, 1, "a b%1"),
    ]
    check_table(bucket.folder / stream.place)


def test_a_file_is_copied_once(spark: SparkSession, bucket: s3.Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """What a merge writes is kept as it is sent; another sink of the process finds it there."""
    stream = OnS3(spark, bucket, tombstones=False, **WHERE_NEEDED)
    spark.range(1_000).selectExpr("id", "1L AS lsn", "'x' AS name").repartition(3).write.format("delta").option(
        "delta.enableDeletionVectors", "true"
    ).save(stream.target)
    with caplog.at_level(logging.INFO, "stream_merge"):
        done = [stream.deliver(*(upsert(key, "y", lsn=n) for key in range(0, 1_000, 300))) for n in range(2, 6)]

    assert {result.mode for result in done} == {"mark"}
    (copied,) = [record for record in caplog.records if record.event == "files_copied"]
    assert copied.files == 3
    assert stream.rows("lsn").count((5,)) == 4


@pytest.mark.engines("auto", "rewrite")
def test_batches_whose_files_do_not_fit_on_the_disk_are_left_to_others(
    spark: SparkSession, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST_BYTES", 10)
    stream = OnS3(spark, bucket)
    results = [stream.deliver(upsert(1, "x", lsn=n)) for n in (1, 2)]

    assert results[1].engine == "spark"
    assert stream.rows("id", "lsn") == [(1, 2)]


@CONDITION
@pytest.mark.engines("auto", "rewrite")
def test_a_commit_that_comes_second_leaves_nothing(
    spark: SparkSession, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are deleted, on the store, too; the merge is made again on what the other one has left."""
    stream = OnS3(spark, bucket, tombstones=False)
    stream.deliver(upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
    commit, others = CopiedFolder.commit, ["UPDATE {target} SET name = 'theirs' WHERE id = 2"]

    def overtaken(self: CopiedFolder, made: Commit) -> None:
        if others:
            stream.sql(others.pop()).collect()
        commit(self, made)

    monkeypatch.setattr(CopiedFolder, "commit", overtaken)
    done = stream.deliver(upsert(1, "new", lsn=2))

    assert (done.engine, done.conflicts) == ("driver", {"ConcurrentWriteException": 1})
    assert stream.rows("id", "name") == [(1, "new"), (2, "theirs")]
    log = "".join(path.read_text() for path in (bucket.folder / stream.place / "_delta_log").glob("*.json"))
    files = [path.name for path in (bucket.folder / stream.place).iterdir() if path.is_file()]
    assert [name for name in files if name.startswith("on-read-") and name not in log] == []


@pytest.mark.usefixtures("looks_then_puts")
def test_a_commit_that_another_process_has_overwritten_stops_the_sink(spark: SparkSession, bucket: s3.Bucket) -> None:
    """Another JVM looks before our commit, and puts its own after it, as Delta's log store for S3 does."""
    stream = OnS3(spark, bucket, **PROMISED)
    sink = stream.sink()
    run(sink, batch(spark, stream.schema, upsert(1, "first", lsn=1)), 0)
    before = run(sink, batch(spark, stream.schema, upsert(1, "second", lsn=2)), 1)
    put(spark, f"{stream.target}/_delta_log/{before.version:020d}.json", THEIRS)

    for _ in range(2):  # whoever tries again is told again
        with pytest.raises(ConfigError, match=rf"version {before.version} of .* batch 1, was overwritten by another"):
            run(sink, batch(spark, stream.schema, upsert(1, "third", lsn=3)), 2)


@pytest.mark.usefixtures("looks_then_puts")
def test_an_overwritten_commit_stops_its_query_after_a_restart_too(
    spark: SparkSession, bucket: s3.Bucket, tmp_path: Path
) -> None:
    """A job of one batch each time, such as `files --once`, has no next batch in its process."""
    table, source, checkpoint = bucket.uri(f"{uuid4().hex[:8]}/t"), tmp_path / "in", tmp_path / "checkpoint"
    scenario.write_files(source, scenario.BATCHES[:1])
    sink = scenario.sink(table)
    scenario.stream(spark, source, checkpoint, sink)
    scenario.stream(spark, source, checkpoint, scenario.sink(table))
    assert sink.last_result is not None
    put(spark, f"{table}/_delta_log/{sink.last_result.version:020d}.json", THEIRS)
    scenario.write_files(source, scenario.BATCHES[2:])

    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="batch 0, was overwritten by another writer"):
            scenario.stream(spark, source, checkpoint, scenario.sink(table))


@pytest.mark.usefixtures("looks_then_puts")
def test_a_commit_that_was_tidied_away_is_not_missed(spark: SparkSession, bucket: s3.Bucket) -> None:
    """Delta deletes old commits behind a checkpoint."""
    stream = OnS3(spark, bucket, table_properties={"delta.checkpointInterval": "1"})
    sink = stream.sink()
    ours = run(sink, batch(spark, stream.schema, upsert(1, "first", lsn=1)), 0)
    stream.sql("DELETE FROM {target} WHERE id = 7").collect()
    stream.sql("INSERT INTO {target} SELECT 2, 1, 'theirs'").collect()
    remove(spark, f"{stream.target}/_delta_log/{ours.version:020d}.json")

    run(sink, batch(spark, stream.schema, upsert(1, "second", lsn=2)), 1)

    assert stream.rows("id", "name") == [(1, "second"), (2, "theirs")]


def test_two_sinks_of_one_process_lose_no_commit_by_spark(spark: SparkSession, bucket: s3.Bucket) -> None:
    """Whoever loses a commit tries again."""
    retry = RetryPolicy(attempts=20, backoff_max_seconds=0.3, backoff_jitter_seconds=0.2)
    stream = OnS3(spark, bucket, tombstones=False, retry=retry)
    run(stream.sink(), batch(spark, stream.schema, upsert(0, "before", lsn=1)), 0)

    def merged(writer: int) -> None:
        own = OnS3(spark, bucket, tombstones=False, retry=retry, app_id=f"writer {writer}")
        own.settings["target"] = stream.target
        sink = own.sink()
        for number in range(2):
            run(sink, batch(spark, stream.schema, upsert(writer, f"{writer}", lsn=number)), number)

    with ThreadPoolExecutor() as threads:
        list(threads.map(merged, (1, 2)))

    assert stream.rows("id", "lsn") == [(0, 1), (1, 1), (2, 1)]
    assert len(stream.changes()) == 1 + 2 * (1 + 2)


# -- how the store is reached -------------------------------------------------------------------


def test_a_table_that_the_driver_sees_elsewhere_is_left_to_spark_or_refused(
    spark: SparkSession, bucket: s3.Bucket, elsewhere: s3.Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stores, a table of the same name in each: the driver must not merge into the other one."""
    stream = OnS3(spark, bucket, **PROMISED)
    run(stream.sink(), batch(spark, stream.schema, upsert(1, "here", lsn=1)), 0)
    there = elsewhere.folder / stream.place / "_delta_log"
    there.mkdir(parents=True)
    log = (bucket.folder / stream.place / "_delta_log" / f"{0:020d}.json").read_text()
    (there / f"{0:020d}.json").write_text(log.replace('"metaData":{"id":"', '"metaData":{"id":"other-'))
    stream.settings["storage_options"] = elsewhere.storage_options()

    result = run(stream.sink(), batch(spark, stream.schema, upsert(1, "there", lsn=2)), 1)

    assert (result.engine, stream.rows("id", "name")) == ("spark", [(1, "there")])
    (said,) = [record for record in caplog.records if record.msg.startswith("table_left_to_spark")]
    assert said.levelno == logging.WARNING
    assert "[STORE_MISMATCH]" in said.getMessage()
    stream.settings["engine"] = "driver"
    with pytest.raises(ConfigError, match=r"\[STORE_MISMATCH\].*match Spark's settings"):
        run(stream.sink(), batch(spark, stream.schema, upsert(1, "there", lsn=3)), 2)


@pytest.fixture
def elsewhere(tmp_path: Path, bucket: s3.Bucket) -> Iterator[s3.Bucket]:
    """A bucket of the same name on another server."""
    server = s3.S3Server(tmp_path / "elsewhere")
    with running(server):
        yield server.bucket(bucket.name)


def test_secrets_show_nowhere(spark: SparkSession, bucket: s3.Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """Neither where all goes well nor where a secret is wrong: in what is said, kept, counted or raised."""
    registry = CollectorRegistry()
    stream = OnS3(spark, bucket, **PROMISED, metrics=MergeMetrics(registry=registry))
    wrong = "w/r0ng-" + bucket.server.secret_key
    with caplog.at_level(logging.DEBUG, "stream_merge"):
        stream.deliver(upsert(1, "one", lsn=1), upsert(None, "no key", lsn=1))
        stream.deliver(upsert(1, "new", lsn=2), delete(2, lsn=2))
        options = {**bucket.storage_options(), "AWS_SECRET_ACCESS_KEY": wrong}
        sink = sink_with(target=stream.target, **DEFAULTS, **PROMISED, engine="driver", storage_options=options)
        with pytest.raises(ConfigError) as caught:
            sink(batch(spark, stream.schema, upsert(1, "newer", lsn=3)), 2)
        with pytest.raises(ConfigError, match="cannot be read without Spark") as unread:
            explain(stream.target, storage_options=options)

    said = [
        str(caught.value),
        repr(caught.value),
        str(unread.value),
        repr(unread.value),
        repr(sink),
        repr(sink._calls.spec),
        repr(vars(sink)),
        caplog.text,
    ]
    said += [repr(vars(record)) for record in caplog.records]
    said.append(generate_latest(registry).decode())
    kept = [file.read_bytes() for file in bucket.folder.parent.rglob("*") if file.is_file()]
    secrets = (bucket.server.secret_key, wrong)
    assert len(kept) > 10
    assert [text for text in said for secret in secrets if secret in text] == []
    assert [text[:80] for text in kept for secret in secrets if secret.encode() in text] == []
    assert [process for process in command_lines() for secret in secrets if secret.encode() in process] == []


def put(spark: SparkSession, uri: str, text: str) -> None:
    """Write an object over whatever is there, past every log store."""
    path = spark._jvm.org.apache.hadoop.fs.Path(uri)
    stream = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).create(path, True)
    stream.write(bytearray(text.encode()))
    stream.close()


def remove(spark: SparkSession, uri: str) -> None:
    path = spark._jvm.org.apache.hadoop.fs.Path(uri)
    path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(path, False)
