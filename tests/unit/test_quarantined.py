"""The commands that show what a job could not merge, on a table of the quarantine's columns."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql.pandas.types import to_arrow_schema
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared
from stream_merge.tables.side.quarantine import SCHEMA

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with three quarantined records, two of one kind."""
    nothing = dict.fromkeys(SCHEMA.names)
    rows = [
        {
            **nothing,
            "reasons": ["undecodable"],
            "batch_id": 3,
            "recorded_at": NOW,
            "topic": "orders",
            "partition": 1,
            "offset": offset,
            "raw_key": b"k",
            "raw_value": b'{"op": [\xff',
            "error": "byte 8 is not UTF-8",
        }
        for offset in (7, 9)
    ]
    rows.append({**nothing, "reasons": ["null_key", "null_sequence"], "batch_id": 4, "recorded_at": NOW, "event": "{}"})
    schema = to_arrow_schema(SCHEMA, timezone="UTC")
    write_deltalake(str(tmp_path / "__stream_merge_quarantine_t"), pa.Table.from_pylist(rows, schema=schema))
    file = tmp_path / "job.yaml"
    file.write_text(
        """
kafka: {bootstrap: b}
queries: [{name: orders, topic: orders, target: ./t, keys: id, checkpoint: c}]
"""
    )
    return file


def test_the_list_counts_by_reason_topic_and_partition(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.OUT, "width", 200)
    said = CliRunner().invoke(cli.app, ["quarantine", "list", str(job)])

    assert said.exit_code == 0, said.output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.output.splitlines() if "│" in line]
    assert ["undecodable", "orders", "1", "2", "7-9", "0", "2026-01-02 03:04:05"] in lines
    assert [line[0] for line in lines] == ["null_key", "null_sequence", "undecodable"]
    assert "2 records to replay" in said.output


def test_an_event_is_shown_with_its_bytes_and_the_reason(job: Path) -> None:
    said = CliRunner().invoke(cli.app, ["quarantine", "show", str(job), "--offset", "9"])

    assert said.exit_code == 0, said.output
    assert r'raw_value: {"op": [\xff' in said.output
    assert "error: byte 8 is not UTF-8" in said.output
    assert "offset: 7" not in said.output


def test_a_record_whose_time_python_does_not_have_is_shown(job: Path) -> None:
    """A producer has given microseconds for milliseconds."""
    row = {**dict.fromkeys(SCHEMA.names), "reasons": ["null_key"], "batch_id": 5, "recorded_at": NOW, "offset": 11}
    table = pa.Table.from_pylist([row], schema=to_arrow_schema(SCHEMA, timezone="UTC"))
    at = table.column_names.index("timestamp")
    late = pa.array([1_767_323_045_000_000_000], pa.int64()).cast(table.schema.field(at).type)
    table = table.set_column(at, table.schema.field(at), late)
    write_deltalake(str(job.parent / "__stream_merge_quarantine_t"), table, mode="append")

    said = CliRunner().invoke(cli.app, ["quarantine", "show", str(job), "--offset", "11"])

    assert said.exit_code == 0, said.output
    assert "timestamp: +57974-" in said.output


def test_a_reason_selects(job: Path) -> None:
    said = CliRunner().invoke(cli.app, ["quarantine", "show", str(job), "--reason", "null_key"])

    assert "batch 4, null_key, null_sequence" in said.output
    assert "undecodable" not in said.output


def test_an_empty_quarantine_is_said_to_be_empty(job: Path) -> None:
    job.write_text(job.read_text().replace("/t,", "/other,"))

    said = CliRunner().invoke(cli.app, ["quarantine", "list", str(job)])

    assert (said.exit_code, said.output) == (0, "orders: nothing in quarantine\n")


def test_a_quarantine_that_lies_elsewhere_is_given_by_its_own_path(job: Path) -> None:
    """As --quarantine-target names it."""
    (job.parent / "__stream_merge_quarantine_t").rename(job.parent / "bad")

    listed = CliRunner().invoke(cli.app, ["quarantine", "list", str(job.parent / "bad")])

    assert listed.exit_code == 0, listed.output
    assert "undecodable" in listed.output


def test_a_path_without_a_table_is_no_empty_quarantine(job: Path) -> None:
    """Somebody has mistyped it."""
    write_deltalake(str(job.parent / "clean"), pa.table({"id": [1]}))

    clean, mistyped = (
        CliRunner().invoke(cli.app, ["quarantine", "list", str(job.parent / name)]) for name in ("clean", "claen")
    )

    assert clean.output.endswith("nothing in quarantine\n")
    assert (clean.exit_code, mistyped.exit_code) == (0, 2)
    assert "is not a Delta table" in mistyped.output


def test_a_quarantine_whose_files_are_gone_is_said_in_a_sentence(job: Path) -> None:
    for file in (job.parent / "__stream_merge_quarantine_t").glob("*.parquet"):
        file.unlink()

    said = CliRunner().invoke(cli.app, ["quarantine", "list", str(job)])

    assert said.exit_code == 2
    assert "cannot be read without Spark" in said.output


EVIL = "\x1b]0;owned\x07[/][red]\r\x9b2J\u202e"
"""Commands to a terminal, rich's markup, and what turns the direction of writing."""
HARMLESS = r"\x1b]0;owned\x07[/][red]\r\x9b2J\u202e"


def test_records_and_names_command_no_terminal(job: Path) -> None:
    """What somebody wrote into a topic is shown on one line, as text."""
    row = dict.fromkeys(SCHEMA.names)
    row |= {"reasons": ["undecodable"], "batch_id": 9, "recorded_at": NOW, "topic": EVIL, "partition": 1, "offset": 1}
    row |= {"raw_value": f"{EVIL}\nerror: none".encode(), "error": EVIL}
    table = pa.Table.from_pylist([row], schema=to_arrow_schema(SCHEMA, timezone="UTC"))
    write_deltalake(str(job.parent / "__stream_merge_quarantine_t"), table, mode="append")
    job.write_text(job.read_text().replace("name: orders", f"name: {json.dumps(EVIL)}"))

    said = [
        CliRunner().invoke(cli.app, ["quarantine", *command, str(job)]).output
        for command in (["list"], ["show", "--offset", "1"])
    ]

    assert HARMLESS in said[0]
    assert f"error: {HARMLESS}" in said[1]
    assert rf"raw_value: {HARMLESS}\nerror: none" in said[1]
    assert not set("".join(said)) & {*EVIL} - {*HARMLESS}


def test_a_replay_where_nothing_tells_whether_the_job_runs_wants_a_promise(job: Path) -> None:
    """Before Spark is started: a second writer on an object store may overwrite the first one's commits."""
    job.write_text(job.read_text().replace("checkpoint: c", "checkpoint: s3://bucket/c"))

    said = CliRunner().invoke(cli.app, ["quarantine", "replay", str(job)])

    assert said.exit_code == 2
    assert "stop the job by SIGTERM, then replay with --alone" in " ".join(said.output.split())


def test_a_replay_of_a_job_that_has_not_run_starts_no_spark_and_leaves_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "kafka: {bootstrap: b}\nqueries: [{name: a, topic: a, target: tables/a, keys: id, checkpoint: checkpoints/a}]\n"
    )

    said = CliRunner().invoke(cli.app, ["quarantine", "replay", str(file)])

    assert (said.exit_code, said.output) == (
        0,
        "a: no such record is in quarantine with its bytes and not replayed yet\n",
    )
    assert list(tmp_path.iterdir()) == [file]
