"""A topic of Debezium's envelopes that a test writes itself, the job that merges it, and a consumer to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import services
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import OffsetSpec
from kafka.protocol.consumer.offsets import IsolationLevel
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics, MergeResult
from stream_merge.jobs.kafka import JobSettings, run
from stream_merge.jobs.kafka.commit_section import section_of
from stream_merge.jobs.kafka.history import Step, trail
from stream_merge.jobs.kafka.run import JobResult
from stream_merge.tables.explain import opened
from stream_merge.testing import target_rows

LARGEST = 11 * 2**20
"""Bytes of a request; the broker takes a little more."""
QUERY = "rows"
VALUE_FORMAT = {"type": "debezium", "columns": {"id": "bigint", "small": "smallint", "name": "text"}}


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


class TopicJob:
    """One topic, one table `rows`, and everything that lies about it in one folder."""

    def __init__(
        self,
        spark: SparkSession,
        broker: services.Broker,
        folder: Path,
        *,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
    ) -> None:
        self.spark = spark
        self.folder = folder
        self.topic = "".join(char if char.isalnum() else "." for char in folder.name)
        self.target = str(folder / "rows")
        self.checkpoint = str(folder / "checkpoint")
        self.registry = CollectorRegistry()
        self.places = [TopicPartition(self.topic, partition) for partition in range(partitions)]
        self._metrics = MergeMetrics(self.registry)
        self._bootstrap = broker.bootstrap
        self._lsn = 1_000
        self._producers: list[KafkaProducer] = []
        self.admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        wanted = {"num_partitions": partitions, "replication_factor": 1, "configs": dict(configs or {})}
        self.admin.create_topics({self.topic: wanted}, wait_for_metadata=True)
        self.producer = self.new_producer()

    def close(self) -> None:
        for producer in self._producers:
            producer.close()
        self.admin.close()

    # -- what is in the topic ------------------------------------------------------------------

    def new_producer(self, **settings: Any) -> KafkaProducer:
        made = KafkaProducer(bootstrap_servers=self._bootstrap, max_request_size=LARGEST, **settings)
        self._producers.append(made)
        return made

    def event(self, op: str, key: int, name: str | None = "n", **source: Any) -> bytes:
        """The value of the next event of a key."""
        self._lsn += 1
        row = {"id": key, "small": key % 100, "name": name}
        image = {"before": {"id": key, "small": None, "name": None}, "after": None} if op == "d" else {"after": row}
        about = {"lsn": self._lsn, "ts_ms": 1_700_000_000_000, "snapshot": "false", **source}
        return raw({"op": op, "before": None, **image, "source": about})

    def send(self, key: int, value: bytes | None, *, partition: int = 0, **more: Any) -> int:
        """Write one record and wait for it; its offset."""
        sent = self.producer.send(self.topic, key=raw({"id": key}), value=value, partition=partition, **more)
        return int(sent.get(30).offset)

    def ends(self) -> dict[int, int]:
        """Partition -> offset behind the last committed record, as the broker says."""
        wanted = dict.fromkeys(self.places, OffsetSpec.LATEST)
        found = self.admin.list_partition_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED)
        return {place.partition: at.offset for place, at in found.items()}

    def delivered(self) -> dict[tuple[int, int], tuple[bytes | None, bytes | None]]:
        """What kafka-python's consumer gets of committed records: partition and offset -> key and value."""
        consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap, isolation_level="read_committed", group_id=None, enable_auto_commit=False
        )
        found: dict[tuple[int, int], tuple[bytes | None, bytes | None]] = {}

        def has_all() -> bool:
            for place, records in consumer.poll(timeout_ms=200).items():
                found.update({(place.partition, record.offset): (record.key, record.value) for record in records})
            return all(consumer.position(place) >= ends[place.partition] for place in self.places)

        try:
            consumer.assign(self.places)
            consumer.seek_to_beginning(*self.places)
            ends = self.ends()
            services.wait_until(has_all, "the consumer was at the end")
        finally:
            consumer.close()
        return found

    # -- the job ---------------------------------------------------------------------------------

    def settings(
        self, *, kafka: Mapping[str, Any] | None = None, job: Mapping[str, Any] | None = None, **query: Any
    ) -> JobSettings:
        described = {
            "name": QUERY,
            "topic": self.topic,
            "target": self.target,
            "keys": "id",
            "checkpoint": self.checkpoint,
            "value_format": VALUE_FORMAT,
            **query,
        }
        found = {"kafka": kafka or {"bootstrap": self._bootstrap}, "queries": [described], **(job or {})}
        return JobSettings.model_validate(found)

    def run(self, **changes: Any) -> JobResult:
        """Merge what is there."""
        self.producer.flush()
        return run(self.settings(**changes), self.spark, once=True, metrics=self._metrics)

    def merge(self, **changes: Any) -> list[MergeResult]:
        result = self.run(**changes)
        assert result.failures == {}
        return list(result.results.get(QUERY, []))

    # -- what came of it ---------------------------------------------------------------------------

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        return target_rows(self.spark, self.target, *(columns or ("id", "name")))

    @property
    def quarantine(self) -> str:
        return str(self.folder / "__stream_merge_quarantine_rows")

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"query": QUERY, "target": QUERY, **labels}) or 0.0

    def accounted(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Batch id and what its commit says of the partitions, oldest first."""
        sections = map(section_of, reversed(opened(self.target).history(None)))
        return [(ours["batch_id"], ours["kafka"]["topics"][self.topic]["partitions"]) for ours in sections if ours]

    def history(self, **changes: Any) -> list[Step]:
        """As `stream-merge history` reads it."""
        return trail(self.settings(**changes).queries[0])
