"""What a table's log and quarantine tell of its newest commits."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import history_table
import pytest
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.cli.screens import plots
from stream_merge.cli.screens.report import page, summary
from stream_merge.errors import ConfigError
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.log.live_files import LiveFiles, LocalLog
from stream_merge.tables.table_history import Files, table_history

VECTOR = {"storageType": "u", "pathOrInlineDv": "ab", "offset": 1, "sizeInBytes": 36, "cardinality": 3}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return history_table.made(tmp_path)


def test_a_commit_says_what_became_of_its_batch(table: Path) -> None:
    second = table_history(TableRef(table)).batches[1]

    assert (second.batch_id, second.engine, second.retries) == (1, "driver", 1)
    assert second.conflicts == {"ConcurrentAppendException": 1}
    assert second.fates == {
        "quarantined": 2,
        "collapsed": 1,
        "stale": 1,
        "unaffected": 0,
        "inserted": 5,
        "updated": 1,
        "deleted": 0,
    }
    merge = second.record.metrics["executionTimeMs"] / 1000
    assert second.phases == {"read": 0.25, "prepare": 0.5, "merge": merge}
    assert second.seconds == pytest.approx(0.75 + merge)


def test_files_of_each_version_are_those_of_the_log(table: Path) -> None:
    history = table_history(TableRef(table))
    log = LiveFiles(LocalLog(table / "_delta_log"))

    assert [commit.after for commit in history.commits] == [
        Files.described(list(log.at(commit.record.version).values())) for commit in history.commits
    ]
    assert history.commits[-1].operation == "OPTIMIZE"
    assert history.files.files == 1


def test_deletion_vectors_are_counted_with_their_rows() -> None:
    with_vector = {"path": "a", "size": 10, "deletionVector": VECTOR}

    assert Files.described([with_vector, {"path": "b", "size": 5}]) == Files(2, 15, 1, 3)


def test_of_many_commits_the_newest_are_read(table: Path) -> None:
    history = table_history(TableRef(table), last=2)

    assert [commit.record.version for commit in history.commits] == [5, 6]
    assert history.commits[-1].after == history.files


def test_a_tidied_log_ends_where_its_oldest_commit_is(table: Path) -> None:
    from deltalake import DeltaTable  # noqa: PLC0415

    DeltaTable(str(table)).create_checkpoint()
    for version in range(3):
        (table / "_delta_log" / f"{version:020d}.json").unlink()

    assert [commit.record.version for commit in table_history(TableRef(table)).commits] == [3, 4, 5, 6]


def test_the_quarantine_is_counted_by_reason(table: Path) -> None:
    counts: Counter[str] = Counter()
    for one in table_history(TableRef(table)).quarantined:
        counts[one.reason] += one.events

    assert counts == {"null_key": 2, "undecodable": 1}


def test_commits_of_older_sinks_tell_of_rows_and_of_the_merge_alone(table: Path) -> None:
    oldest = table / "_delta_log" / f"{1:020d}.json"
    actions = [json.loads(line) for line in oldest.read_text().splitlines()]
    (info,) = (action["commitInfo"] for action in actions if "commitInfo" in action)
    ours = {"identity": "q", "batch_id": 0, "role": "target", "engine": "spark", "plan": "", "token": ""}
    info["userMetadata"] = json.dumps({"stream_merge": ours, "user": None})
    oldest.write_text("".join(json.dumps(action, separators=(",", ":")) + "\n" for action in actions))

    commit = table_history(TableRef(table)).batches[0]

    assert sum(commit.fates.values()) == commit.fates["inserted"] == 5
    assert list(commit.phases) == ["merge"]
    assert (commit.retries, commit.conflicts) == (0, {})


def test_the_page_has_numbers_nine_plots_and_the_newest_commits(table: Path) -> None:
    history = table_history(TableRef(table))

    text = page(history)

    assert summary(history).startswith("Version 6; 7 commits from ")
    assert "4 batches of a sink with 40 events, 8 quarantined" in summary(history)
    assert text.count("<figure>") == text.count("<svg ") == text.count("<figcaption>") == 9
    assert text.count("<tr><td>") == 7
    assert 'src="' not in text
    assert "href=" not in text.replace('xlink:href="#', "")


def test_many_commits_share_bars() -> None:
    assert [plots.bar_size(commits) for commits in (0, 1, 100, 101, 10_000)] == [1, 1, 1, 2, 100]


def test_a_table_without_batches_has_a_page(tmp_path: Path) -> None:
    history_table.made(tmp_path, batches=0)

    assert "0 batches of a sink" in page(table_history(TableRef(tmp_path / "orders")))


def test_the_command_writes_the_page_where_it_is_told(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table.parent)

    told = CliRunner().invoke(cli.app, ["report", f"{table}/"])
    elsewhere = CliRunner().invoke(cli.app, ["report", str(table), "--out", "page.html", "--last", "1"])

    assert (told.exit_code, told.output) == (0, "orders-report.html: 7 commits\n")
    assert (elsewhere.exit_code, elsewhere.output) == (0, "page.html: 1 commit\n")
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")


def test_without_the_extra_there_is_a_sentence(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "stream_merge.cli.screens.report")
    monkeypatch.delitem(sys.modules, "stream_merge.cli.screens.plots")

    told = CliRunner().invoke(cli.app, ["report", str(table)])

    assert told.exit_code == 2
    assert told.stderr == (
        "stream-merge: [EXTRA_NOT_INSTALLED] report needs matplotlib; run: pip install 'stream-merge[cli,report]'\n"
    )


def test_without_a_table_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TABLE_NOT_FOUND"):
        table_history(TableRef(tmp_path / "none"))
