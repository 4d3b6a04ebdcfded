"""What a constructor takes, what it refuses, and the defaults that users rely on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
from grouped import sink_with
from pyspark.sql import DataFrame

import stream_merge
from stream_merge import ConfigError, Create, Driver, MergeSink, RetryPolicy, Tombstones
from stream_merge.model.settings import RENAMED, MergeSpec
from stream_merge.shapes import Changes, InsertOnly, Snapshot


def sink_of(target: str, **settings: Any) -> MergeSink:
    return sink_with(**{"target": target, "keys": ["id"], "sequence_by": "lsn", **settings})


@contextmanager
def nothing_written(folder: Path) -> Iterator[None]:
    """Not a file more or less, the sink's own tables included."""
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before


def problems_of(sink: MergeSink, events: DataFrame) -> tuple[str, ...]:
    """What the sink says of a batch; the message is all problems in one line."""
    with pytest.raises(ConfigError) as caught:
        sink(events, 0)
    assert str(caught.value) == "; ".join(caught.value.problems)
    assert caught.value.target == sink._calls.spec.target
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"column_list": ["id", "name"], "except_column_list": ["op"]},
            "[CONFLICTING_SETTINGS] column_list and except_column_list are both given; keep one of them",
        ),
        ({"column_list": ["lsn", "name"]}, "[CONFLICTING_SETTINGS] column_list lacks key(s) ['id']; add them"),
        (
            {"except_column_list": ["id"]},
            "[CONFLICTING_SETTINGS] except_column_list names key(s) ['id']; remove them from it",
        ),
        (
            {"target_filter": " "},
            "[INVALID_SETTING] target_filter=' ' must be SQL text over t, such as \"t.day >= '2024-06-01'\"",
        ),
        (
            {"target_filter": "t.day > 1", "engine": "driver"},
            "[CONFLICTING_SETTINGS] target_filter is SQL, which engine='driver' does not execute; remove one of them",
        ),
        (
            {"target_filter": "t.day > 1", "shape": Snapshot(), "sequence_by": ()},
            "[CONFLICTING_SETTINGS] target_filter does not apply to snapshots; for a part of the table use"
            " shape=Snapshot(within=…)",
        ),
        ({"engine": "quick"}, "[INVALID_SETTING] engine='quick' must be one of 'auto', 'spark', 'driver'"),
        (
            {"schema_evolution": "always"},
            "[INVALID_SETTING] schema_evolution='always' must be False, True or 'widen'",
        ),
        ({"on_invalid": "drop"}, "[INVALID_SETTING] on_invalid='drop' must be one of 'quarantine', 'fail'"),
        ({"target": " "}, "[MISSING_SETTING] target is empty; set a catalog name, a path or a URI"),
        ({"keys": []}, "[MISSING_SETTING] keys is empty; name at least one column"),
        ({"keys": ["id", "id"]}, "[INVALID_SETTING] keys names ['id'] more than once; name each column once"),
        ({"sequence_by": []}, "[MISSING_SETTING] sequence_by is empty; name at least one column"),
        (
            {"shape": Changes},
            f"[INVALID_SETTING] shape={Changes!r} must be one of stream_merge.shapes, such as Changes()",
        ),
        (
            {"sequence_by": "id"},
            "[CONFLICTING_SETTINGS] sequence_by='id' is also a key; a key cannot order its own versions",
        ),
        (
            {"sequence_by": "__stream_merge_sequence"},
            "[RESERVED_COLUMN_NAME] sequence_by names ['__stream_merge_sequence']; the prefix '__stream_merge_' is"
            " reserved",
        ),
        (
            {"apply_as_deletes": " "},
            "[INVALID_SETTING] apply_as_deletes is an empty string; use None when there are no deletes",
        ),
        (
            {"partition_by": ["name"], "cluster_by": ["op"]},
            "[CONFLICTING_SETTINGS] partition_by and cluster_by are both given; Delta allows one of them",
        ),
        ({"app_id": ""}, "[INVALID_SETTING] app_id='' must be a non-empty string, or None"),
        ({"name": " "}, "[INVALID_SETTING] name=' ' must be a non-empty string, or None"),
        ({"name": 5}, "[INVALID_SETTING] name=5 must be a non-empty string, or None"),
        ({"keys": 5}, "[INVALID_SETTING] keys holds [5]; every entry must be a column name"),
        *(
            (
                {"tombstone_retention_seconds": value},
                f"[INVALID_SETTING] retention_seconds={value!r} must be a positive number up to"
                " 100,000,000,000, or None to keep deletes forever",
            )
            for value in (0, -1.5, math.inf, math.nan, 1e16, 10**400, "3600", True, Decimal("NaN"), Decimal("Infinity"))
        ),
        *(
            (
                {"driver_memory_bytes": value},
                f"[INVALID_SETTING] memory_bytes={value!r} must be a positive number of bytes",
            )
            for value in (0, "1g")
        ),
        ({"single_writer": "no"}, "[INVALID_SETTING] single_writer='no' must be True or False"),
        ({"single_writer": 1}, "[INVALID_SETTING] single_writer=1 must be True or False"),
        *(
            (
                {setting: value},
                f"[INVALID_SETTING] {said} must be a dict of str to str, got {kind}",
            )
            for setting, said in (("table_properties", "properties"), ("storage_options", "storage_options"))
            for value, kind in ((5, "int"), (False, "bool"), ("delta.appendOnly", "str"), (["a"], "list"))
        ),
        *(
            (
                {setting: {"a": "b", "c": value, 5: "d"}},
                f"[INVALID_SETTING] {said} has non-strings at ['c', 5]; quote names and values, as in 'true' and '7'",
            )
            for setting, said in (("table_properties", "properties"), ("storage_options", "storage_options"))
            for value in (True, 7, None)
        ),
        ({"apply_as_deletes": 5}, "[INVALID_SETTING] apply_as_deletes=5 must be SQL text or a Column"),
        ({"retry": 5}, "[INVALID_SETTING] retry=5 must be a RetryPolicy, or None"),
        ({"quarantine_target": ""}, "[INVALID_SETTING] quarantine_target='' must be a non-empty string, or None"),
        *(
            (
                {"target": target, "quarantine_target": other},
                f"[CONFLICTING_SETTINGS] quarantine_target={other!r} is the target; use another table",
            )
            for target, *others in (
                ("shop.orders", "shop.orders", "SHOP.Orders", "`shop`.`orders`"),
                ("/w/orders", "file:/w/orders", "file:///w/x/../orders/", "delta.`/w/orders`"),
                ("orders/", "./orders", f"{Path.cwd()}/orders", "delta.`orders/`"),
                ("w/orders", "./w/orders", f"{Path.cwd()}/w/orders", "file:///proc/self/cwd/w/orders"),
                ("s3://w/orders", "s3a://w/orders/"),
                ("abfs://w@a.dfs.core.windows.net/orders", "abfss://w@A.blob.core.windows.net/orders"),
            )
            for other in others
        ),
        (
            {"target": "a/orders", "quarantine_target": "a/__stream_merge_tombstones_orders/"},
            "[CONFLICTING_SETTINGS] quarantine_target='a/__stream_merge_tombstones_orders/' is the tombstone table; use"
            " another table",
        ),
    ],
)
def test_a_wrong_setting_is_refused_at_construction(settings, problem):
    with pytest.raises(ConfigError) as caught:
        sink_of(**{"target": "shop.orders", **settings})

    assert caught.value.problems == (problem,)
    assert isinstance(caught.value, ValueError)


def test_numbers_and_truths_of_other_kinds_are_taken_for_what_they_say():
    truths = {"create": numpy.False_, "change_data_feed": numpy.False_, "tombstones": numpy.True_}
    driver = Driver(memory_bytes=Decimal(10), single_writer=numpy.False_)
    spec = sink_of("shop.orders", **truths, driver=driver)._calls.spec
    groups = {"tombstones": Tombstones(retention_seconds=Decimal("0.5")), "create": Create(properties=[("a", "b")])}
    grouped = sink_of("shop.orders", **groups)._calls.spec
    new = sink_of("shop.orders", sequence_by=(), shape=InsertOnly(), tombstones=numpy.bool_(True))._calls.spec

    assert (spec.driver_memory_bytes, spec.single_writer, spec.create_target, spec.change_data_feed) == (
        *(10, False, False, False),
    )
    assert (spec.tombstones, grouped.tombstones, grouped.tombstone_retention_seconds) == (True, True, Decimal("0.5"))
    assert grouped.create_target
    assert new.tombstones is False  # a shape that remembers none
    assert grouped.table_properties == {"a": "b"}


def test_options_of_a_store_may_change_while_a_sink_lives():
    options = {"aws_session_token": "a"}
    sink = sink_of("s3a://lake/orders", storage_options=options)
    options["aws_session_token"] = "b"

    assert sink._calls.spec.storage_options == {"aws_session_token": "b"}


def test_properties_of_a_table_are_those_that_were_checked():
    properties = {"delta.appendOnly": "false"}
    sink = sink_of("shop.orders", table_properties=properties)
    properties["delta.appendOnly"] = True

    assert sink._calls.spec.table_properties == {"delta.appendOnly": "false"}


def test_all_problems_of_a_construction_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        sink_of(
            "shop.orders",
            keys=["id", "id"],
            column_list=["name"],
            except_column_list=["id"],
            engine="quick",
            app_id=" ",
        )

    assert [problem.split()[:2] for problem in caught.value.problems] == [
        ["[INVALID_SETTING]", "keys"],
        ["[CONFLICTING_SETTINGS]", "column_list"],
        ["[CONFLICTING_SETTINGS]", "column_list"],
        ["[CONFLICTING_SETTINGS]", "except_column_list"],
        ["[INVALID_SETTING]", "engine='quick'"],
        ["[INVALID_SETTING]", "app_id='"],
    ]
    assert str(caught.value) == "; ".join(caught.value.problems)
    assert caught.value.target == "shop.orders"


class ConnectFrame:
    """Stands for a DataFrame of Spark Connect, whose own module needs grpc (not installed here)."""

    sparkSession = None  # noqa: N815


ConnectFrame.__module__ = "pyspark.sql.connect.dataframe"
ConnectFrame.__qualname__ = ConnectFrame.__name__ = "DataFrame"


def test_a_spark_connect_session_is_refused(tmp_path):
    """Recognised by what it lacks: a JVM behind the frame."""
    with nothing_written(tmp_path):
        assert problems_of(sink_of(str(tmp_path / "table")), ConnectFrame()) == (
            "[SESSION_NOT_READY] the batch belongs to a Spark Connect session, which is not supported; run the query in"
            " a classic session (without spark.remote)",
        )


SHARED_DEFAULTS = {
    "sequence_by": (),
    "apply_as_deletes": None,
    "column_list": None,
    "except_column_list": None,
    "on_invalid": "quarantine",
    "quarantine_target": None,
    "tombstones": True,
    "change_data_feed": True,
    "schema_evolution": False,
    "engine": "auto",
    "retry": None,
    "app_id": None,
    "name": None,
    "maintenance": None,
    "shape": None,
    "target_filter": None,
}
"""Of the sink and of its settings."""
GROUPED_DEFAULTS = {
    "tombstone_retention_seconds": None,
    "create_target": True,
    "partition_by": (),
    "cluster_by": (),
    "single_writer": False,
    "storage_options": None,
    "driver_memory_bytes": None,
}


def test_every_default_of_the_sink_is_pinned():
    parameters = dict(inspect.signature(MergeSink).parameters)
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]

    assert required == ["target", "keys", "renamed"]
    assert {name: p.default for name, p in parameters.items() if name not in required} == {
        **SHARED_DEFAULTS,
        **{"create": True, "driver": Driver(), "metrics": None, "observers": ()},
    }


@pytest.mark.parametrize("name", RENAMED)
def test_arguments_of_before_are_told_their_new_names(name: str):
    with pytest.raises(ConfigError) as caught:
        MergeSink(target="t", keys="id", sequence_by="lsn", **{name: 1})
    assert caught.value.problems == (f"[UNKNOWN_SETTING] {name} is now {RENAMED[name]}; use that",)


def test_an_argument_that_nobody_knows_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'kyes'"):
        MergeSink(target="t", keys="id", sequence_by="lsn", kyes="id")


def test_every_default_of_the_spec_is_pinned():
    spec = MergeSpec(target="shop.orders", keys=("id",), sequence_by=("lsn",))
    defaults = {f.name: getattr(spec, f.name) for f in fields(MergeSpec) if f.default is not MISSING or f.init}

    given = {"target": "shop.orders", "keys": ("id",), "sequence_by": ("lsn",)}
    inside = {"table_properties": {}, "retry": RetryPolicy()}
    of_sources = {"source_columns": frozenset(), "position_components": None, "skip_unchanged": False}
    assert defaults == {**SHARED_DEFAULTS, **GROUPED_DEFAULTS, **given, **inside, **of_sources}


def test_every_default_of_the_retry_policy_is_pinned():
    assert {f.name: f.default for f in fields(RetryPolicy)} == {
        "attempts": 6,
        "budget_seconds": 120.0,
        "backoff_initial_seconds": 0.2,
        "backoff_max_seconds": 15.0,
        "backoff_jitter_seconds": 1.0,
    }


def test_the_sink_hands_every_setting_on():
    """A setting that the constructor takes and forgets would be a silent default."""
    given: dict[str, Any] = {
        "target": "shop.orders",
        "keys": ["id"],
        "sequence_by": ["lsn", "tx"],
        "apply_as_deletes": "op = 'd'",
        "column_list": ["id", "name"],
        "on_invalid": "fail",
        "quarantine_target": "shop.broken",
        "tombstone_retention_seconds": 60.0,
        "partition_by": ["name"],
        "table_properties": {"a": "b"},
        "change_data_feed": False,
        "schema_evolution": True,
        "engine": "spark",
        "retry": RetryPolicy(attempts=2),
        "app_id": "app",
        "name": "orders",
        "single_writer": True,
        "storage_options": {"key": "secret"},
        "driver_memory_bytes": 1,
        "shape": Changes(),
    }

    spec = sink_with(**given)._calls.spec

    as_given = {name: list(v) if isinstance(v := getattr(spec, name), tuple) else v for name in given}
    assert as_given == given
    off = MergeSink(target="t", keys="id", sequence_by="lsn", create=False, tombstones=False)._calls.spec
    assert (off.create_target, off.tombstones) == (False, False)
    clustered = MergeSink(target="t", keys="id", sequence_by="lsn", create=Create(cluster_by="id"))
    assert clustered._calls.spec.cluster_by == ("id",)
    assert MergeSink(
        target="t", keys="id", sequence_by="lsn", except_column_list=["op"]
    )._calls.spec.except_column_list == ("op",)


def test_credentials_are_never_shown():
    sink = sink_of("s3://bucket/orders", storage_options={"AWS_SECRET_ACCESS_KEY": "hunter2"})

    with pytest.raises(ConfigError) as caught:
        sink_of("s3://bucket/orders", keys=[], storage_options={"AWS_SECRET_ACCESS_KEY": "hunter2"})

    spec, error = sink._calls.spec, caught.value
    shown = f"{sink!r} {sink} {spec!r} {spec} {error} {error!r} {error.__dict__}"
    assert "hunter2" not in shown
    assert "AWS_SECRET_ACCESS_KEY" not in shown


def test_all_names_what_the_package_shows():
    visible = {
        name
        for name, value in vars(stream_merge).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }

    assert set(stream_merge.__all__) == visible
    assert list(stream_merge.__all__) == sorted(stream_merge.__all__)


@pytest.mark.parametrize(
    "public", [stream_merge.MergeSink, stream_merge.RetryPolicy, stream_merge.MergeResult, stream_merge.EventCounts]
)
def test_public_constructors_take_keywords_only(public: Callable[..., Any]):
    kinds = {p.kind for p in inspect.signature(public).parameters.values()}

    assert kinds - {inspect.Parameter.VAR_KEYWORD} == {inspect.Parameter.KEYWORD_ONLY}
