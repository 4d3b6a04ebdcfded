"""Every script in `examples` runs as it stands and prints what it shows; they share the tests' session."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import services
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared

EXAMPLES = Path(__file__).parents[2] / "examples"

Script = Callable[..., list[str]]


@pytest.fixture
def script(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Script:
    """Run a script by its name, as Python would, in a folder of its own; the lines that it prints."""

    def run(name: str, *arguments: str) -> list[str]:
        # What the script's builder says of the session is for a session that it starts itself.
        monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda _: spark)
        monkeypatch.setattr("sys.argv", [name, *arguments, str(tmp_path)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()

    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if f'"{path.name}"' not in here] == []


def test_files(script: Script) -> None:
    first, second, *rows = script("merge_files.py")

    assert first.startswith(
        "committed EventCounts(received=6, quarantined=1, collapsed=3, stale=0, unaffected=1, insert"
    )
    assert second.startswith("no_change EventCounts(received=1, quarantined=0, collapsed=0, stale=1, ")
    assert rows == ["1 desk lamp"]


def test_insert_only(script: Script) -> None:
    first, second, third, *rows = script("insert_only.py")

    assert first.startswith("committed EventCounts(received=3, quarantined=0, collapsed=1, ")
    assert "unaffected=1, inserted=1" in second
    assert third.startswith("no_change")
    assert rows == ["a /", "b /docs", "c /"]


def test_own_clauses(script: Script) -> None:
    first, second, third, *rows = script("own_clauses.py")

    assert first.startswith("committed EventCounts(received=4, ")
    assert "unaffected=2, inserted=0, updated=1, deleted=1" in second
    assert "unaffected=1, inserted=0, updated=2, deleted=0" in third
    assert rows == ["chair 95 90 True", "desk 200 None True", "lamp 45 40 True"]


def test_full_snapshot(script: Script) -> None:
    refused, *rows = script("full_snapshot.py")

    assert "snapshot 3 for " in refused
    assert "would flag 2 of 3 rows (66.7%)" in refused
    assert rows == ["1 Ada None", "2 Benjamin None", "3 Cy True", "4 Di None"]


def test_many_tables(script: Script) -> None:
    *rows, unrouted = script("many_tables.py")

    assert rows == ["orders 1 lamp", "customers 1 Ada Lovelace"]
    assert unrouted.startswith("""unrouted ['unknown_route'] {"table":"parcels",""")


def test_a_chained_table(script: Script) -> None:
    assert script("chained_table.py") == [
        "open: [(1, 'new'), (2, 'new'), (3, 'new')]",
        "open: [(3, 'sent')]",
    ]


def test_metrics(script: Script) -> None:
    plan, *samples = script("watch_metrics.py")

    assert plan.startswith("driver: ")
    assert samples == [
        f'stream_merge_events_total{{fate="{fate}",query="direct",target="orders"}} 1.0'
        for fate in ("quarantined", "collapsed", "inserted")
    ]


def test_a_quarantined_event_that_is_repaired(script: Script) -> None:
    assert script("replay_quarantine.py") == [
        """['null_sequence'] {"id":2,"lsn":null,"item":"chair"}""",
        "1 1 lamp",
        "2 0 chair",
    ]


def test_a_backfill(script: Script) -> None:
    assert script("backfill.py") == [
        "20261101 committed",
        "20261102 committed",
        "20261102 skipped_duplicate",
        "20261031 skipped_duplicate",
        "20261031 committed",
        "1 desk lamp",
        "2 chair",
        "3 rug",
    ]


def test_a_topic(script: Script, broker: services.Broker) -> None:
    result, row = script("kafka_topic.py", broker.bootstrap)

    assert result.startswith(
        "committed EventCounts(received=3, quarantined=0, collapsed=2, stale=0, unaffected=0, insert"
    )
    assert row == "1 lamp 8.00"


def test_the_first_steps_of_the_documentation(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of `Install and first table`, as printed there; the JVM runs in another folder than this test."""
    monkeypatch.setattr(shared, "local_session", lambda *_, **__: spark)
    page = (EXAMPLES.parent / "docs" / "index.md").read_text().split("## 3. ")[1].split("## 4. ")[0]
    blocks = "\n".join(re.findall(r"```\n(.*?)```", page, flags=re.S)).replace("\\\n", "")
    (events,) = re.findall(r"<<'END'\n(.*?)END\n", blocks, flags=re.S)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "1.json").write_text(events)
    merge, explain, quarantine = (
        shlex.split(line, comments=True)[1:] for line in re.findall(r"^stream-merge .*", blocks, flags=re.M)
    )

    def said(*arguments: str) -> str:
        absolute = [str(tmp_path / word) if word == "changes" or "/" in word else word for word in arguments]
        result = CliRunner().invoke(cli.app, absolute)
        assert result.exit_code == 0, result.output
        return result.output

    merged = said(*merge, "--metrics-port", "0")

    assert [tuple(row) for row in spark.read.format("delta").load(str(tmp_path / "tables/orders")).collect()] == [
        (1, "desk lamp", 14)
    ]
    assert "6 events" in merged
    assert "no_change" not in said(*explain)
    assert "null_key" in said(*quarantine)
