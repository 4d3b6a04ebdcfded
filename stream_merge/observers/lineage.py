"""`Lineage`: each micro-batch as an OpenLineage run, from its inputs to the target table."""

from __future__ import annotations

import atexit
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from queue import Full, Queue
from urllib.parse import urlsplit

from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell
from stream_merge.model.observer import MicroBatch

try:
    import attr
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import (
        DatasetFacet,
        OutputDatasetFacet,
        dataset_version_dataset,
        error_message_run,
        job_type_job,
        schema_dataset,
    )
    from openlineage.client.uuid import generate_static_uuid
except ModuleNotFoundError as err:
    msg = "[EXTRA_NOT_INSTALLED] lineage needs openlineage-python; run: pip install 'stream-merge[lineage]'"
    raise ConfigError(msg) from err

log = logging.getLogger(__name__)

PRODUCER = f"urn:stream-merge:{version('stream-merge')}"
LEDGER_SCHEMA = "urn:stream-merge:ledger-output-dataset-facet:1"
"""`$id` of docs/assets/ledger-facet.json."""
_WAITING = 1_000
"""Most events that wait for the server; later ones are dropped."""
_SECONDS = 5.0
"""Timeout of a request, and of the last ones at the end of the process."""
_CANONICAL = {"s3a": "s3", "s3n": "s3", "abfs": "abfss", "wasb": "wasbs"}
"""Scheme of Hadoop -> scheme of OpenLineage's names."""
_WITHOUT_SLASH = ("s3", "gs", "abfss", "wasbs", "kafka")
"""Schemes whose names do not start with a slash."""
_URI = re.compile(r"(?:([a-z][a-z0-9+.-]+):)?(?://([^/]*))?(.*)", re.DOTALL)
"""Scheme, server and path, without percent-decoding."""


@attr.define
class LedgerFacet(OutputDatasetFacet):
    """The events of a batch by fate."""

    batchId: int  # noqa: N815 - as all facets spell
    outcome: str
    engine: str
    events: dict[str, int]

    @staticmethod
    def _get_schema() -> str:
        return LEDGER_SCHEMA


class Lineage:
    """Run events for `MergeSink(observers=[...])`: START, then COMPLETE or FAIL.

    A thread of its own sends them, so a server that is slow or away delays no batch; events of that time are dropped.
    Not with the client's `async_http`: its `emit` waits when the queue is full, and it logs a trace for each event.

    Args:
        url: of the server, such as Marquez; events are posted to `/api/v1/lineage` there.
        namespace: of the jobs. A job's name is the query's, with the sink's label where that is another one.
        inputs: what the sink's stream reads, such as "kafka://broker:9092/orders" or "s3://bucket/changes".
        api_key: sent as bearer token.

    Raises:
        ConfigError: `url` is not one.
    """

    def __init__(
        self, url: str, *, namespace: str = "stream-merge", inputs: Sequence[str] = (), api_key: str | None = None
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            msg = "[INVALID_SETTING] the url of lineage must be an address such as http://marquez:5000"
            raise ConfigError(msg)
        self._server = url, api_key
        self._namespace = namespace
        self._inputs = [dataset(one) for one in inputs]

    def started(self, batch: MicroBatch) -> None:
        """Send START."""
        self._send(RunState.START, batch, batch.began_ns)

    def ended(self, batch: MicroBatch) -> None:
        """Send COMPLETE, with version, schema and ledger of the table, or FAIL with the error's code."""
        self._send(RunState.FAIL if batch.result is None else RunState.COMPLETE, batch, batch.phases[-1][2])

    def _send(self, state: RunState, batch: MicroBatch, at_ns: int) -> None:
        name = ".".join(dict.fromkeys((batch.query, batch.target)))
        kind = job_type_job.JobTypeJobFacet("STREAMING", "STREAM_MERGE", "MICRO_BATCH", producer=PRODUCER)
        began, at = (datetime.fromtimestamp(ns / 1e9, UTC) for ns in (batch.began_ns, at_ns))
        run = Run(str(generate_static_uuid(began, f"{self._namespace}/{name}/{batch.batch_id}".encode())))
        if state is RunState.FAIL:
            failed = error_message_run.ErrorMessageRunFacet(batch.error_code, "python", producer=PRODUCER)
            run.facets = {"errorMessage": failed}
        event = RunEvent(
            eventType=state,
            eventTime=at.isoformat(),
            run=run,
            job=Job(self._namespace, name, facets={"jobType": kind}),
            inputs=[InputDataset(*names) for names in self._inputs],
            outputs=[] if batch.location is None else [_output(batch, batch.location)],
            producer=PRODUCER,
        )
        _sender(*self._server).send(event)


def dataset(place: str) -> tuple[str, str]:
    """Namespace and name of a topic, a folder or a table by its path or URI, as OpenLineage names them."""
    scheme, server, path = _URI.fullmatch(place).groups("")  # type: ignore[union-attr]  # matches any text
    scheme, path = _CANONICAL.get(scheme, scheme), path.rstrip("/") or "/"
    if scheme in ("", "file"):
        return "file", path
    return f"{scheme}://{server}", path.lstrip("/") if scheme in _WITHOUT_SLASH else path


def _output(batch: MicroBatch, location: str) -> OutputDataset:
    facets: dict[str, DatasetFacet] = {}
    if batch.schema is not None:
        columns = [
            schema_dataset.SchemaDatasetFacetFields(field.name, field.dataType.simpleString(), ordinal_position=number)
            for number, field in enumerate(batch.schema.fields, 1)
        ]
        facets["schema"] = schema_dataset.SchemaDatasetFacet(columns, producer=PRODUCER)
    result = batch.result
    if result is None:
        return OutputDataset(*dataset(location), facets=facets)
    if result.version is not None:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(str(result.version), producer=PRODUCER)
    ledger = LedgerFacet(result.batch_id, result.outcome, result.engine, asdict(result.events), producer=PRODUCER)
    return OutputDataset(*dataset(location), facets=facets, outputFacets={"streamMerge_ledger": ledger})


class _Sender:
    """Sends events one after the other, in a thread that ends with the process."""

    def __init__(self, client: OpenLineageClient) -> None:
        self._client = client
        self._events: Queue[RunEvent | None] = Queue(_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="stream_merge lineage", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def send(self, event: RunEvent | None) -> None:
        """Queue an event, None for the end; drop it where too many wait."""
        try:
            self._events.put_nowait(event)
        except Full:
            self._lost += 1

    def close(self) -> None:
        """Wait a few seconds for queued events, not for an unavailable server."""
        self.send(None)
        if not self._lost:
            self._thread.join(_SECONDS)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._client.emit(event)
            except Exception as err:
                if not self._lost:
                    status = getattr(getattr(err, "response", None), "status_code", None)
                    tell(log.warning, "lineage_away", error=type(err).__name__, status=status)
                self._lost += 1
            else:
                if self._lost:
                    tell(log.warning, "lineage_back", lost=self._lost)
                self._lost = 0


@cache
def _sender(url: str, api_key: str | None) -> _Sender:
    """The sender of a server, without retries, for which urllib3 logs warnings."""
    auth = {} if api_key is None else {"type": "api_key", "api_key": api_key}
    http = {"type": "http", "url": url, "timeout": _SECONDS, "auth": auth, "retry": {"total": 0}}
    return _Sender(OpenLineageClient(config={"transport": http}))
