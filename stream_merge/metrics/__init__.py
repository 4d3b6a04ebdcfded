"""What sinks did, as numbers that Prometheus scrapes."""

from stream_merge.metrics.instruments import MergeMetrics, default_metrics
from stream_merge.metrics.server import serve

__all__ = ["MergeMetrics", "default_metrics", "serve"]
