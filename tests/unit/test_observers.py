"""What observers of a batch cost, and that none of them can fail or delay it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from textwrap import dedent

import pytest
from openlineage_server import serving
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stream_merge import ConfigError, EventCounts, MergeResult
from stream_merge.merge.clock import Observed, PhaseClock
from stream_merge.model.observer import MicroBatch
from stream_merge.observers import lineage
from stream_merge.observers.lineage import Lineage, dataset
from stream_merge.observers.otel import Traces

BATCH = MicroBatch(query="orders", target="orders", batch_id=7, began_ns=time.time_ns(), location="s3a://lake/t/orders")
RESULT = MergeResult(
    target="orders",
    query="orders",
    batch_id=7,
    outcome="no_change",
    engine="driver",
    mode="mark",
    version=None,
    attempts=1,
    conflicts={},
    plan="",
    events=EventCounts(),
)
ENDED = replace(BATCH, phases=[("merge", BATCH.began_ns, BATCH.began_ns + 10**9)], result=RESULT)


@pytest.fixture(autouse=True)
def own_sender() -> Iterator[None]:
    yield
    lineage._sender.cache_clear()


def test_what_an_observer_raises_is_logged_and_fails_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    class Broken:
        def started(self, batch: MicroBatch) -> None:
            calls.append("started")
            raise RuntimeError

        def ended(self, batch: MicroBatch) -> None:
            calls.append(batch.error_code)
            raise RuntimeError

    observed = Observed([Broken()], PhaseClock(), query="q", target="t", batch_id=0)
    observed.ended(lambda: {"error": ConfigError("[TARGET_REPLACED] restore it")})

    assert calls == ["started", "TARGET_REPLACED"]  # also where the source failed before the sink began
    assert [record.message for record in caplog.records] == ["observer_failed"] * 2


def test_the_intervals_of_a_clock_have_no_gaps_and_begin_with_the_source() -> None:
    clock = PhaseClock(time.perf_counter() - 2)
    with clock.phase("plan"), clock.phase("merge"):
        time.sleep(0.01)
    found = clock.intervals()

    assert [phase for phase, _, _ in found] == ["read", "other", "plan", "merge", "plan", "other"]
    assert [end for _, _, end in found[:-1]] == [begin for _, begin, _ in found[1:]]
    assert (clock.began_ns, found[-1][2]) == (found[0][1], pytest.approx(time.time_ns(), abs=10**9))
    assert sum(end - begin for _, begin, end in found) / 1e9 == pytest.approx(sum(clock.seconds().values()), abs=1e-3)


def test_a_failed_batch_is_an_error_with_a_code_and_no_text() -> None:
    exported, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))

    Traces(provider).ended(replace(ENDED, result=None, error=ValueError("what an event holds")))

    child, span = exported.get_finished_spans()
    assert (child.name, span.status.description, (span.attributes or {})["error.type"]) == (
        "stream_merge.merge",
        "ValueError",
        "ValueError",
    )
    assert "what an event holds" not in span.to_json()


def test_without_an_sdk_spans_go_nowhere() -> None:
    Traces().ended(ENDED)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("s3a://lake/t/orders", ("s3://lake", "t/orders")),
        ("gs://lake/orders/", ("gs://lake", "orders")),
        ("abfss://c@account.dfs.core.windows.net/orders", ("abfss://c@account.dfs.core.windows.net", "orders")),
        ("hdfs://name:8020/orders", ("hdfs://name:8020", "/orders")),
        ("file:/data/a%20#b", ("file", "/data/a%20#b")),
        ("/data/orders", ("file", "/data/orders")),
        ("kafka://broker:9092/shop.orders", ("kafka://broker:9092", "shop.orders")),
    ],
)
def test_tables_folders_and_topics_have_the_names_of_openlineage(place: str, named: tuple[str, str]) -> None:
    assert dataset(place) == named


def test_a_run_starts_and_completes_under_one_id_with_the_key_as_bearer() -> None:
    with serving() as server:
        observer = Lineage(server.url, namespace="shop", inputs=["s3://lake/in"], api_key="k")
        observer.started(BATCH)
        observer.ended(ENDED)
        start, complete = server.events(2)

    assert start["run"]["runId"] == complete["run"]["runId"]
    assert (complete["job"]["namespace"], complete["job"]["name"], complete["path"]) == (
        "shop",
        "orders",
        "/api/v1/lineage",
    )
    assert "version" not in complete["outputs"][0]["facets"]
    assert server.headers[0]["Authorization"] == "Bearer k"


@pytest.mark.parametrize("kind", ["closed", "silent", "refusing"])
def test_a_server_that_is_away_delays_no_batch_and_is_told_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A port where nobody listens, one that never answers, and a server that takes no events."""
    with socket.create_server(("127.0.0.1", 0)) as listening, serving(status=400) as refusing:
        port = listening.getsockname()[1]
        if kind == "closed":
            listening.close()
        observer = Lineage(refusing.url if kind == "refusing" else f"http://127.0.0.1:{port}")
        longest = 0.0
        for _ in range(lineage._WAITING + 50):
            before = time.perf_counter()
            observer.started(BATCH)
            longest = max(longest, time.perf_counter() - before)
        if kind == "refusing":
            refusing.events(2)
            told = [record.message for record in caplog.records if "400" in record.message]
            assert told == ["lineage_away error=HTTPError status=400"]
        began = time.perf_counter()
        if kind != "silent":
            lineage._sender(*observer._server).close()
            assert time.perf_counter() - began < 1
    assert longest < lineage._SECONDS / 2  # a busy machine pauses a thread for long; waiting would take twice that


def test_without_observers_their_packages_are_not_imported() -> None:
    program = """
        import sys
        import stream_merge.cli.app
        assert not [name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "openlineage")]
        """
    subprocess.run([sys.executable, "-c", dedent(program)], check=True, timeout=120)
