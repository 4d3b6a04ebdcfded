"""Traces, lineage and JSON logs of a real sink: what they say, and that no event's content is in them."""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from deliveries import ChangeStream, upsert
from openlineage_server import Server, serving
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pyspark.sql import SparkSession

from stream_merge import ConfigError, MergeResult, MergeSink
from stream_merge.model.logs import JsonFormatter
from stream_merge.observers.lineage import Lineage
from stream_merge.observers.otel import Traces
from stream_merge.testing import batch, run

SECRET = "hunter2-of-the-payload"
WIDER = "id bigint, lsn bigint, op string, name string, city string"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    """What `logs: json` writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("stream_merge")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_batches_are_traced_followed_and_logged_without_what_their_events_hold(
    spark: SparkSession, tmp_table: str, server: Server, log_lines: io.StringIO
) -> None:
    """One commits with a broken event, one adds a column, one fails."""
    exported = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    stream = ChangeStream(spark, tmp_table)
    lineage = Lineage(server.url, inputs=["kafka://broker:9092/orders"])
    settings = stream.settings | {"schema_evolution": True, "observers": [Traces(provider), lineage]}
    broken = batch(spark, stream.schema, upsert(1, "row", lsn=1), upsert(None, SECRET, lsn=2))
    wider, later = (batch(spark, WIDER, (*upsert(1, SECRET, lsn=lsn), "Bern")) for lsn in (3, 4))

    first = run(MergeSink(**settings), broken, 0)
    second = run(MergeSink(**settings), wider, 1)
    with pytest.raises(ConfigError, match="INVALID_EXPRESSION"):
        run(MergeSink(**settings | {"apply_as_deletes": "opp = 'd'"}), later, 2)

    spans, events = exported.get_finished_spans(), server.events(6)
    lines = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    _expect_spans(spans, first, second)
    _expect_events(events, first, tmp_table)
    merged = [line for line in lines if line["event"] == "micro_batch_merged"]
    assert [line["events"]["received"] for line in merged] == [2, 1]
    assert list(merged[0])[:4] == ["ts", "level", "logger", "event"]
    (failed,) = (line for line in lines if line["event"] == "micro_batch_failed")
    assert (failed["level"], failed["error"], failed["code"]) == ("WARNING", "ConfigError", "INVALID_EXPRESSION")
    assert SECRET not in log_lines.getvalue() + json.dumps(events) + "".join(span.to_json() for span in spans)


def _expect_spans(spans: Sequence[ReadableSpan], *results: MergeResult) -> None:
    """One for each batch; the children of a phase take as long as the result says."""
    batches = [span for span in spans if span.parent is None]
    assert [span.name for span in batches] == ["stream_merge.micro_batch"] * 3
    for span, result in zip(batches, results, strict=False):
        attributes = span.attributes or {}
        assert (attributes["stream_merge.version"], attributes["stream_merge.engine"]) == (
            result.version,
            result.engine,
        )
        assert attributes["stream_merge.events.received"] == result.events.received
        assert span.status.status_code is StatusCode.UNSET
        by_phase: Counter[str] = Counter()
        for child in spans:
            if child.parent is not None and child.parent.span_id == span.get_span_context().span_id:
                assert span.start_time <= child.start_time <= child.end_time <= span.end_time
                by_phase[child.name.removeprefix("stream_merge.")] += _seconds(child)
        spent = {phase: seconds for phase, seconds in result.seconds.items() if seconds and phase != "other"}
        assert by_phase == pytest.approx(spent, abs=1e-4)
        assert _seconds(span) == pytest.approx(result.duration_seconds, abs=0.5)
    assert (batches[2].status.status_code, batches[2].status.description) == (StatusCode.ERROR, "INVALID_EXPRESSION")
    assert len(spans) < 50, [span.name for span in spans]


def _seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def _expect_events(events: Sequence[Mapping[str, Any]], first: MergeResult, target: str) -> None:
    """A run for each batch, from the topic to the table."""
    assert [event["eventType"] for event in events] == ["START", "COMPLETE", "START", "COMPLETE", "START", "FAIL"]
    assert len({event["run"]["runId"] for event in events}) == 3
    assert {event["job"]["name"] for event in events} == {"direct.table"}
    assert [(one["namespace"], one["name"]) for one in events[1]["inputs"]] == [("kafka://broker:9092", "orders")]
    (table,) = events[1]["outputs"]
    assert (table["namespace"], table["name"]) == ("file", target)
    assert table["facets"]["version"]["datasetVersion"] == str(first.version)
    assert _columns(events[1]) == [("id", "bigint"), ("lsn", "bigint"), ("name", "string")]
    assert _columns(events[3]) == [*_columns(events[1]), ("city", "string")]
    ledger = table["outputFacets"]["streamMerge_ledger"]
    assert (ledger["batchId"], ledger["outcome"], ledger["engine"]) == (0, "committed", first.engine)
    counted = {fate: number for fate, number in ledger["events"].items() if number}
    assert counted == {"received": 2, "quarantined": 1, "inserted": 1}
    assert events[5]["run"]["facets"]["errorMessage"]["message"] == "INVALID_EXPRESSION"


def _columns(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(field["name"], field["type"]) for field in event["outputs"][0]["facets"]["schema"]["fields"]]
