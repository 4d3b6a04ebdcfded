"""What `check` says of the keys of records. No Spark and no broker: records are given."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from stream_merge.jobs.kafka.check import _keys
from stream_merge.jobs.kafka.newest_records import Records
from stream_merge.jobs.kafka.settings import load

WITH_SCHEMA = b'{"schema": {"type": "struct", "fields": []}, "payload": {"id": 1, "tenant": 7}}'


@pytest.mark.parametrize(
    ("keys", "record_keys", "said"),
    [
        ("id", [b'{"id": 1}', None, b"{"], []),
        (["id", "tenant"], [b'{"id": 1}'], ["do not hold ['tenant']"]),
        (["id", "tenant"], [WITH_SCHEMA, None], []),
        (["id", "tenant"], [WITH_SCHEMA, b'{"id": 1}'], ["do not hold ['tenant']"]),
        ("id", [WITH_SCHEMA, b'{"id": 1}'], ["also hold ['tenant']"]),
        ("id", [b'{"id": 1, "__dbz__physicalTableIdentifier": "a"}'], []),
        ("email", [b'{"id": 1}'], ["do not hold ['email']", "also hold ['id']"]),
    ],
)
def test_where_keys_are_not_those_of_the_records_it_is_said(
    tmp_path: Path, keys: str | list[str], record_keys: list[bytes | None], said: list[str]
) -> None:
    """A delete without REPLICA IDENTITY FULL carries nothing else (PostgreSQL's connector, Debezium 3)."""
    query = {"name": "q", "topic": "t", "value_format": {"type": "debezium"}, "keys": keys, "target": "t"}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"kafka": {"bootstrap": "b:1"}, "queries": [{**query, "checkpoint": "c"}]}))
    nothing = pa.nulls(len(record_keys))
    records = Records(
        keys=pa.array(record_keys, pa.binary()),
        values=nothing.cast(pa.binary()),
        partitions=nothing.cast(pa.int32()),
    )

    found = [finding.said for finding in _keys(load(file).queries[0], records)]
    assert [part in text for part, text in zip(said, found, strict=True)] == [True] * len(said)
