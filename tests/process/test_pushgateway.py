"""What a short job pushes, on a real Pushgateway: it must not take away what a run before has left."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from services import Server, free_port, prometheus

from stream_merge import MergeMetrics
from stream_merge.errors import ConfigError
from stream_merge.metrics.push import expect_gateway, push
from stream_merge.model.results import EventCounts, MergeResult


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    prometheus.need()
    url = f"http://127.0.0.1:{free_port()}"
    program = prometheus.program().with_name("prometheus-pushgateway")
    server = Server([str(program), f"--web.listen-address={url.removeprefix('http://')}"], tmp_path)
    server.start(lambda: bool(scraped(url)))
    yield url
    server.stop()


def scraped(url: str) -> dict[tuple[str, str], float]:
    """Name and query of each series of ours -> its value."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    families = text_string_to_metric_families(text)
    return {(one.name, one.labels.get("query", "")): one.value for family in families for one in family.samples}


def run(query: str, *, version: int | None) -> CollectorRegistry:
    """The numbers of a run of its own: of a commit, or of nothing to merge."""
    registry = CollectorRegistry()
    metrics = MergeMetrics(registry)
    metrics.prepare(query, query)
    if version is not None:
        counts = EventCounts(received=3, inserted=3)
        metrics.observe(
            MergeResult(
                query=query,
                target=query,
                batch_id=version,
                outcome="committed",
                engine="driver",
                mode="mark",
                attempts=1,
                conflicts={},
                plan="",
                version=version,
                events=counts,
            )
        )
    return registry


def test_a_run_without_a_commit_keeps_when_the_last_one_was(gateway: str) -> None:
    assert push(gateway, ["orders"], run("orders", version=7))
    assert push(gateway, ["items"], run("items", version=3))
    before = scraped(gateway)
    assert push(gateway, ["orders"], run("orders", version=None))
    after = scraped(gateway)

    committed = ("stream_merge_last_commit_timestamp_seconds", "orders")
    assert after[committed] == before[committed] > 0
    assert after["stream_merge_last_committed_version", "items"] == 3
    received = ("stream_merge_events_received_total", "orders")
    assert (before[received], after[received]) == (3, 0)  # counters are those of the newest run


def test_a_gateway_that_is_away_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not push(f"http://127.0.0.1:{free_port()}", ["orders"], run("orders", version=1))
    assert "metrics_not_pushed" in caplog.text


@pytest.mark.parametrize("url", ["http://user:secret@gateway:9091", "gateway:9091", ""])
def test_an_address_with_a_password_is_refused_without_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        expect_gateway(url)
    assert "secret" not in str(refused.value)
