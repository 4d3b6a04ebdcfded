"""A job file is checked as a whole, before anything is touched, and keeps its secrets."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stream_merge import ConfigError
from stream_merge.jobs.kafka import JobSettings, load
from stream_merge.jobs.kafka.control import held, is_running, request_stop, stop_request
from stream_merge.jobs.kafka.formats import DebeziumFormat, JsonFormat

GOOD = """
kafka: {bootstrap: "b:9092"}
defaults: {trigger: 500 ms, limits: {max_value_bytes: 1 MiB}}
queries:
  - {name: orders, topic: shop.public.orders, target: tables/orders, keys: id, checkpoint: c/orders}
"""

Read = Callable[..., JobSettings]


def with_registry(url: str, more: str = "id_bytes: 4") -> tuple[str, str]:
    """What to replace in `GOOD`, and by what."""
    return '"b:9092"', f'"b:9092", schema_registry: {{url: "{url}", {more}}}'


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def from_text(text: str, **environment: str) -> JobSettings:
        file = tmp_path / "job.yaml"
        file.write_text(text)
        return load(file, environment=environment)

    return from_text


def test_defaults_hold_for_every_query_and_units_are_read(read: Read) -> None:
    (query,) = read(GOOD).queries

    assert (query.trigger, query.limits.max_value_bytes) == (0.5, 2**20)
    assert (query.topic, query.keys) == (("shop.public.orders",), ("id",))


def test_defaults_also_hold_for_what_a_query_leaves_open_in_a_group(read: Read) -> None:
    """The modes of one connector stand once, the columns with each table; another type starts from nothing."""
    text = """
kafka: {bootstrap: "b:9092"}
defaults:
  value_format: {type: debezium, time_precision_mode: microseconds}
  limits: {max_value_bytes: 1 MiB, max_quarantine_share: 0.1}
  start: {0: 7, 1: 7}
queries:
  - {name: a, topic: a, target: a, keys: id, checkpoint: a, value_format: {columns: {at: timestamp(6)}}, start: {0: 3}}
  - {name: b, topic: b, target: b, keys: id, checkpoint: b, value_format: {type: json, columns: {id: int}},
     limits: {max_value_bytes: 2 MiB}}
"""
    one, other = read(text).queries

    assert isinstance(one.value_format, DebeziumFormat)
    assert isinstance(other.value_format, JsonFormat)
    assert (one.value_format.type, one.value_format.columns) == ("debezium", {"at": "timestamp(6)"})
    assert one.value_format.modes.time_precision == "microseconds"
    assert (one.limits.max_value_bytes, one.start) == (2**20, {0: 3})
    assert (other.value_format.type, other.value_format.columns) == ("json", {"id": "int"})
    assert (other.limits.max_value_bytes, other.limits.max_quarantine_share) == (2 * 2**20, 0.1)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("500 ms", 0.5), ("2 seconds", 2), ("1.5 m", 90), ("2 hours", 7_200), ("30 days", 2_592_000)],
)
def test_durations_have_units(read: Read, written: str, seconds: float) -> None:
    (query,) = read(GOOD.replace("keys: id", f"keys: id, tombstone_retention: {written}")).queries

    assert query.tombstone_retention == seconds


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("tombstone_retention: 30", "30 has no unit; write '30 days'"),
        ("tombstone_retention: '30'", "'30' has no unit"),
        (
            "tombstone_retention: 1 month",
            "'1 month' is not a duration; write a number with ms, s, minutes, hours",
        ),
        ("trigger: 5 parsecs", "'5 parsecs' is not a duration"),
        ("tombstone_retention: 99999999999 days", "'99999999999 days' must be at most 10,000 years"),
        ("limits: {max_value_bytes: 16 MBit}", "'16 MBit' is not a size; write a number of bytes, or one with KiB"),
    ],
)
def test_what_is_no_duration_or_size_is_told_with_what_would_be(read: Read, setting: str, why: str) -> None:
    """A retention of seconds by mistake would let old upserts bring deleted rows back."""
    with pytest.raises(ConfigError) as raised:
        read(GOOD.replace("keys: id", f"keys: id, {setting}"))

    assert why in str(raised.value)


def test_a_shape_that_is_not_known_is_refused_with_those_that_are(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"shape: 'changed' must be one of changes"):
        read(GOOD.replace("keys: id", "keys: id, shape: changed"))


def test_clauses_are_a_shape_and_every_rule_of_theirs_is_told_with_its_place(read: Read) -> None:
    def shape(*clauses: str) -> str:
        return GOOD.replace("keys: id", f"keys: id, shape: {{clauses: [{', '.join(clauses)}]}}")

    update = "{when: matched, condition: s.v > t.v, then: update, set: {v: s.v}, except: []}"
    (query, *_) = read(shape(update, "{when: not_matched, then: insert, except: note}")).queries
    assert not isinstance(query.shape, str)
    assert repr(query.shape.shape()) == (
        "Clauses([when_matched('s.v > t.v').update({'v': 's.v'}), when_not_matched().insert_all(except_=['note'])])"
    )

    with pytest.raises(ConfigError) as raised:
        read(shape("{when: matched, then: delete, set: {v: s.v}}", "{when: matched, then: insert}"))
    assert [problem.split("job.yaml: ")[1] for problem in raised.value.problems] == [
        "queries.orders.shape: clause 1, when_matched().delete(): a delete assigns no columns; remove them",
        "queries.orders.shape: clause 2, when_matched().insert_all(): a matched clause cannot insert; it can update or"
        " delete",
        "queries.orders.shape: clause 2, when_matched().insert_all() is never reached: clause 1 has no condition; give"
        " that one a condition, or put it last",
    ]
    with pytest.raises(ConfigError, match=r"queries.orders.shape.clauses.0.set.v: must be a valid string"):
        read(shape("{when: matched, then: update, set: {v: 1}}"))
    with pytest.raises(ConfigError, match=r"a not_matched_by_source clause would change nearly every row; remove"):
        read(shape("{when: not_matched_by_source, then: delete}"))


def test_a_topic_is_no_snapshot(read: Read) -> None:
    with pytest.raises(
        ConfigError,
        match=r"queries.orders.shape: 'snapshot' would delete every row that a micro-batch of a topic lacks",
    ):
        read(GOOD.replace("keys: id", "keys: id, shape: snapshot"))


@pytest.mark.parametrize("name", ["keys", "topic"])
def test_an_empty_list_is_refused(read: Read, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"queries\.orders\.{name} must not be empty"):
        read(re.sub(rf"{name}: [\w.]+", f"{name}: []", GOOD))


def test_every_default_of_a_query_is_pinned(read: Read) -> None:
    (query,) = read(GOOD.replace("defaults: {trigger: 500 ms, limits: {max_value_bytes: 1 MiB}}", "")).queries

    assert query.model_dump(exclude={"name", "topic", "target", "keys", "checkpoint", "value_format"}) == {
        "topic_column": None,
        "transactional": False,
        "key_format": {"type": "json", "holds": "string"},
        "trigger": 1.0,
        "start": None,
        "epoch": 0,
        "unchanged": "update",
        "on_truncate": "stop",
        "on_data_loss": "stop",
        "on_server_change": "stop",
        "unavailable": "quarantine",
        "schema_evolution": True,
        "on_column_default": "warn",
        "engine": "auto",
        "shape": "changes",
        "group": None,
        "tombstone_retention": None,
        "limits": {
            "max_events_per_batch": 100_000,
            "max_value_bytes": 16 * 2**20,
            "max_quarantine_share": 0.5,
            "max_position_regression": 2**30,
        },
        "maintenance": None,
        "table_properties": {},
        "target_filter": None,
        "single_writer": False,
    }


def test_every_problem_is_told_at_once_with_its_place(read: Read) -> None:
    text = GOOD.replace("keys: id", "key: id").replace("500 ms", "soon")

    with pytest.raises(ConfigError) as raised:
        read(f"{text}  - {{name: two, topic: t, target: t, keys: id, checkpoint: '${{WHERE}}', epoch: -1}}\n")

    said = str(raised.value)
    for part in (
        "queries.orders.keys is missing",
        "queries.orders.key is not a setting",
        "queries.orders.trigger",
        "queries.two.epoch",
        "${WHERE} is not set in the environment",
    ):
        assert part in said
    assert "at least 1 item" not in said


def test_a_setting_of_maintenance_that_was_removed_is_one_problem_that_names_what_to_use(read: Read) -> None:
    text = GOOD.replace("keys: id", "keys: id, maintenance: {vacuum_after: 7 days, every: 5}")

    with pytest.raises(ConfigError) as raised:
        read(text)

    (problem,) = raised.value.problems
    assert problem.startswith("[UNKNOWN_SETTING] ")
    assert problem.endswith(
        "queries.orders.maintenance: vacuum_after is not a setting; set vacuum, and the table property"
        " delta.deletedFileRetentionDuration"
    )


def test_what_two_queries_share_is_told_beside_what_is_wrong_in_one(read: Read) -> None:
    """A query whose name is not the only one of its kind goes by its number."""
    with pytest.raises(ConfigError) as raised:
        read(
            GOOD.replace("keys: id", "keys: [], shape: changed")
            + "  - {name: orders, topic: t, target: ./tables/orders, keys: id, checkpoint: c/orders/, start: soon}\n"
            + "  - {name: three, topic: t, target: t, keys: id, checkpoint: c, value_format: {type: protobuf}}\n"
            + "  - {name: four, topic: t, target: f, keys: id, checkpoint: f, value_format: {type: xml},"
            + " key_format: protobuf}"
        )

    json = "in the connector to its Avro or JSON converter"
    assert [re.sub(r"/\S+/job.yaml: ", "", problem) for problem in raised.value.problems] == [
        "[DUPLICATE_SETTING] several queries have the same name: ['orders']; give each its own",
        "[DUPLICATE_SETTING] several queries have the same target: ['./tables/orders', 'tables/orders']; give each its"
        " own",
        "[DUPLICATE_SETTING] several queries have the same checkpoint: ['c/orders', 'c/orders/']; give each its own",
        "[INVALID_SETTING] queries.0.keys must not be empty",
        "[INVALID_SETTING] queries.0.shape: 'changed' must be one of changes, insert-only, snapshot, or clauses",
        "[INVALID_SETTING] queries.1.start: must be 'earliest' or 'latest'",
        "[INVALID_SETTING] queries.1.start: must be a valid datetime or date, input is too short",
        "[INVALID_SETTING] queries.1.start: must be a mapping",
        f"[UNSUPPORTED_FORMAT] queries.three.value_format: protobuf is not supported yet; set value.converter {json}",
        f"[UNSUPPORTED_FORMAT] queries.four.key_format: protobuf is not supported yet; set key.converter {json}",
        "[INVALID_SETTING] queries.four.value_format.type 'xml' must be one of 'debezium', 'flattened', 'json',"
        " 'plain'",
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("keys: id", "keys: id, value_format: {type: debezium, columns: {at: timestamp(6)}}"), "time.precision.mode"),
        (
            ("keys: id", "keys: id, value_format: {type: debezium, types: {a: text}}"),
            "it must be 'decimal(p,s)' or one of",
        ),
        (("keys: id", "keys: id, value_format: {type: json, columns: {a: blob}}"), "'blob' is not a type"),
        (("keys: id", "keys: id, value_format: {type: json, columns: {a: int}, position: b}"), "position 'b' must be"),
        (("keys: id", "keys: id, value_format: {type: avro}"), "with encoding: avro"),
        (
            ("keys: id", "keys: id, value_format: {type: debezium, encoding: avro}"),
            "query 'orders' reads Avro; set kafka.schema_registry",
        ),
        (("keys: id", "keys: id, key_format: {type: avro}"), "query 'orders' reads Avro; set kafka.schema_registry"),
        (
            ("keys: id", "keys: id, value_format: {type: debezium, encoding: avro, columns: {id: int8}}"),
            "columns are those of the Avro schema",
        ),
        (with_registry("ftp://r"), "schema_registry.url must be a URL such as"),
        (with_registry("https:///r"), "schema_registry.url must be a URL such as"),
        (with_registry("https://r:port"), "schema_registry.url must be a URL such as"),
        (with_registry("https://me:hidden@r"), "must not hold a user or password; set user and password"),
        (with_registry("https://r", "user: me"), "schema_registry needs both user and password, or neither"),
        (with_registry("https://r", "password: hidden"), "schema_registry needs both user and password, or neither"),
        (
            with_registry("https://r", "user: me, password: hidden, token: hidden"),
            "schema_registry takes user and password, or token; remove one of them",
        ),
        (with_registry("https://r", "ca_file: gone.pem"), "/gone.pem'] do not exist"),
        (with_registry("https://r", "id_bytes: 2"), "id_bytes: must be 4 or 8"),
        (('"b:9092"', '"b:9092", security: {protocol: SASL_SSL}'), "needs mechanism, user and password"),
        (('"b:9092"', '"b:9092", security: {user: me}'), "require protocol SASL_PLAINTEXT or SASL_SSL"),
        (('"b:9092"', '"b:9092", security: {protocol: SSL, ca_file: gone.pem}'), "/gone.pem'] do not exist"),
        (("topic: shop.public.orders", "topic: [a, b], start: {0: 1}"), "offsets by partition require a single topic"),
    ],
)
def test_what_cannot_work_is_refused(read: Read, change: tuple[str, str], why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(GOOD.replace(*change))

    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"), [("a: [", "is not YAML"), ("- a", "must contain 'kafka:'"), ("", "must contain 'kafka:'")]
)
def test_a_file_that_is_no_job_is_refused(read: Read, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(text)


@pytest.mark.parametrize("password", ["@S3cret", '"S3cret', "'S3cret", "*S3cret", "!!S3cret", "%S3cret", "S3: cret"])
def test_a_line_that_is_no_yaml_is_not_shown(read: Read, password: str) -> None:
    """It may be that of a password; nor is it in what the error comes from."""
    with pytest.raises(ConfigError, match=r"is not YAML: line \d+, column \d+: ") as raised:
        read(GOOD.replace('"b:9092"', f'"b:9092", security: {{user: me, password: {password}}}'))

    assert "cret" not in "".join(traceback.format_exception(raised.value))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")


def test_queries_do_not_share_names_tables_and_checkpoints(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"several queries have the same name: \['orders'\]"):
        read(GOOD + GOOD.splitlines()[-1] + "\n")


@pytest.mark.parametrize(
    ("written", "located"),
    [
        ("tables/o", "{folder}/tables/o"),
        ("./o/", "{folder}/o"),
        ("../o", "{parent}/o"),
        ("~/o", "/home/lake/o"),
        ("${LAKE}/o", "{folder}/lake/o"),
        ("/lake/o", "/lake/o"),
        ("delta.`tables/o`", "{folder}/tables/o"),
        ("file:///lake/o", "file:///lake/o"),
        ("s3a://lake/o", "s3a://lake/o"),
        ("shop.o", "shop.o"),
        ("o", "o"),
        ("`~/a`", "`~/a`"),
    ],
)
def test_paths_begin_in_the_folder_of_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, located: str
) -> None:
    """Whatever folder a command runs in; catalog names and URIs stay."""
    monkeypatch.setenv("HOME", "/home/lake")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file, text = Path("../jobs/job.yaml"), GOOD.replace("tables/orders", f"'{written}'")
    file.write_text(text.replace('"b:9092"', '"b:9092", security: {protocol: SSL, ca_file: ca.pem}'))
    (tmp_path / "jobs" / "ca.pem").touch()

    settings = load(file, environment={"LAKE": "lake"})

    (query,) = settings.queries
    assert query.target == located.format(folder=tmp_path / "jobs", parent=tmp_path)
    assert query.checkpoint == f"{tmp_path}/jobs/c/orders"
    assert settings.kafka.security.ca_file == f"{tmp_path}/jobs/ca.pem"


@pytest.mark.parametrize("setting", ["tables/orders", "c/orders"])
def test_a_target_and_a_checkpoint_have_a_path(read: Read, setting: str) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        read(GOOD.replace(setting, "''"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tables/o", "./tables/o/"),
        ("tables/o", "tables/x/../o"),
        ("s3://b/o", "s3a://b/o"),
        ("shop.o", "SHOP.`o`"),
        ("delta.`tables/o`", "tables/o"),
        ("tables/o", "{folder}/tables/o"),
        ("~/o", f"file:{Path.home()}/o"),
    ],
)
def test_nor_under_two_spellings(read: Read, tmp_path: Path, one: str, other: str) -> None:
    """Equal keys of two topics would overwrite each other."""
    query = "  - {{name: {0}, topic: {0}, target: {1!r}, keys: id, checkpoint: c/{0}}}\n"
    both = query.format("a", one) + query.format("b", other.format(folder=tmp_path))

    with pytest.raises(ConfigError, match="several queries have the same target"):
        read(GOOD.replace(GOOD.splitlines()[-1] + "\n", both))


@pytest.mark.parametrize("given", ["user: me, password: '${SECRET}'", "token: '${SECRET}'"])
def test_a_secret_of_a_schema_registry_is_used_and_never_shown(read: Read, given: str) -> None:
    before, after = with_registry("https://registry:8081", given)
    settings = read(
        GOOD.replace(before, after).replace("keys: id", "keys: id, value_format: {type: debezium, encoding: avro}"),
        SECRET="hid",
    )
    (query,) = settings.queries

    for shown in (repr(settings), settings.model_dump_json(), repr(query.format())):
        assert "hid" not in shown
    registry = settings.kafka.schema_registry
    assert registry is not None
    assert "hid" in (registry.registry().password, registry.registry().token)


def test_keys_are_written_as_values_are_unless_told_otherwise(read: Read) -> None:
    """AvroConverter is usually set for both."""
    before, after = with_registry("http://registry:8081")

    def key(query: str) -> str:
        settings = read(GOOD.replace(before, after).replace("keys: id", f"keys: id, {query}"))
        return type(settings.queries[0].format().key).__name__

    assert key("value_format: {type: flattened, encoding: avro}") == "AvroKey"
    assert key("value_format: {type: debezium, encoding: avro}, key_format: {type: text}") == "TextKey"
    assert key("value_format: {type: debezium, encoding: json}, key_format: {type: avro}") == "AvroKey"
    assert key("value_format: {type: debezium, encoding: json}") == "JsonKey"


def test_a_secret_is_used_and_never_shown(read: Read) -> None:
    security = "security: {protocol: SASL_SSL, mechanism: SCRAM-SHA-512, user: me, password: '${SECRET}'}"
    settings = read(GOOD.replace('"b:9092"', f'"b:9092", {security}'), SECRET='hidden"\\')
    connection = settings.kafka.connection()

    for shown in (repr(settings), str(settings), settings.model_dump_json(), repr(connection), str(connection)):
        assert "hidden" not in shown
    assert connection.client_options()["sasl_plain_password"] == 'hidden"\\'
    jaas = connection.spark_options()["kafka.sasl.jaas.config"]
    assert jaas == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="me" password="hidden\\"\\\\";'
    )


def test_reading_is_committed_unless_told_otherwise(read: Read) -> None:
    options: dict[str, Any] = read(GOOD).kafka.connection().spark_options()

    assert options["kafka.isolation.level"] == "read_committed"


def test_a_stop_is_asked_for_beside_the_checkpoint(read: Read, tmp_path: Path) -> None:
    settings = read(GOOD.replace("c/orders", f"file://{tmp_path}/orders/"))

    with held(settings.queries[0]) as is_ours:
        assert is_ours
        assert request_stop(settings) == [("orders", tmp_path / "orders.stop")]
    assert (tmp_path / "orders.stop").exists()
    remote = read(GOOD.replace("c/orders", "s3a://bucket/orders"))
    assert stop_request(remote.queries[0]) is None
    with pytest.raises(ConfigError, match="send SIGTERM"):
        request_stop(remote)


def test_a_query_is_one_by_whatever_name_its_checkpoint_is_reached(read: Read, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "orders")
    named, linked = (read(GOOD.replace("c/orders", str(tmp_path / name))) for name in ("orders", "linked"))

    with held(named.queries[0]), held(linked.queries[0]) as is_theirs:
        assert not is_theirs
        assert request_stop(linked) == [("orders", tmp_path / "orders.stop")]


def test_who_looks_whether_a_query_runs_does_not_pass_for_its_process(read: Read, tmp_path: Path) -> None:
    """Neither to another one who looks, nor to a process that starts at that moment."""
    (query,) = read(GOOD.replace("c/orders", str(tmp_path / "orders"))).queries
    assert not is_running(query)
    assert not (tmp_path / "orders.lock").exists()
    with held(query):
        assert is_running(query)

    with (tmp_path / "orders.lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        end = threading.Timer(0.1, lambda: fcntl.flock(look, fcntl.LOCK_UN))
        end.start()
        assert not is_running(query)
        with held(query) as is_ours:
            assert is_ours
        end.join()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("key_format: {type: text}, keys: [a, b]", "text requires a single key column, but keys names 2; use json"),
        ("key_format: {type: none, holds: integer}", "holds requires type text, not none"),
        ("topic: [a, b]", "equal keys of topics ['a', 'b'] would overwrite each other; set topic_column"),
        ("topic_column: origin", "topic_column 'origin' must be in keys, with a key of the events"),
        ("topic_column: id", "topic_column 'id' must be in keys, with a key of the events"),
    ],
)
def test_keys_that_tell_nothing_apart_are_refused(read: Read, query: str, said: str) -> None:
    given = {
        "name": "n",
        "topic": "t",
        "target": "x",
        "keys": "id",
        "checkpoint": "c",
        **yaml.safe_load(f"{{{query}}}"),
    }

    with pytest.raises(ConfigError, match=re.escape(said)):
        read(yaml.safe_dump({"kafka": {"bootstrap": "b"}, "queries": [given]}))


OBSERVED = (
    GOOD
    + """
traces: true
lineage: {url: "http://lineage:5000", api_key: "${KEY}"}
logs: json
"""
)


def test_traces_lineage_and_logs_are_off_unless_asked_for(read: Read) -> None:
    settings = read(GOOD)

    assert (settings.observers(settings.queries[0]), settings.logs) == ([], "text")


def test_a_query_is_observed_with_its_topics_as_inputs_and_the_key_is_kept_secret(read: Read) -> None:
    settings = read(OBSERVED, KEY="S3cret")

    traces, lineage = settings.observers(settings.queries[0])

    assert (type(traces).__name__, settings.logs) == ("Traces", "json")
    assert lineage._inputs == [("kafka://b:9092", "shop.public.orders")]  # type: ignore[attr-defined]
    assert "S3cret" not in repr(settings) + settings.model_dump_json()


@pytest.mark.parametrize(
    ("module", "package", "said"),
    [
        ("otel", "opentelemetry", "traces need opentelemetry-api; run: pip install 'stream-merge[otel]'"),
        ("lineage", "openlineage", "lineage needs openlineage-python; run: pip install 'stream-merge[lineage]'"),
    ],
)
def test_a_package_that_is_missing_is_one_sentence(
    read: Read, monkeypatch: pytest.MonkeyPatch, module: str, package: str, said: str
) -> None:
    monkeypatch.delitem(sys.modules, f"stream_merge.observers.{module}", raising=False)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError) as caught:
        read(OBSERVED, KEY="k")

    (problem,) = caught.value.problems
    assert problem.startswith("[EXTRA_NOT_INSTALLED] ")
    assert problem.endswith(said)


def test_an_address_of_a_lineage_server_is_one(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"\[INVALID_SETTING\].*the url of lineage must be an address"):
        read(f"{GOOD}\nlineage: {{url: lineage}}")


def test_with_json_logs_a_command_writes_json_alone(tmp_path: Path) -> None:
    """Also why it ends; on stdout nothing."""
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("tables/orders", "./job.yaml") + "logs: json")

    done = subprocess.run(
        [sys.executable, "-m", "stream_merge.cli", "run", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, done.stdout, line["event"], line["level"]) == (2, "", "command_failed", "ERROR")
    assert (line["exception"]["type"], line["reason"]) == ("ConfigError", line["exception"]["message"])
