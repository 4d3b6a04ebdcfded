"""Pushes the metrics of short jobs to a Pushgateway."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from urllib.parse import urlsplit

from prometheus_client import REGISTRY, CollectorRegistry, pushadd_to_gateway
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell

log = logging.getLogger(__name__)

JOB = "stream_merge"
_TIMEOUT_SECONDS = 10.0


def expect_gateway(url: str) -> str:
    """The URL of a Pushgateway; refused with a password, which would show in command lines and errors."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        msg = "[INVALID_SETTING] pushgateway must be an address without a password, such as http://gateway:9091"
        raise ConfigError(msg)
    return url


class _QuerySeries(Collector):
    """The series of one query without gauges at 0: a run without a commit keeps the time of the last one."""

    def __init__(self, registry: CollectorRegistry, query: str) -> None:
        self._registry = registry
        self._query = query

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            samples = [
                sample
                for sample in family.samples
                if sample.labels.get("query") == self._query and (family.type != "gauge" or sample.value)
            ]
            if samples:
                metric = Metric(family.name, family.documentation, family.type)
                metric.samples = samples
                yield metric


def push(gateway: str, queries: Iterable[str], registry: CollectorRegistry | None = None) -> bool:
    """Push the series of queries, a group for each: `job="stream_merge"` and its `query`; whether all arrived.

    A group has the counters of the newest run. An unavailable gateway is logged as a warning.
    """
    try:
        for query in queries:
            group = CollectorRegistry(auto_describe=False)
            group.register(_QuerySeries(REGISTRY if registry is None else registry, query))
            pushadd_to_gateway(gateway, JOB, group, {"query": query}, timeout=_TIMEOUT_SECONDS)
    except (OSError, ValueError, HTTPException) as err:
        tell(log.warning, "metrics_not_pushed", error=type(err).__name__)
        return False
    return True
