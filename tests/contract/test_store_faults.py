"""A store on bad days: batches end right or with one sentence, and the same batch again makes it right.

Faults are made by a proxy in front of a real S3 server. Needs a JVM: Spark's file system for S3 is Java. What errors
say is text: `tests/unit/test_stores.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import deltalake
import engines
import pyarrow as pa
import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from pyspark.sql import SparkSession
from services import running, s3, s3_proxy
from services.s3_proxy import (
    DENIED,
    EXPIRED,
    NO_BUCKET,
    SLOW_DOWN,
    Answering,
    Delayed,
    Request,
    S3Proxy,
    Without,
    answer_dropped,
    answer_lost,
    by_kind,
    dropped,
    shown,
)

from stream_merge import (
    ConfigError,
    MergeFailedError,
    RetryPolicy,
    StreamMergeError,
)
from stream_merge.model import names
from stream_merge.model.results import MergeResult
from stream_merge.tables.files.rows import rows as table_rows
from stream_merge.tables.log.handle import LogHandle
from stream_merge.testing import batch, run

PATIENCE = {
    "attempts.maximum": "2",
    "retry.limit": "1",
    "retry.interval": "10ms",
    "retry.throttle.limit": "2",
    "retry.throttle.interval": "10ms",
}
"""Of S3A, which else tries for minutes."""
IMPATIENT = {"max_retries": "2", "retry_timeout": "5s", "backoff_config.init_backoff": "10ms"}
"""Of delta-rs likewise."""
COMMIT = r"/orders/_delta_log/\d+\.json$"
TOMBSTONES = r"__stream_merge_tombstones_orders/"
FIRST = (upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
SECOND = (delete(2, lsn=2), upsert(3, "three", lsn=2))
EVENTS = (upsert(1, "new", lsn=3), upsert(2, "late", lsn=1), upsert(4, "four", lsn=3), delete(3, lsn=3))
MOST_REQUESTS = 22
FOR_PROGRAMMERS = ("org.apache", "software.amazon", "Caused by", "\tat ", "\x1b", "Error performing")
"""What stands in traces of Java and errors of Rust."""


class OnBadStore(ChangeStream):
    """A change stream into a bucket behind the proxy, of which two batches were merged before the store went bad."""

    def __init__(self, spark: SparkSession, bucket: s3.Bucket, way: str) -> None:
        self.place = f"{uuid4().hex[:8]}/orders"
        self.way = way
        self.bucket = bucket
        super().__init__(
            spark,
            bucket.uri(self.place),
            folder=(bucket.folder / self.place).parent,
            engine=engines.asked(way),
            # By Spark they would take as long as its merge; whoever writes them finds them again as the merge does.
            tombstones=way != "spark",
            single_writer=True,
            storage_options={**bucket.storage_options(), **IMPATIENT},
            table_properties={} if way == "mark" else {"delta.enableDeletionVectors": "false"},
            retry=RetryPolicy(backoff_initial_seconds=0.01, backoff_jitter_seconds=0.01),
        )
        self.kept = self.sink()
        self.stale = {"stale": 1, "inserted": 1} if self.settings["tombstones"] else {"inserted": 2}
        """What becomes of upserts in `EVENTS`, of which one is older than a delete."""

    def begin(self) -> OnBadStore:
        """Merge the batches of before."""
        self.merge(0, *FIRST)
        self.merge(1, *SECOND)
        return self

    def again(self) -> OnBadStore:
        """A copy of the tables, with a sink that has been at work on it."""
        found = OnBadStore(self.spark, self.bucket, self.way)
        for file in filter(Path.is_file, self.folder.rglob("*")):
            self.bucket.put(f"{found.folder.name}/{file.relative_to(self.folder)}", file.read_bytes())
        assert found.merge(1, *SECOND).outcome == "skipped_duplicate"
        return found

    def merge(self, batch_id: int, *events: tuple[Any, ...]) -> MergeResult:
        """One batch, by the sink that has merged those before."""
        return run(self.kept, batch(self.spark, self.schema, *events), batch_id)

    def on_disk(self, name: str = "orders") -> LogHandle:
        """A table as it lies on the server's disk."""
        return LogHandle(str(self.folder / name))

    @property
    def version(self) -> int:
        return self.on_disk().version

    def ids(self) -> list[int]:
        return sorted(table_rows(self.on_disk())["id"].to_pylist())

    def expect_merged_once(self) -> None:
        """What the three batches come to, whatever has happened on the way: rows, change feed, ids, tombstones."""
        late = [] if self.settings["tombstones"] else [(2, 1, "late")]
        rows = table_rows(self.on_disk()).select(["id", "lsn", "name"]).to_pylist()
        assert sorted(tuple(row.values()) for row in rows) == [(1, 3, "new"), *late, (4, 3, "four")]
        feed = pa.table(deltalake.DeltaTable(str(self.folder / "orders")).load_cdf(starting_version=0).read_all())
        changes = feed.select(["_change_type", "id", "lsn", "name"]).to_pylist()
        assert sorted(tuple(change.values()) for change in changes) == sorted(
            [
                ("insert", 1, 1, "one"),
                ("insert", 2, 1, "two"),
                ("insert", 3, 2, "three"),
                ("delete", 2, 1, "two"),
                ("update_preimage", 1, 1, "one"),
                ("update_postimage", 1, 3, "new"),
                ("insert", 4, 3, "four"),
                ("delete", 3, 2, "three"),
                *(("insert", *row) for row in late),
            ]
        )
        assert self.merge(2, *EVENTS).outcome == "skipped_duplicate"
        if self.settings["tombstones"]:
            entries = table_rows(self.on_disk("__stream_merge_tombstones_orders")).sort_by("id")
            assert entries["id"].to_pylist() == [2, 3]


@pytest.fixture(scope="module")
def proxy(bucket: s3.Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Proxy]:
    """In front of the server that all tests share."""
    found = S3Proxy(bucket.server, tmp_path_factory.mktemp("proxy") / "s3")
    with running(found):
        yield found


@pytest.fixture(scope="module")
def begun(spark: SparkSession, proxy: S3Proxy) -> Callable[[str], OnBadStore]:
    """The stream that is merged in a way, begun once, in a bucket behind the proxy which Spark asks but a few times."""
    bucket = proxy.bucket("bad-days")
    bucket.tell(spark)
    context: Any = spark.sparkContext
    for name, value in PATIENCE.items():
        context._jsc.hadoopConfiguration().set(f"fs.s3a.bucket.{bucket.name}.{name}", value)
    return cache(lambda way: OnBadStore(spark, bucket, way).begin())


@pytest.fixture(params=engines.WAYS)
def stream(request: pytest.FixtureRequest, begun: Callable[[str], OnBadStore]) -> OnBadStore:
    """Merged in each way."""
    return begun(request.param).again()


@pytest.fixture
def driven(begun: Callable[[str], OnBadStore]) -> OnBadStore:
    """As `stream`, merged by the driver."""
    return begun("rewrite").again()


# -- batches that end right ---------------------------------------------------------------------


class Trouble(NamedTuple):
    """What happens, to which requests."""

    act: s3_proxy.Act
    kinds: tuple[s3_proxy.Kind, ...] = ()
    where: str = ""
    times: int | None = 1


OVERCOME = {
    "a commit that was dropped on the way": Trouble(dropped, ("PUT",), COMMIT),
    "a commit whose answer was dropped": Trouble(answer_dropped, ("PUT",), COMMIT),
    "a commit whose answer said it had failed": Trouble(answer_lost, ("PUT",), COMMIT),
    "a store that asks to slow down": Trouble(Answering(SLOW_DOWN), times=2),
}


@pytest.mark.parametrize("trouble", OVERCOME.values(), ids=OVERCOME)
def test_a_batch_is_merged_and_counted_once(stream: OnBadStore, proxy: S3Proxy, trouble: Trouble) -> None:
    """A commit whose put was made again is ours, although the store says that the version is taken."""
    with proxy.fault(trouble.act, *trouble.kinds, where=trouble.where, times=trouble.times) as hits:
        result = stream.merge(2, *EVENTS)
        assert hits() == trouble.times

    assert (result.outcome, result.version) == ("committed", stream.version)
    assert ledger(result) == {"received": 4, "updated": 1, "deleted": 1, **stream.stale}
    stream.expect_merged_once()


@pytest.mark.parametrize("act", [answer_dropped, answer_lost])
def test_deletes_are_remembered_once(driven: OnBadStore, proxy: S3Proxy, act: s3_proxy.Act) -> None:
    """The append of tombstones is found by its transaction id."""
    with proxy.fault(act, "PUT", where=f"{TOMBSTONES}{COMMIT[len('/orders/') :]}", times=1) as hits:
        result = driven.merge(2, *EVENTS)
        assert hits() == 1

    assert (result.outcome, result.events.deleted) == ("committed", 1)
    driven.expect_merged_once()


def test_slow_answers_only_take_time(driven: OnBadStore, proxy: S3Proxy) -> None:
    with proxy.fault(Delayed(0.5), "PUT", where=COMMIT, times=1) as hits:
        assert driven.merge(2, *EVENTS).outcome == "committed"
        assert hits() == 1

    driven.expect_merged_once()


# -- batches that end with a sentence -----------------------------------------------------------


class Failure(NamedTuple):
    """What happens, and what is said."""

    trouble: Trouble
    error: type[StreamMergeError]
    said: str


FAILURES = {
    "no answer": Failure(
        Trouble(dropped, times=None),
        MergeFailedError,
        r"\[STORE_UNAVAILABLE\] .*the object store is unavailable, also after retries \(",
    ),
    "throttled": Failure(
        Trouble(Answering(SLOW_DOWN), times=None), MergeFailedError, r"the object store is unavailable.* \(503"
    ),
    "throttled at the commit": Failure(
        Trouble(Answering(SLOW_DOWN), ("PUT",), COMMIT, None),
        MergeFailedError,
        r"nothing was committed: \[STORE_UNAVAILABLE\] the object store is unavailable.* \(503",
    ),
    "credentials that have expired": Failure(
        Trouble(Answering(EXPIRED), times=None), ConfigError, "the object store rejects the credentials .* renew them"
    ),
    "a bucket that vanishes": Failure(
        Trouble(Answering(NO_BUCKET), times=None),
        ConfigError,
        r"the bucket does not exist \(404 NoSuchBucket, .*create it",
    ),
    "no permission to write": Failure(
        Trouble(Answering(DENIED), ("PUT",), times=None), StreamMergeError, r"the object store denies access \(403"
    ),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_batch_fails_with_one_sentence_and_can_be_repeated(
    stream: OnBadStore, proxy: S3Proxy, failure: Failure
) -> None:
    """What, where, what to do: no trace of Java or Rust. Nothing of the batch is in the target."""
    trouble, before = failure.trouble, stream.version
    with proxy.fault(trouble.act, *trouble.kinds, where=trouble.where, times=trouble.times) as hits:
        said = failed(lambda: stream.merge(2, *EVENTS), failure.error, failure.said)
        assert hits() > 0

    assert stream.bucket.uri(stream.place.split("/")[0]) in said
    assert stream.version == before
    assert stream.merge(2, *EVENTS).outcome == "committed"
    stream.expect_merged_once()


def test_no_permission_on_the_tombstones_fails_the_batch(driven: OnBadStore, proxy: S3Proxy) -> None:
    """Not to see what is remembered must not look like nothing being remembered."""
    with proxy.fault(Answering(DENIED), where=TOMBSTONES):
        said = failed(lambda: driven.merge(2, *EVENTS), StreamMergeError, r"the object store denies access \(403")

    assert "__stream_merge_tombstones_orders" in said
    assert driven.ids() == [1, 3]
    assert driven.merge(2, *EVENTS).outcome == "committed"
    driven.expect_merged_once()


def test_a_commit_that_is_not_listed_yet_has_landed(driven: OnBadStore, proxy: S3Proxy) -> None:
    """The store has answered its put; a listing that lags behind says nothing about it."""
    with proxy.fault(Without(r"/orders/_delta_log/0*3\.json"), "LIST"):
        result = driven.merge(2, *EVENTS)

    assert (result.outcome, result.engine) == ("committed", "driver")
    driven.expect_merged_once()


def test_commits_of_others_that_are_not_listed_yet_are_not_overwritten(
    spark: SparkSession, driven: OnBadStore, proxy: S3Proxy
) -> None:
    """A sink that has seen less begins from there: whichever error it ends with, the log stays whole."""
    older = driven.sink()
    with proxy.fault(Without(r"/orders/_delta_log/0*2\.json"), "LIST", caller="delta-rs"):
        failed(lambda: run(older, batch(spark, driven.schema, *EVENTS), 2), StreamMergeError, None)

    assert driven.merge(2, *EVENTS).outcome == "committed"
    driven.expect_merged_once()


def requests_of_spark(requests: Iterable[Request]) -> set[str]:
    """By its log store the driver puts commits; everything else it asks by delta-rs."""
    return {one.kind for one in requests if one.caller == "spark"}


def failed(call: Callable[[], object], error: type[StreamMergeError], said: str | None) -> str:
    """What a call raises, of that class: one line, without what only programmers read."""
    with pytest.raises(error, match=said) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert not any(
        sign in text for sign in ("org.apache", "software.amazon", "Caused by", "\tat ", "\x1b", "Error performing")
    )
    return text


# -- credentials --------------------------------------------------------------------------------


def test_credentials_are_renewed_without_a_restart(driven: OnBadStore) -> None:
    """delta-rs is told with each batch what Spark's settings say by then."""
    context: Any = driven.spark.sparkContext
    settings = driven.bucket.settings()
    (secret,) = (name for name in settings if name.endswith("secret.key"))
    driven.settings["storage_options"] = None
    driven.kept = driven.sink()
    driven.merge(2, upsert(5, "five", lsn=3))
    context._jsc.hadoopConfiguration().set(secret, "of yesterday")
    try:
        failed(lambda: driven.merge(3, upsert(6, "six", lsn=3)), ConfigError, r"rejects the credentials \(403")
    finally:
        context._jsc.hadoopConfiguration().set(secret, settings[secret])

    result = driven.merge(3, upsert(6, "six", lsn=3))

    assert (result.outcome, result.engine) == ("committed", "driver")
    assert driven.ids() == [1, 3, 5, 6]


# -- how much is asked --------------------------------------------------------------------------


def test_a_batch_asks_the_store_but_for_what_it_needs(driven: OnBadStore, proxy: S3Proxy) -> None:
    """Of each table whether its log has grown, and is the one of before (2), a data file (3), a commit and a look (4).

    Of the target beside that its one file is read (3), a change file written (1), and the commit held against the log
    (1). At the end whether somebody else has remembered a delete (1).
    """
    driven.merge(2, *(upsert(key, "some", lsn=3) for key in range(10, 300)))
    for number in (3, 4):
        driven.merge(number, upsert(1, "new", lsn=number + 1), delete(number * 10, lsn=number + 1))
    with proxy.counted() as requests:
        result = driven.merge(5, upsert(300, "new", lsn=6), upsert(1, "newest", lsn=6), delete(50, lsn=6))

    assert (result.engine, ledger(result)) == ("driver", {"received": 3, "inserted": 1, "updated": 1, "deleted": 1})
    assert requests_of_spark(requests) == {"PUT"}, shown(requests)
    assert len(requests) <= MOST_REQUESTS, shown(requests)
    assert by_kind(requests)["LIST"] <= 4, shown(requests)


def test_a_stream_without_deletes_does_not_ask_spark_for_their_table_again(
    begun: Callable[[str], OnBadStore], proxy: S3Proxy
) -> None:
    """Where delta-rs sees none, in a store that it is known to share with Spark, there is none; it looks each time."""
    driven = begun("rewrite")
    stream = OnBadStore(driven.spark, driven.bucket, "rewrite")
    for number in range(3):
        stream.merge(number, upsert(1, "some", lsn=number))
    with proxy.counted() as requests:
        result = stream.merge(3, upsert(1, "new", lsn=3))

    assert (result.engine, ledger(result)) == ("driver", {"received": 1, "updated": 1})
    assert requests_of_spark(requests) == {"PUT"}, shown(requests)
    assert len(requests) <= MOST_REQUESTS, shown(requests)
    deleted = stream.merge(4, delete(1, lsn=4))
    late = stream.merge(5, upsert(1, "late", lsn=3))
    assert (ledger(deleted), ledger(late)) == ({"received": 1, "deleted": 1}, {"received": 1, "stale": 1})


def test_an_overtaken_tombstone_is_marked_at_once(begun: Callable[[str], OnBadStore]) -> None:
    """Also where that takes requests: a process that begins afterwards counts what is older as the one before would."""
    marking = begun("mark")
    stream = OnBadStore(marking.spark, marking.bucket, marking.way)
    stream.merge(0, upsert(1, "one", lsn=1))
    stream.merge(1, delete(1, lsn=3))
    back = stream.merge(2, upsert(1, "back", lsn=4))
    stream.kept = stream.sink()

    late = stream.merge(3, upsert(1, "late", lsn=2))

    assert (ledger(back), ledger(late)) == ({"received": 1, "inserted": 1}, {"received": 1, "unaffected": 1})
    assert marks(stream) == [(1, 3, False), (1, 3, True)]


def marks(stream: OnBadStore) -> list[tuple[int, int, bool]]:
    """Entries of the tombstones: key, sequence, whether they mark it as overtaken."""
    entries = table_rows(stream.on_disk("__stream_merge_tombstones_orders"))
    sequences = [sequence["c1"] for sequence in entries[names.SEQUENCE_COLUMN].to_pylist()]
    return sorted(zip(entries["id"].to_pylist(), sequences, entries[names.REVIVED_COLUMN].to_pylist(), strict=True))
