"""The newest records of topics, read beside the stream: to be tried, and to see how they are written by now."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pyarrow as pa
from kafka import KafkaConsumer, TopicPartition

from stream_merge.sources.decode.events import Records
from stream_merge.sources.kafka.connection import Connection, TopicState

SAMPLE = 200
"""Newest records of each partition that are read."""
_LONGEST_SECONDS = 3.0
_MOST_BYTES = 64 * 2**20


def newest(connection: Connection, topics: Mapping[str, TopicState]) -> Records:
    """The newest records of each partition, as far as they come within seconds and have their place in memory.

    Raises:
        kafka.errors.KafkaError: the broker cannot be reached, or refuses.
    """
    ends = {TopicPartition(name, place): end for name, state in topics.items() for place, end in state.ends.items()}
    consumer = KafkaConsumer(
        **connection.client_options(), enable_auto_commit=False, isolation_level=connection.isolation, group_id=None
    )
    found, size = [], 0
    try:
        consumer.assign(list(ends))
        for place, end in ends.items():
            consumer.seek(place, max(topics[place.topic].starts[place.partition], end - SAMPLE))
        until = time.monotonic() + _LONGEST_SECONDS
        while any(consumer.position(place) < end for place, end in ends.items()):
            left = int((until - time.monotonic()) * 1000)
            if left <= 0 or size > _MOST_BYTES:
                break
            arrived = [record for records in consumer.poll(timeout_ms=left).values() for record in records]
            size += sum(len(record.value or b"") for record in arrived)
            found += arrived
    finally:
        consumer.close()
    return Records(
        keys=pa.array([record.key for record in found], pa.binary()),
        values=pa.array([record.value for record in found], pa.binary()),
        partitions=pa.array([record.partition for record in found], pa.int32()),
    )
