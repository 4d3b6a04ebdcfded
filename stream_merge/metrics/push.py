"""What a short job leaves at a Pushgateway: nobody would scrape it in time."""

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
    """The URL of a Pushgateway, as it was given.

    Raises:
        ConfigError: it is none, or has a password, which would stand in a command line or in an error.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        msg = "[INVALID_SETTING] pushgateway must be an address without a password, such as http://gateway:9091"
        raise ConfigError(msg)
    return url


class _OfQuery(Collector):
    """The series of one query; not a gauge at 0: a run without a commit would forget when the last one was."""

    def __init__(self, registry: CollectorRegistry, query: str) -> None:
        self._registry = registry
        self._query = query

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            kept = [
                sample
                for sample in family.samples
                if sample.labels.get("query") == self._query and (family.type != "gauge" or sample.value)
            ]
            if kept:
                shown = Metric(family.name, family.documentation, family.type)
                shown.samples = kept
                yield shown


def push(gateway: str, queries: Iterable[str], registry: CollectorRegistry | None = None) -> bool:
    """Push the series of queries, a group for each: `job="stream_merge"` and its `query`.

    A group keeps what the newest run has pushed: counters are those of one run. A gateway that is away is a warning in
    the log: the run has done its work.

    Args:
        gateway: URL of a Pushgateway.
        queries: values of the label `query`.
        registry: None: prometheus_client's own.

    Returns:
        Whether all of it has arrived.
    """
    try:
        for query in queries:
            of_query = CollectorRegistry(auto_describe=False)
            of_query.register(_OfQuery(REGISTRY if registry is None else registry, query))
            pushadd_to_gateway(gateway, JOB, of_query, {"query": query}, timeout=_TIMEOUT_SECONDS)
    except (OSError, ValueError, HTTPException) as err:
        tell(log.warning, "metrics_not_pushed", error=type(err).__name__)
        return False
    return True
