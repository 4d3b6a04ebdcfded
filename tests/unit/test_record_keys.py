"""What `check` says of keys, those of records and of the table. No Spark and no broker: records are given."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake

from stream_merge.jobs.kafka.check import _keys, _table
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.settings import QuerySettings, load
from stream_merge.sources.decode.events import Records
from stream_merge.sources.wire import avro_schema
from stream_merge.sources.wire.connect_avro import AvroKey, Schemas
from stream_merge.sources.wire.keys import JsonKey

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

    (settings,) = load(file).queries
    found = [finding.said for finding in _keys(settings, settings.format().key, records)]
    assert [part in text for part, text in zip(said, found, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}, []),
        ("long", []),
        ({"type": "record", "name": "Key", "fields": [{"name": "no", "type": "long"}]}, ["['id']", "['no']"]),
    ],
)
def test_keys_in_avro_are_known_by_their_schema(schema: object, said: list[str]) -> None:
    """Whatever their bytes are; a schema that is not a record is that of the only key."""
    query = {"name": "q", "topic": "t", "keys": "id", "target": "t", "checkpoint": "c"}
    schemas = Schemas(known={7: avro_schema.parse(json.dumps(schema))})
    keys = pa.array([b"\0\0\0\0\7\2", None, b"?"], pa.binary())
    records = Records(keys=keys, values=keys, partitions=pa.array([0, 0, 0], pa.int32()))

    form = AvroKey(schemas=schemas, json=JsonKey(only="id"))
    found = [finding.said for finding in _keys(QuerySettings.model_validate(query), form, records)]

    assert [part in text for part, text in zip(said, found, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("keys", "is_problem", "said"),
    [("id", False, "keys ['id']"), ("ID", False, "keys ['ID']"), ("no", True, "has no key column(s) ['no']")],
)
def test_a_key_column_is_found_as_the_job_finds_it(tmp_path: Path, keys: str, is_problem: bool, said: str) -> None:
    """Whatever its case."""
    write_deltalake(str(tmp_path / "table"), pa.table({"id": [1], "v": ["a"]}))
    query = {"name": "q", "topic": "t", "keys": keys, "target": str(tmp_path / "table"), "checkpoint": "c"}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"kafka": {"bootstrap": "b:1"}, "queries": [query]}))
    (query_of_job,) = load(file).queries

    (found,) = _table(query_of_job, RowSchema.of_query(query_of_job))

    assert found.is_problem == is_problem
    assert said in found.said
