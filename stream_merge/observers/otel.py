"""`Traces`: each micro-batch as an OpenTelemetry span, its phases as child spans."""

from __future__ import annotations

from stream_merge.errors import ConfigError
from stream_merge.model.observer import MicroBatch
from stream_merge.model.results import FATES, MergeResult

try:
    from opentelemetry import trace
    from opentelemetry.trace import Status, StatusCode, TracerProvider
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as err:
    msg = "[EXTRA_NOT_INSTALLED] traces need opentelemetry-api; run: pip install 'stream-merge[otel]'"
    raise ConfigError(msg) from err


class Traces:
    """Spans for `MergeSink(observers=[...])`; without an SDK they go nowhere.

    Args:
        tracer_provider: None: the process's, which your SDK or `opentelemetry-instrument` sets.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("stream_merge", tracer_provider=tracer_provider)

    def started(self, batch: MicroBatch) -> None:
        """Nothing: a span is exported when it ends."""

    def ended(self, batch: MicroBatch) -> None:
        """Record the spans, with the times that the batch took."""
        attributes: dict[str, AttributeValue] = {
            "stream_merge.query": batch.query,
            "stream_merge.target": batch.target,
            "stream_merge.batch_id": batch.batch_id,
            **({} if batch.result is None else _attributes(batch.result)),
        }
        span = self._tracer.start_span("stream_merge.micro_batch", attributes=attributes, start_time=batch.began_ns)
        inside = trace.set_span_in_context(span)
        for phase, begin, until in batch.phases:
            if phase != "other":  # what is left of the parent
                self._tracer.start_span(f"stream_merge.{phase}", inside, start_time=begin).end(until)
        if batch.error is not None:
            span.set_attribute("error.type", batch.error_code)
            span.set_status(Status(StatusCode.ERROR, batch.error_code))
        span.end(batch.phases[-1][2])


def _attributes(result: MergeResult) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "stream_merge.outcome": result.outcome,
        "stream_merge.engine": result.engine,
        "stream_merge.attempts": result.attempts,
        **{f"stream_merge.events.{fate}": getattr(result.events, fate) for fate in ("received", *FATES)},
    }
    return attributes if result.version is None else {**attributes, "stream_merge.version": result.version}
