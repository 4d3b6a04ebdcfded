"""Prometheus metrics of sinks."""

from stream_merge.metrics.health import Health
from stream_merge.metrics.instruments import MergeMetrics, default_metrics
from stream_merge.metrics.server import Access, serve

__all__ = ["Access", "Health", "MergeMetrics", "default_metrics", "serve"]
