"""Columns whose type grew at the source: in a table that is yet to be made, and in one that is there."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import services
from pyspark.sql import SparkSession
from since import since
from topic_job import TopicJob, raw

from stream_merge import ConfigError
from stream_merge.jobs.kafka.check import check
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.merge import steps
from stream_merge.model.names import TOMBSTONE_TABLE_PREFIX
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.wire.connect_schema import canonical
from stream_merge.spark.versions import from_ddl

WITH_SCHEMAS = {"type": "debezium"}
FAR = 2**40


def numeric(precision: int, scale: int) -> dict[str, Any]:
    parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    return {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": parameters}


def unscaled(value: int) -> str:
    return base64.b64encode(value.to_bytes(8, "big", signed=True)).decode()


def struct(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A Connect schema of these columns, all of them optional but the key."""
    types = {name: dtype if isinstance(dtype, dict) else {"type": dtype} for name, dtype in columns.items()}
    return {
        "type": "struct",
        "fields": [{"field": name, "optional": name != "id", **dtype} for name, dtype in types.items()],
        "optional": True,
    }


class Source:
    """A table at the source that is altered now and then, and its topic."""

    def __init__(self, job: TopicJob) -> None:
        self.job = job
        self._lsn = 0

    def write(self, columns: Mapping[str, Any], *, op: str = "c", **row: Any) -> None:
        """An event and its key, both with the schema of now."""
        self._lsn += 1
        block = struct(columns)
        images = [{**block, "field": image} for image in ("before", "after")]
        source = {"lsn": self._lsn, "ts_ms": 1, "snapshot": "false"}
        empty = dict.fromkeys(columns)
        images_of = (
            {"before": {**empty, "id": row["id"]}, "after": None} if op == "d" else {"before": None, "after": row}
        )
        value = {"schema": {"type": "struct", "fields": images}, "payload": {"op": op, **images_of, "source": source}}
        self._send(self.key(columns, row["id"]), raw(value))

    def forget(self, columns: Mapping[str, Any], key: int) -> None:
        """A null value."""
        self._send(self.key(columns, key), None)

    @staticmethod
    def key(columns: Mapping[str, Any], key: int) -> bytes:
        return raw({"schema": struct({"id": columns["id"]}), "payload": {"id": key}})

    def _send(self, key: bytes, value: bytes | None) -> None:
        self.job.producer.send(self.job.topic, key=key, value=value).get(30)

    def said(self, **query: Any) -> dict[str, str]:
        """What `check` finds out about the query."""
        found = check(self.job.settings(value_format=WITH_SCHEMAS, **query), jars_in=None)
        return {finding.about: finding.said for finding in found if finding.query is not None}


@pytest.fixture
def source(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[Source]:
    job = TopicJob(spark, broker, tmp_path)
    yield Source(job)
    job.close()


@pytest.mark.parametrize("batch", [1, 100], ids=["one by one", "all at once"])
def test_a_new_table_and_a_new_column_take_the_widest_type_that_is_known(source: Source, batch: int) -> None:
    """The key becomes a bigint, a column that is added later, too; what was written before is widened exactly."""
    first: dict[str, Any] = {"id": "int32", "r": "float", "tags": {"type": "array", "items": {"type": "int32"}}}
    second = {**first, "qty": "int16", "price": numeric(6, 2)}
    third = {**second, "id": "int64", "r": "double", "qty": "int64", "price": numeric(12, 4)}
    third["tags"] = {"type": "array", "items": {"type": "int64"}}
    source.write(first, id=1, r=0.5, tags=[1])
    source.write(second, id=2, r=None, tags=None, qty=7, price=unscaled(125))
    source.write(third, id=FAR, r=0.1, tags=[FAR], qty=FAR, price=unscaled(12345))
    limits = {"limits": {"max_events_per_batch": batch}}

    said = source.said()
    source.job.merge(value_format=WITH_SCHEMAS, **limits)

    assert said["columns"] == "id bigint, r double, tags array<bigint>, qty bigint, price decimal(12,4)"
    assert sorted(source.job.rows("id", "r", "tags", "qty", "price")) == [
        (1, 0.5, [1], None, None),
        (2, None, None, 7, Decimal("1.2500")),
        (FAR, 0.1, [FAR], FAR, Decimal("1.2345")),
    ]
    stored = source.job.spark.read.format("delta").load(source.job.target)
    types = "id bigint, r double, tags array<bigint>, qty bigint, price decimal(12,4)"
    assert [f"{name} {dtype}" for name, dtype in stored.dtypes if not name.startswith("__")] == types.split(", ")


@since((4, 0), "wider types than int")
def test_a_type_that_grows_in_an_existing_table_stops_the_job_or_widens_it(source: Source) -> None:
    """Key and remembered deletes included; null values and narrow events go on."""
    narrow, wide = {"id": "int32", "qty": "int32"}, {"id": "int64", "qty": "int64"}
    source.write(narrow, id=1, qty=1)
    source.write(narrow, id=2, qty=1)
    source.job.merge(value_format=WITH_SCHEMAS)
    source.write(narrow, op="d", id=1)
    source.job.merge(value_format=WITH_SCHEMAS)
    source.write(wide, id=FAR, qty=FAR)
    source.write(wide, id=FAR + 1, qty=FAR)
    source.write(wide, op="d", id=FAR)
    source.forget(wide, FAR + 1)
    source.write(narrow, id=2, qty=2)
    before = source.job.rows("id", "qty")

    failure = source.job.run(value_format=WITH_SCHEMAS).failures["rows"]
    told = source.said()
    (widened,) = source.job.merge(value_format=WITH_SCHEMAS, schema_evolution="widen")

    table = TableRef(source.job.target).sql
    sentence = (
        f"[COLUMN_TYPE_CHANGED] column 'id' of {source.job.target!r} is int, new events have bigint; set"
        f" 'schema_evolution: widen', widen it in Spark (ALTER TABLE {table} SET TBLPROPERTIES"
        f" ('delta.enableTypeWidening' = 'true'); ALTER TABLE {table} ALTER COLUMN `id` TYPE bigint), or point the job"
        " at a new table and a new checkpoint"
    )
    assert sentence in str(failure)
    assert told["records"] == sentence
    assert before == [(2, 1)]
    assert source.job.rows("id", "qty") == [(2, 2)]
    assert (widened.engine, widened.refusal) == ("spark", "schema_change")
    log = source.job.spark.table(TableRef(str(source.job.folder / f"{TOMBSTONE_TABLE_PREFIX}rows")).sql)
    assert sorted(row["id"] for row in log.select("id").collect()) == [1, FAR, FAR + 1]
    assert source.said(schema_evolution="widen")["columns"] == "id bigint, qty bigint"


@since((4, 0), "wider types than int")
def test_check_says_which_types_the_first_batch_will_change(source: Source) -> None:
    source.write({"id": "int32", "qty": "int32"}, id=1, qty=1)
    source.job.merge(value_format=WITH_SCHEMAS)
    source.write({"id": "int32", "qty": "double"}, id=1, qty=0.5)

    assert source.said(schema_evolution="widen")["types"] == (
        "the first batch changes qty int -> double; delta-rs and polars cannot read a table with type widening, until"
        " ALTER TABLE … DROP FEATURE typeWidening rewrites it; the driver goes on merging it"
    )


@pytest.mark.parametrize(
    ("setting", "earlier"), [("warn", (None, None)), ("fill", ("none", Decimal("12.50")))], ids=["warn", "fill"]
)
def test_rows_from_before_a_column_get_its_default_or_the_log_says_how(
    source: Source,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    earlier: tuple[Any, ...],
) -> None:
    """Rows of the table and of the same batch, which comes again; a NULL that an event brings stays NULL."""
    old = {"id": "int64"}
    new = {**old, "note": {"type": "string", "default": "none"}, "price": {**numeric(10, 2), "default": unscaled(1250)}}
    job = {"value_format": WITH_SCHEMAS, "on_column_default": setting}
    for key in (1, 2, 3):
        source.write(old, id=key)
    source.job.merge(**job)
    source.write(old, op="u", id=2)
    source.write(old, id=4)
    source.write(new, id=5, note=None, price=None)

    with monkeypatch.context() as killed:
        killed.setattr(steps, "choose_plan", lambda *_: 1 / 0)
        assert source.job.run(**job).failures.keys() == {"rows"}
    caplog.clear()
    source.job.merge(**job)
    first = source.job.rows("id", "note", "price")
    source.write(new, op="u", id=1, note=None, price=unscaled(100))
    source.write(old, op="u", id=3)
    source.job.merge(**job)

    rest = [*((key, *earlier) for key in (2, 3, 4)), (5, None, None)]
    assert first == [(1, *earlier), *rest]
    assert source.job.rows("id", "note", "price") == [(1, None, Decimal("1.00")), *rest]
    told = [(record.column, record.default) for record in caplog.records if "column_default_not" in record.message]
    assert told == ([("note", "none"), ("price", "12.50")] if setting == "warn" else [])


@pytest.mark.parametrize(
    ("brought", "wanted", "stored"),
    [
        ("int32", "bigint", "bigint"),
        ("int64", "int", "bigint"),
        ("int16", "decimal(12,2)", "decimal(12,2)"),
        ("int32", "double", "double"),
        (numeric(10, 2), "decimal(20,4)", "decimal(20,4)"),
        (numeric(10, 2), "string", "string"),
    ],
)
def test_the_job_file_may_want_a_column_wider_than_its_events(
    source: Source, brought: Any, wanted: str, stored: str
) -> None:
    """Never narrower: what the events bring has to find its place."""
    (query,) = source.job.settings(value_format={**WITH_SCHEMAS, "types": {"n": wanted}}).queries
    rows = RowSchema.of_query(query)

    rows.admit(canonical(struct({"id": "int64", "n": brought})))

    assert [field.dataType.simpleString() for field in rows.columns.fields] == ["bigint", stored]


@pytest.mark.parametrize(
    ("brought", "wanted", "dtype"),
    [
        ("int32", "string", "int"),
        ("int64", "double", "bigint"),
        ("double", "decimal(38,6)", "double"),
        ("string", "int", "string"),
    ],
)
@pytest.mark.parametrize("stored", [None, "id bigint, n int"], ids=["new", "there"])
def test_a_type_that_the_job_file_wants_in_vain_is_refused(
    source: Source, brought: Any, wanted: str, dtype: str, stored: str | None
) -> None:
    """Before, the column silently kept the type of its events."""
    (query,) = source.job.settings(value_format={**WITH_SCHEMAS, "types": {"n": wanted}}).queries
    rows = RowSchema.of_query(query)
    rows.start_from(None if stored is None else from_ddl(stored))

    with pytest.raises(ConfigError) as caught:
        rows.admit(canonical(struct({"id": "int64", "n": brought})))

    assert str(caught.value) == (
        f"[INVALID_SETTING] types: 'n' is {wanted!r}, but events for {query.target!r} have {dtype}; use a wider number"
        " type, 'string' for a decimal, or remove it"
    )


def test_types_that_no_type_holds_both_are_told(source: Source) -> None:
    (query,) = source.job.settings(value_format=WITH_SCHEMAS).queries
    schemas = [canonical(struct({"id": "int64", "n": dtype})) for dtype in ("int64", "string")]

    with pytest.raises(ValueError, match=r"is bigint, new events have string; no type holds both: set 'start'"):
        RowSchema.of_query(query).admit(*schemas)
