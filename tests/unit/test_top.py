"""`stream-merge top`: what scrapes of running queries tell, and how it is shown."""

from __future__ import annotations

import io
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from rich.console import Console
from services import tls
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared
from stream_merge.cli.screens.top import drawn, duration
from stream_merge.metrics.catalogue import QUERY_FAILED, TOPIC_LAG, TOPIC_NEWEST, TOPIC_POLLED
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.metrics.scraped import Endpoint, Scrape, Status, UnreachableError, Watched
from stream_merge.metrics.server import serve
from stream_merge.model.results import EventCounts, FailedBatch, MergeResult

SINK = ("orders_stream", "orders")
NOW = 1_000_000.0


class Process:
    """A process with one sink, whose metrics are what a real one exports."""

    def __init__(self, *, started: float = NOW - 100) -> None:
        self.registry = CollectorRegistry()
        self.metrics = MergeMetrics(self.registry)
        self.metrics.prepare(*SINK)
        Gauge("process_start_time_seconds", "", registry=self.registry).set(started)

    def merge(
        self, events: int = 100, *, seconds: float = 2.0, engine: str = "driver", refusal: str | None = None
    ) -> None:
        self.metrics.attempt(*SINK)
        self.metrics.observe(
            MergeResult(
                query=SINK[0],
                target=SINK[1],
                batch_id=0,
                outcome="committed",
                engine=engine,
                mode=None if engine == "spark" else "mark",
                version=7,
                attempts=1,
                conflicts={},
                plan="",
                events=EventCounts(received=events, updated=events - 1, quarantined=1),
                refusal=refusal,  # type: ignore[arg-type]
                seconds={"read": seconds / 4, "merge": seconds * 3 / 4},
            )
        )

    def fail(self) -> None:
        self.metrics.observe_failure(
            FailedBatch(query=SINK[0], target=SINK[1], batch_id=0, error="X", seconds={"merge": 1.0})
        )

    def topic(self, *, lag: float, newest: float = NOW, polled: float = NOW, name: str = "shop.orders") -> None:
        values = ((TOPIC_LAG, lag), (TOPIC_NEWEST, newest), (TOPIC_POLLED, polled))
        self.metrics.observe_topics(*SINK, store=[(instrument, (name,), value) for instrument, value in values])

    def scrape(self, at: float = NOW) -> Scrape:
        return Scrape.parse(generate_latest(self.registry).decode(), at=at)


def status(process: Process, at: float = NOW, watched: Watched | None = None) -> Status:
    (found,) = (Watched() if watched is None else watched).add(process.scrape(at))
    return found


def test_one_scrape_gives_rates_since_the_process_started() -> None:
    process = Process()
    for _ in range(4):
        process.merge()

    found = status(process)

    assert (found.query, found.target) == SINK
    assert found.events_per_second == pytest.approx(4.0)
    assert found.seconds_per_batch == pytest.approx(2.0)
    assert found.phases == {"read": pytest.approx(0.5), "merge": pytest.approx(1.5)}
    assert found.engines == {"driver": 4}
    assert found.quarantined == 4
    assert found.lag is None
    assert found.behind_seconds is None


def test_rates_are_of_the_last_minute_and_times_of_the_newest_batches() -> None:
    process, watched = Process(), Watched()
    process.merge(events=5000, seconds=60)
    status(process, NOW, watched)
    process.merge(events=200, seconds=1.0, engine="spark", refusal="filter")
    status(process, NOW + 10, watched)

    found = status(process, NOW + 20, watched)
    later = status(process, NOW + 90, watched)

    assert found.events_per_second == pytest.approx(10.0)
    assert (found.seconds_per_batch, found.engines, found.refusals) == (pytest.approx(1.0), {"spark": 1}, ("filter",))
    assert later.events_per_second == 0
    assert later.seconds_per_batch == pytest.approx(1.0)


def test_a_restarted_process_counts_from_the_beginning() -> None:
    watched = Watched()
    before = Process()
    for _ in range(10):
        before.merge()
    status(before, NOW, watched)
    after = Process(started=NOW + 5)
    after.merge()

    assert status(after, NOW + 15, watched).events_per_second == pytest.approx(10.0)


def test_lag_is_summed_over_topics_and_age_is_of_the_oldest_with_lag() -> None:
    process = Process()
    process.topic(name="a", lag=5, newest=NOW - 30)
    process.topic(name="b", lag=7, newest=NOW - 90)
    process.topic(name="idle", lag=0, newest=NOW - 9000)

    found = status(process)

    assert (found.lag, found.behind_seconds, found.state) == (12, 90, "behind")


def test_without_lag_a_table_is_up_to_date_however_old_its_newest_event_is() -> None:
    process = Process()
    process.merge()
    process.topic(lag=0, newest=NOW - 9000)

    assert status(process).behind_seconds == 0


def test_the_state_is_the_worst_that_holds() -> None:
    process, watched = Process(), Watched()

    def state(at: float) -> str:
        return status(process, at, watched).state

    assert state(NOW) == "starting"
    process.merge()
    process.topic(lag=3)
    assert state(NOW + 1) == "behind"
    process.topic(lag=0, polled=NOW - 100)
    assert state(NOW + 2) == "no broker"
    process.fail()
    assert state(NOW + 3) == "failing"
    process.metrics.observe_topics(*SINK, store=[(QUERY_FAILED, (), 1)])
    assert state(NOW + 4) == "ended"


def test_a_query_that_committed_within_a_minute_runs_and_another_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_merge.metrics.instruments.time.time", lambda: NOW)
    process = Process()
    process.merge()

    assert status(process, NOW + 10).state == "running"
    assert status(process, NOW + 100).state == "idle"


def test_lost_commits_and_exhausted_retries_are_counted() -> None:
    process = Process()
    process.metrics.conflict(*SINK, "ConcurrentAppendException")
    text = generate_latest(process.registry).decode()
    text += 'stream_merge_retries_exhausted_total{query="orders_stream",target="orders"} 2.0\n'

    (found,) = Watched().add(Scrape.parse(text, at=NOW))

    assert (found.conflicts, found.exhausted) == (1, 2)


def shown(found: dict[str, list[Status] | str], width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(drawn(found, at="12:00:00", width=width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_shows_a_query_and_a_line_an_endpoint_that_does_not_answer() -> None:
    process = Process()
    process.merge(engine="spark", refusal="filter")
    process.topic(lag=12_000, newest=NOW - 300)

    text = shown({"http://a:1/metrics": [status(process)], "http://b:2/metrics": "does not answer: refused"})

    (row,) = (line for line in text.splitlines() if "orders_stream" in line)
    assert row.split()[:9] == ["a:1", "orders_stream", "orders", "behind", "1", "12,000", "5", "min", "0"]
    assert "spark (filter)" in row
    assert "merge 1.5, read 0.5" in row
    assert "http://b:2/metrics: does not answer: refused" in text
    assert "answers, but no query has started" in shown({"http://a:1/metrics": []})


def test_a_narrow_terminal_shows_each_number_of_fewer_columns() -> None:
    process = Process()
    process.merge()
    process.topic(lag=12_345_678, newest=NOW - 300)

    header, row = shown({"http://a:1/metrics": [status(process)]}, width=80).splitlines()[1:]

    assert header.split() == ["query", "state", "events/s", "lag", "behind", "s/batch", "engine", "failed", "quar."]
    assert row.split() == ["orders_stream", "behind", "1", "12,345,678", "5", "min", "2.00", "driver", "0", "1"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0 s"), (119, "119 s"), (300, "5 min"), (9000, "2 h"), (3e5, "3 d")]
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_the_command_prints_one_table_of_a_served_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.OUT, "width", 160)
    process = Process()
    process.merge()
    with serve(0, registry=process.registry) as server:
        told = CliRunner().invoke(cli.app, ["top", "--once", server.url])
        beside = CliRunner().invoke(cli.app, ["top", "--once", server.url, "http://127.0.0.1:1/metrics"])

    assert told.exit_code == 0
    assert "orders_stream" in told.output
    assert beside.exit_code == 4
    assert "orders_stream" in beside.output
    assert "http://127.0.0.1:1/metrics: does not answer: [Errno 111] Connection refused" in beside.output


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An https endpoint that wants a token: its URL and the root certificate."""
    tls.need()
    authority = tls.Authority(tmp_path / "ca")
    exposition = generate_latest(Process().registry)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers["Authorization"] == "Bearer s3cret"
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(exposition if is_known else b"")

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate("server"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/metrics", authority.root
    server.shutdown()
    thread.join()
    server.server_close()


def test_https_with_a_token_of_a_file(guarded: tuple[str, Path], tmp_path: Path) -> None:
    url, root = guarded
    token = tmp_path / "token"
    token.write_text("s3cret\n")

    assert SINK in Scrape.parse(Endpoint(url=url, ca_file=root, token_file=token).scrape(), at=NOW).sinks
    with pytest.raises(UnreachableError, match="answers 401 Unauthorized"):
        Endpoint(url=url, ca_file=root).scrape()
    with pytest.raises(UnreachableError, match="certificate verify failed"):
        Endpoint(url=url, token_file=token).scrape()
    with pytest.raises(UnreachableError, match="No such file"):
        Endpoint(url=url, ca_file=root, token_file=tmp_path / "none").scrape()


def test_what_is_no_exposition_is_said() -> None:
    with pytest.raises(UnreachableError, match="something else than metrics"):
        Scrape.parse("<html>hello</html>", at=NOW)
