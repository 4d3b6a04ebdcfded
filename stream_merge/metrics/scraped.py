"""Status of running queries from scrapes of their `/metrics`: rates, lag, phases, engine, state."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from math import isfinite
from pathlib import Path
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from stream_merge.metrics import catalogue as M
from stream_merge.metrics.catalogue import Instrument
from stream_merge.model.results import PHASES, Phase

_TIMEOUT_SECONDS = 5
_SILENT_SECONDS = 60
"""A broker silent for longer is away, as for the alert `BrokerSilent`."""
_WINDOW_SECONDS = 60
"""Rates and states are about this time before the newest scrape."""
_STARTED = "process_start_time_seconds"

Sink = tuple[str, str]
"""Query and target."""
State = Literal["ended", "failing", "no broker", "starting", "behind", "idle", "running"]


class UnreachableError(Exception):
    """An endpoint gave no metrics; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An endpoint to scrape."""

    url: str
    ca_file: Path | None = None
    """Root certificate of an https endpoint; None: those of the system."""
    token_file: Path | None = None
    """File with the bearer token, read at each scrape; None: no token."""

    def scrape(self) -> str:
        """Text of the exposition."""
        try:
            request = urllib.request.Request(self.url)
            if self.token_file is not None:
                request.add_unredirected_header("Authorization", f"Bearer {self.token_file.read_text().strip()}")
            trust = ssl.create_default_context(cafile=self.ca_file) if self.url.startswith("https:") else None
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=trust) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as err:
            msg = f"answers {err.code} {err.reason}"
        except urllib.error.URLError as err:
            msg = f"does not answer: {err.reason}"
        except (OSError, ValueError, HTTPException) as err:  # silence, a broken answer, no such file, no URL
            msg = f"cannot be scraped: {err}"
        raise UnreachableError(msg)


Series = dict[str, dict[tuple[str, ...], float]]
"""Values of one sink by the name of the sample and the values of its further labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrape:
    """Values of one exposition."""

    at: float
    """Unix time in seconds."""
    started: float | None
    """Unix time when the process started; None where the exposition does not say."""
    sinks: Mapping[Sink, Series]

    @classmethod
    def parse(cls, text: str, *, at: float) -> Scrape:
        """The values of an exposition's text."""
        sinks: dict[Sink, Series] = defaultdict(lambda: defaultdict(dict))
        started = None
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    # A Pushgateway adds the labels of its groups.
                    rest = {name: value for name, value in sample.labels.items() if name not in ("job", "instance")}
                    if not isfinite(sample.value):
                        continue
                    if sample.name == _STARTED:
                        started = sample.value
                    elif sample.name.startswith("stream_merge_") and {"query", "target"} <= rest.keys():
                        sink = (rest.pop("query"), rest.pop("target"))
                        sinks[sink][sample.name][tuple(rest.values())] = sample.value
        except ValueError as err:
            msg = f"answers with something else than metrics: {err}"
            raise UnreachableError(msg) from err
        return cls(at=at, started=started, sinks=sinks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Status of one query and target. Numbers that the exposition lacks are None."""

    query: str
    target: str
    state: State
    events_per_second: float | None
    """Received in the last minute of scrapes; after one scrape, since the process started."""
    lag: float | None
    """Offsets between the ends of the topics and the table; None without topics."""
    behind_seconds: float | None
    """Age of the newest merged event; with several topics, the oldest of them; 0 without lag."""
    committed_ago: float | None
    """Seconds since this process last committed."""
    seconds_per_batch: float | None
    """Mean of the newest batches: those that ended between the last two scrapes in which any did."""
    phases: Mapping[Phase, float]
    """Mean seconds of the newest batches by phase."""
    engines: Mapping[str, int]
    """Merges of the newest batches by engine."""
    refusals: tuple[str, ...]
    """Why the newest batches went to Spark."""
    failed: int
    """Failed batches since the process started, as all numbers below."""
    conflicts: int
    """Lost commits."""
    exhausted: int
    """Commits given up after the last attempt."""
    quarantined: int
    """Events."""


class Watched:
    """One endpoint over time."""

    def __init__(self) -> None:
        self._scrapes: deque[Scrape] = deque()
        """Scrapes of the last minute and the one before."""
        self._newest: dict[Sink, Series] = {}
        """Increases between the last two scrapes in which batches ended."""

    def add(self, scrape: Scrape) -> list[Status]:
        """Status of each sink after one more scrape."""
        if self._scrapes and _is_other_process(self._scrapes[-1], scrape):
            self._scrapes.clear()
            self._newest.clear()
        last = self._scrapes[-1] if self._scrapes else None
        for sink, series in scrape.sinks.items():
            risen = _rise(series, last, sink)
            if _total(risen, M.BATCHES) > 0:
                self._newest[sink] = risen
        while len(self._scrapes) > 1 and self._scrapes[1].at <= scrape.at - _WINDOW_SECONDS:
            self._scrapes.popleft()
        before = self._scrapes[0] if self._scrapes else None
        self._scrapes.append(scrape)
        return [self._status(sink, series, before, scrape) for sink, series in sorted(scrape.sinks.items())]

    def _status(self, sink: Sink, series: Series, before: Scrape | None, scrape: Scrape) -> Status:
        since = scrape.started if before is None else before.at
        risen = _rise(series, before, sink)
        newest = self._newest.get(sink, {})
        ended = newest.get(f"{M.BATCH_DURATION.name}_count", {}).get((), 0.0)
        spent = newest.get(f"{M.BATCH_DURATION.name}_sum", {}).get((), 0.0)
        by_phase = newest.get(M.PHASE_SECONDS.name, {}) if ended else {}
        lags, merged = series.get(M.TOPIC_LAG.name, {}), series.get(M.TOPIC_NEWEST.name, {})
        ages = [scrape.at - at for topic, at in merged.items() if at and lags.get(topic)]
        committed = _only(series, M.LAST_COMMIT)
        return Status(
            query=sink[0],
            target=sink[1],
            state=_state(series, risen, scrape.at, is_first=before is None),
            events_per_second=None if since is None else _total(risen, M.RECEIVED) / max(scrape.at - since, 1e-3),
            lag=sum(lags.values()) if lags else None,
            behind_seconds=max(ages, default=0.0) if lags else None,
            committed_ago=scrape.at - committed if committed else None,
            seconds_per_batch=spent / ended if ended else None,
            phases={phase: value / ended for phase in PHASES if (value := by_phase.get((phase,), 0.0))},
            engines={engine: int(value) for (engine,), value in newest.get(M.MERGES.name, {}).items() if value},
            refusals=tuple(why for (why,), value in newest.get(M.DRIVER_REFUSALS.name, {}).items() if value),
            failed=int(series.get(M.BATCHES.name, {}).get((M.FAILED,), 0)),
            conflicts=int(_total(series, M.LOST_COMMITS)),
            exhausted=int(_only(series, M.RETRIES_EXHAUSTED)),
            quarantined=int(series.get(M.EVENTS.name, {}).get(("quarantined",), 0)),
        )


def _is_other_process(before: Scrape, now: Scrape) -> bool:
    """Whether the process was restarted between two scrapes."""
    batches, then = (sum(_total(series, M.BATCHES) for series in one.sinks.values()) for one in (now, before))
    return before.started != now.started or batches < then


def _rise(series: Series, before: Scrape | None, sink: Sink) -> Series:
    """Increases since a scrape; None: since the process started."""
    earlier = {} if before is None else before.sinks.get(sink, {})
    return {
        name: {labels: value - earlier.get(name, {}).get(labels, 0.0) for labels, value in values.items()}
        for name, values in series.items()
    }


def _state(series: Series, risen: Series, now: float, *, is_first: bool) -> State:
    """The worst state that applies."""
    lag = series.get(M.TOPIC_LAG.name, {})
    polled = [at for at in series.get(M.TOPIC_POLLED.name, {}).values() if at]
    failed = risen.get(M.BATCHES.name, {}).get((M.FAILED,), 0)
    if _only(series, M.QUERY_FAILED):
        return "ended"
    if failed and (not is_first or failed == _total(risen, M.BATCHES)):
        return "failing"
    if polled and now - min(polled) > _SILENT_SECONDS:
        return "no broker"
    if not _total(series, M.BATCHES) and not any(lag.values()):
        return "starting"
    if any(lag.values()):
        return "behind"
    return "running" if now - _only(series, M.LAST_COMMIT) < _WINDOW_SECONDS else "idle"


def _total(series: Series, instrument: Instrument) -> float:
    return sum(series.get(instrument.name, {}).values())


def _only(series: Series, instrument: Instrument) -> float:
    """Value of an instrument without further labels."""
    return series.get(instrument.name, {}).get((), 0.0)
