"""What is set up wrongly is one sentence with its remedy, before anything is written."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from log_faults import added_jars
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import stream_merge
from stream_merge import ConfigError, MergeSink, RetryPolicy
from stream_merge.config import MergeSpec
from stream_merge.testing import run, table_version

COLUMNS = ["id", "lsn", "name", "op", "tags", "doc", "at"]
NOBODY = 65534


@pytest.fixture(scope="module")
def source(spark: SparkSession) -> DataFrame:
    """One event with columns of all sorts."""
    return spark.range(1).selectExpr(
        "id",
        "1L AS lsn",
        "'ann' AS name",
        "'u' AS op",
        "map('a', 'b') AS tags",
        "parse_json('{}') AS doc",
        "named_struct('file', 1L, 'tags', map('a', 1)) AS at",
    )


def sink_of(target: str, **settings: Any) -> MergeSink:
    return MergeSink(**{"target": target, "keys": ["id"], "sequence_by": "lsn", **settings})


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
    assert caught.value.target == sink._spec.target
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


# -- seen without Spark -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"column_list": ["id", "name"], "except_column_list": ["op"]},
            "column_list and except_column_list are both given; keep one of them",
        ),
        (
            {"column_list": ["lsn", "name"]},
            "column_list leaves out key(s) ['id']; add them, a row cannot be found without its keys",
        ),
        ({"except_column_list": ["id"]}, "except_column_list drops key(s) ['id']; remove them from the list"),
        ({"engine": "quick"}, "engine='quick' is not known; use one of 'auto', 'spark', 'native'"),
        ({"schema_evolution": "always"}, "schema_evolution='always' is not known; use False, True or 'widen'"),
        ({"on_invalid": "drop"}, "on_invalid='drop' is not known; use one of 'quarantine', 'fail'"),
        ({"target": " "}, "target is empty; give a catalog name, a path or a URI"),
        ({"keys": []}, "keys is empty; name at least one column"),
        ({"keys": ["id", "id"]}, "keys names ['id'] more than once; name each column once"),
        ({"sequence_by": []}, "sequence_by is empty; name at least one column"),
        ({"sequence_by": "id"}, "sequence_by='id' is also a key; a key cannot order its own versions"),
        (
            {"sequence_by": "__stream_merge_sequence"},
            "sequence_by names ['__stream_merge_sequence']; names starting with '__stream_merge_' belong to the sink",
        ),
        ({"apply_as_deletes": " "}, "apply_as_deletes is an empty string; use None when there are no deletes"),
        (
            {"tombstone_retention_seconds": 0},
            "tombstone_retention_seconds=0 forgets deletes at once; use a positive number, None to keep them for"
            " ever, or tombstones=False",
        ),
        ({"native_memory_bytes": 0}, "native_memory_bytes=0 leaves no memory; use a positive number"),
        (
            {"partition_by": ["name"], "cluster_by": ["op"]},
            "partition_by and cluster_by are both given; Delta allows one of them",
        ),
        ({"app_id": ""}, "app_id='' is empty; leave it out or give it a value"),
        ({"name": " "}, "name=' ' is empty; leave it out or give it a value"),
    ],
)
def test_a_wrong_setting_is_refused_at_construction(settings, problem):
    with pytest.raises(ConfigError) as caught:
        sink_of(**{"target": "shop.orders", **settings})

    assert caught.value.problems == (problem,)
    assert isinstance(caught.value, ValueError)


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

    assert [problem.split()[0] for problem in caught.value.problems] == [
        "keys",
        "column_list",
        "column_list",
        "except_column_list",
        "engine='quick'",
        "app_id='",
    ]
    assert str(caught.value) == "; ".join(caught.value.problems)
    assert caught.value.target == "shop.orders"


# -- seen in the source -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"keys": ["nope"]}, f"keys names column 'nope', which the source does not have; its columns are {COLUMNS!r}"),
        (
            {"keys": ["at.file"]},
            f"keys names column 'at.file', which the source does not have; its columns are {COLUMNS!r}",
        ),
        (
            {"sequence_by": ["lsn", "nope"]},
            f"sequence_by names column 'nope', which the source does not have; its columns are {COLUMNS!r}",
        ),
        (
            {"sequence_by": "tags"},
            "sequence_by uses 'tags' of type map<string,string>, which has no order; use numbers, timestamps, text or"
            " a struct of them",
        ),
        (
            {"sequence_by": "doc"},
            "sequence_by uses 'doc' of type variant, which has no order; use numbers, timestamps, text or a struct of"
            " them",
        ),
        (
            {"sequence_by": "at"},
            "sequence_by uses 'at' of type struct<file:bigint,tags:map<string,int>>, which has no order; use numbers,"
            " timestamps, text or a struct of them",
        ),
        ({"keys": ["tags"]}, "key 'tags' is map<string,string>, which has no equality; derive another key"),
        ({"keys": ["doc"]}, "key 'doc' is variant, which has no equality; derive another key"),
        (
            {"column_list": ["id", "nope"]},
            f"column_list names column 'nope', which the source does not have; its columns are {COLUMNS!r}",
        ),
        (
            {"except_column_list": ["nope"]},
            f"except_column_list names column 'nope', which the source does not have; its columns are {COLUMNS!r}",
        ),
        (
            {"except_column_list": ["ID"]},
            "key 'id' is not among the stored columns; keep it in the column lists",
        ),
        ({"apply_as_deletes": "op"}, "apply_as_deletes='op' is string, not a condition; make it one"),
        (
            {"partition_by": ["nope"]},
            f"partition_by names column 'nope', which is not stored; stored columns are {COLUMNS!r}",
        ),
    ],
)
def test_what_the_source_cannot_give_is_refused(source, tmp_path, settings, problem):
    with nothing_written(tmp_path):
        assert problems_of(sink_of(str(tmp_path / "table"), **settings), source) == (problem,)


@pytest.mark.parametrize("condition", ["op = = 'd'", "nope = 'd'", "no_such_function(op)"])
def test_a_delete_condition_that_does_not_fit_the_source_is_refused(source, tmp_path, condition):
    with nothing_written(tmp_path):
        (problem,) = problems_of(sink_of(str(tmp_path / "table"), apply_as_deletes=condition), source)

    assert problem.startswith(f"apply_as_deletes={condition!r} does not fit the source: [")
    assert problem.endswith(f"; its columns are {COLUMNS!r}")


def test_a_sequence_expression_that_does_not_fit_the_source_is_refused(source, tmp_path):
    with nothing_written(tmp_path):
        (problem,) = problems_of(sink_of(str(tmp_path / "table"), sequence_by=F.col("at.nope")), source)

    assert problem.startswith("sequence_by='at.nope' does not fit the source: [FIELD_NOT_FOUND]")


def test_a_reserved_column_in_the_source_is_refused(source, tmp_path):
    odd = source.select("id", "lsn", F.lit(1).alias("__Stream_Merge_delete"))

    with nothing_written(tmp_path):
        assert problems_of(sink_of(str(tmp_path / "table")), odd) == (
            "the source has column(s) ['__Stream_Merge_delete']; names starting with '__stream_merge_' belong to the"
            " sink, rename them in the stream",
        )


def test_keys_may_be_spelled_in_another_case_than_the_column_list(source, tmp_path):
    """Case follows `spark.sql.caseSensitive`, which is off; only the source can tell."""
    result = run(sink_of(str(tmp_path / "table"), keys=["ID"], column_list=["id", "lsn", "name"]), source, 0)

    assert result.events.inserted == 1


def test_all_problems_of_a_batch_are_reported_at_once(source, tmp_path):
    sink = sink_of(
        str(tmp_path / "table"), keys=["nope", "tags"], sequence_by="doc", apply_as_deletes="op", create_target=False
    )

    with nothing_written(tmp_path):
        assert [problem.split(",")[0] for problem in problems_of(sink, source)] == [
            "keys names column 'nope'",
            "key 'tags' is map<string",
            "sequence_by uses 'doc' of type variant",
            "apply_as_deletes='op' is string",
        ]


class ConnectFrame:
    """Stands for a DataFrame of Spark Connect, whose own module needs grpc (not installed here)."""

    sparkSession = None  # noqa: N815


ConnectFrame.__module__ = "pyspark.sql.connect.dataframe"
ConnectFrame.__qualname__ = ConnectFrame.__name__ = "DataFrame"


def test_a_spark_connect_session_is_refused(tmp_path):
    """Recognised by what it lacks: a JVM behind the frame."""
    with nothing_written(tmp_path):
        assert problems_of(sink_of(str(tmp_path / "table")), ConnectFrame()) == (
            "the batch belongs to a Spark Connect session, which gives no access to Delta's transaction ids and merge"
            " metrics; run the query in a classic session (without spark.remote)",
        )


# -- seen in the target -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orders(spark: SparkSession, source: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table that a sink has merged into, with keys ["id"] and sequence ["lsn"]."""
    table = tmp_path_factory.mktemp("orders") / "orders"
    run(sink_of(str(table)), source.select("id", "lsn", "name"), 0)
    return table


@pytest.mark.parametrize(
    ("settings", "select", "problem"),
    [
        (
            {"keys": ["name"]},
            ["id", "lsn", "name"],
            "target {target!r} is merged by keys ['id'], now keys=['name']; use the recorded keys, or rebuild the"
            " table: rows and remembered deletes were matched by the old ones",
        ),
        (
            {"sequence_by": ["lsn", "name"]},
            ["id", "lsn", "name"],
            "target {target!r} is sequenced by ['lsn'], now by ['lsn', 'name']; use the recorded definition, or"
            " rebuild the table: stored sequences cannot be compared with new ones",
        ),
        (
            {},
            ["CAST(id AS string) AS id", "lsn", "name"],
            "column 'id' is string in the source and bigint in the target, which cannot hold it exactly; cast it in"
            " the stream to bigint",
        ),
        (
            {},
            ["id", "CAST(lsn AS decimal(38, 0)) AS lsn", "name"],
            "column 'lsn' is decimal(38,0) in the source and bigint in the target, which cannot hold it exactly; cast"
            " it in the stream to bigint, set schema_evolution='widen', or widen it yourself: ALTER TABLE"
            " delta.`{target}` SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true'); ALTER TABLE delta.`{target}`"
            " ALTER COLUMN `lsn` TYPE decimal(38,0)",
        ),
        (
            {},
            ["id", "lsn", "name", "op"],
            "the source has column(s) ['op'] that the target lacks; set schema_evolution=True to add them, or leave"
            " them out with except_column_list",
        ),
        (
            {"schema_evolution": True},
            ["id", "lsn", "name", "op AS `change op`"],
            "new column(s) ['change op'] need column mapping, which target {target!r} does not have; set"
            " delta.columnMapping.mode='name' on it or rename them in the stream",
        ),
    ],
    ids=["keys", "sequence", "type", "decimal", "unknown column", "column mapping"],
)
def test_what_an_existing_table_does_not_allow_is_refused(source, orders, settings, select, problem):
    with nothing_written(orders.parent):
        problems = problems_of(sink_of(str(orders), **settings), source.selectExpr(*select))

    assert problems == (problem.format(target=str(orders)),)


def test_an_append_only_table_is_refused(spark, source, tmp_path, tmp_table):
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, lsn bigint) USING delta"
        " TBLPROPERTIES ('delta.appendOnly' = 'true')"
    )

    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table), source.select("id", "lsn")) == (
            f"target {tmp_table!r} is append-only (delta.appendOnly); a merge updates and deletes, unset the property",
        )
    assert table_version(spark, tmp_table) == 0


def test_a_folder_that_is_no_delta_table_is_refused(source, tmp_path, tmp_table):
    source.select("id", "lsn").write.parquet(tmp_table)

    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table), source.select("id", "lsn")) == (
            f"target {tmp_table!r} exists but is not a Delta table; convert it (CONVERT TO DELTA) or choose another",
        )


def test_a_file_in_the_place_of_the_target_is_refused(source, tmp_path, tmp_table):
    Path(tmp_table).write_text("not a table")

    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table), source.select("id", "lsn")) == (
            f"target {tmp_table!r} exists but is not a Delta table; convert it (CONVERT TO DELTA) or choose another",
        )


def test_a_catalog_table_that_is_no_delta_table_is_refused(spark, source):
    spark.sql("CREATE TABLE bad_input_parquet (id bigint, lsn bigint) USING parquet")
    try:
        assert problems_of(sink_of("bad_input_parquet"), source.select("id", "lsn")) == (
            "target 'bad_input_parquet' exists but is not a Delta table; convert it (CONVERT TO DELTA) or choose"
            " another",
        )
        assert [row["tableName"] for row in spark.sql("SHOW TABLES LIKE '*bad_input*'").collect()] == [
            "bad_input_parquet"
        ]
    finally:
        spark.sql("DROP TABLE bad_input_parquet")


@pytest.mark.parametrize("target", ["no such name", "one..two", "shop.`orders"])
def test_a_target_that_is_no_table_name_is_refused(source, target):
    (problem,) = problems_of(sink_of(target), source.select("id", "lsn"))

    assert problem.startswith(f"target {target!r} is not a table name that Spark can read: [")


def test_a_missing_schema_is_one_sentence(source):
    (problem,) = problems_of(sink_of("no_such_schema.orders"), source.select("id", "lsn"))

    assert problem.startswith("table 'no_such_schema.orders' could not be created: [SCHEMA_NOT_FOUND]")


def test_a_missing_table_is_refused_when_the_sink_may_not_create_it(source, tmp_path, tmp_table):
    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table, create_target=False), source.select("id", "lsn")) == (
            f"target {tmp_table!r} does not exist and create_target is off; create it or switch it on",
        )


def test_a_table_in_the_place_of_the_quarantine_is_refused(spark, source, tmp_path, tmp_table):
    elsewhere = str(tmp_path / "elsewhere")
    source.select("id").write.format("delta").save(elsewhere)

    with nothing_written(tmp_path), pytest.raises(ConfigError) as caught:
        sink_of(tmp_table, quarantine_target=elsewhere)(source.select("id", "lsn"), 0)

    (problem,) = caught.value.problems
    assert problem.startswith(f"quarantine_target {elsewhere!r} lacks column(s) ['reasons', ")
    assert problem.endswith("name another table and let the sink create it")


# -- permissions --------------------------------------------------------------------------------


def test_the_source_may_spell_the_sequence_in_another_case(source, orders):
    """The recorded definition is compared as the session compares names."""
    again = source.selectExpr("id", "2L AS LSN", "name")

    assert run(sink_of(str(orders), sequence_by="LSN"), again, 1).events.updated == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_path_without_permission_is_refused(spark, source):
    """In a process of its own under an unprivileged uid: root may write anywhere."""
    place = Path(tempfile.mkdtemp(prefix="stream-merge-permission-"))
    try:
        place.chmod(0o755)
        jars, scratch, theirs, closed = (place / name for name in ("jars", "scratch", "theirs", "closed"))
        for folder in (jars, scratch, theirs, closed):
            folder.mkdir(mode=0o755)
        os.chown(scratch, NOBODY, NOBODY)
        for jar in filter(os.path.isfile, added_jars(spark)):
            shutil.copy(jar, jars)
        run(sink_of(str(theirs / "table")), source.select("id", "lsn"), 0)
        closed.chmod(0o700)
        targets = [str(theirs / "table"), str(theirs / "missing"), str(closed / "deep" / "missing")]

        with nothing_written(theirs), nothing_written(closed):
            said = call_as_nobody(jars, scratch, targets)

        assert said == {
            targets[0]: [
                cannot_write(theirs / "table", place=targets[0]),
                cannot_write(theirs, place=str(theirs / "__stream_merge_quarantine_table")),
            ],
            targets[1]: [cannot_write(theirs, place=targets[1])],
            targets[2]: [cannot_write(closed, place=targets[2])],
        }
    finally:
        shutil.rmtree(place)


def cannot_write(folder: Path, *, place: str) -> str:
    return (
        f"this process (uid 65534) may not write to {str(folder)!r}, where {place!r} lies; grant it write permission"
        " or choose another path"
    )


def call_as_nobody(jars: Path, scratch: Path, targets: list[str]) -> dict[str, list[str]]:
    """What the sink says of each target to a user who owns nothing."""
    root = Path(stream_merge.__file__).parents[1]
    child = Path(__file__).with_name("unprivileged_child.py")
    paths = ",".join(str(jar) for jar in sorted(jars.iterdir()))
    done = subprocess.run(
        [sys.executable, str(child), paths, str(scratch), *targets],
        cwd=scratch,
        env={**os.environ, "HOME": str(scratch), "PYTHONPATH": str(root), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("SAID ")[2])


# -- defaults and surface -----------------------------------------------------------------------


SINK_DEFAULTS = {
    "apply_as_deletes": None,
    "column_list": None,
    "except_column_list": None,
    "on_invalid": "quarantine",
    "quarantine_target": None,
    "tombstones": True,
    "tombstone_retention_seconds": None,
    "create_target": True,
    "partition_by": (),
    "cluster_by": (),
    "table_properties": None,
    "change_data_feed": True,
    "schema_evolution": False,
    "engine": "auto",
    "retry": None,
    "app_id": None,
    "name": None,
    "single_writer": False,
    "storage_options": None,
    "native_memory_bytes": None,
    "metrics": None,
}


def test_every_default_of_the_sink_is_pinned():
    parameters = dict(inspect.signature(MergeSink).parameters)
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]

    assert required == ["target", "keys", "sequence_by"]
    assert {name: p.default for name, p in parameters.items() if name not in required} == SINK_DEFAULTS


def test_every_default_of_the_spec_is_pinned():
    spec = MergeSpec(target="shop.orders", keys=("id",), sequence_by=("lsn",))
    defaults = {f.name: getattr(spec, f.name) for f in fields(MergeSpec) if f.default is not MISSING or f.init}

    given = {"target": "shop.orders", "keys": ("id",), "sequence_by": ("lsn",)}
    inside = {"table_properties": {}, "retry": RetryPolicy()}
    of_sources = {"source_columns": frozenset(), "position_components": None, "skip_unchanged": False}
    of_sink = {name: value for name, value in SINK_DEFAULTS.items() if name != "metrics"}
    assert defaults == {**of_sink, **given, **inside, **of_sources}


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
        "tombstones": False,
        "tombstone_retention_seconds": 60.0,
        "create_target": False,
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
        "native_memory_bytes": 1,
    }

    spec = MergeSink(**given)._spec

    as_given = {name: list(v) if isinstance(v := getattr(spec, name), tuple) else v for name in given}
    assert as_given == given
    assert MergeSink(target="t", keys="id", sequence_by="lsn", cluster_by="id")._spec.cluster_by == ("id",)
    assert MergeSink(target="t", keys="id", sequence_by="lsn", except_column_list=["op"])._spec.except_column_list == (
        "op",
    )


def test_credentials_are_never_shown():
    sink = sink_of("s3://bucket/orders", storage_options={"AWS_SECRET_ACCESS_KEY": "hunter2"})

    with pytest.raises(ConfigError) as caught:
        sink_of("s3://bucket/orders", keys=[], storage_options={"AWS_SECRET_ACCESS_KEY": "hunter2"})

    shown = f"{sink!r} {sink} {sink._spec!r} {sink._spec} {caught.value} {caught.value!r} {caught.value.__dict__}"
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

    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
