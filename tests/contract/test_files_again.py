"""`files` over a folder, a checkpoint or columns that do not fit its settings: one sentence, and nothing is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from typer.testing import CliRunner, Result

from stream_merge import ConfigError
from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared
from stream_merge.jobs.files.run import FilesSettings
from stream_merge.jobs.files.run import run as run_files
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.files.reader import Folder
from stream_merge.testing import target_rows

FILES = "files --source in --format json --keys id --sequence-by lsn --target ./table --checkpoint checkpoint"

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner().invoke(cli.app, line.split())


def test_other_keys_are_refused_though_no_file_is_new(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"id": 1, "lsn": 1, "name": "x"}\n')

    def merge(keys: tuple[str, ...]) -> None:
        settings = FilesSettings(
            folder=Folder(path=str(tmp_path / "in"), format="json"),
            target=TableRef(str(tmp_path / "table")),
            checkpoint=str(tmp_path / "checkpoint"),
            keys=keys,
            sequence_by=("lsn",),
            once=True,
        )
        run_files(settings, console=Console(file=StringIO()), start_session=lambda: spark, metrics_url="nowhere")

    merge(("id",))
    with pytest.raises(ConfigError, match=r"is merged by keys \['id'\], now keys=\['name'\]; use the recorded keys"):
        merge(("name",))


def files_of_one_event(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> str:
    """The command for a folder with a file in it; by whole paths, since Spark works in another folder."""
    monkeypatch.setattr(shared, "local_session", lambda *_, **__: spark)
    Path("in").mkdir()
    Path("in/a.json").write_text('{"id": 1, "lsn": 1, "op": "u"}\n')
    places = {"source in": "source {}/in", "./table": "{}/table", "checkpoint checkpoint": "checkpoint {}/checkpoint"}
    line = FILES
    for short, whole in places.items():
        line = line.replace(short, whole.format(Path.cwd()))
    return f"{line} --once --metrics-port 0"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "--keys idd",
            "--keys names column 'idd', which the source does not have; its columns are .'id', 'lsn', 'op'.$",
        ),
        ("--sequence-by lsnn", "--sequence-by names column 'lsnn', which the source does not have; its columns are "),
        ("--columns id,lsn,nmae", "--columns names column 'nmae', which the source does not have; its columns are "),
        ("--except-columns opp", "--except-columns names column 'opp', which the source does not have; its columns"),
        ("--apply-as-deletes opp='d'", "--apply-as-deletes .*`opp` cannot be resolved"),
        ("--target-filter t.opp='d'", "--target-filter .*`opp` cannot be resolved"),
        ("--schema id|bigit", "--schema 'id bigit' is not a list of columns like 'id BIGINT, name STRING': .*BIGIT"),
        ("--schema idd|bigint,lsn|bigint", "--keys names column 'id', which the source does not have; .*'idd', 'lsn'"),
    ],
)
def test_a_typo_in_a_column_is_one_sentence_and_nothing_of_it_is_kept(
    spark: SparkSession, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, wrong: str, said: str
) -> None:
    """Neither a checkpoint nor, in it, a wrong schema, which the next run would go on with."""
    line = f"{files_of_one_event(spark, monkeypatch)} {wrong}"

    result = CliRunner().invoke(cli.app, [part.replace("|", " ") for part in line.split()])

    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert re.match(rf"stream-merge: \[[A-Z_]+\] {said}", result.stderr), result.stderr
    assert not Path("checkpoint").exists()
    assert not Path("table").exists()


def test_a_checkpoint_of_a_query_into_another_table_is_refused(
    spark: SparkSession, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = files_of_one_event(spark, monkeypatch)
    assert invoke(line).exit_code == 0

    result = invoke(line.replace("/table", "/other"))

    assert result.exit_code == 2
    assert re.match(r"stream-merge: \[TARGET_REPLACED\] query 'other' has merged into '.*table' ", result.stderr)
    assert not Path("other").exists()


def test_a_folder_of_facts_fills_a_table_that_only_grows(
    spark: SparkSession, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the shape's name, without an order of events."""
    line = files_of_one_event(spark, monkeypatch).replace(" --sequence-by lsn", "") + " --shape insert-only"
    assert invoke(line).exit_code == 0
    Path("in/b.json").write_text('{"id": 1, "lsn": 2, "op": "again"}\n{"id": 2, "lsn": 1, "op": "new"}\n')

    result = invoke(line)

    assert (result.exit_code, result.stderr) == (0, "")
    assert target_rows(spark, str(Path("table").resolve())) == [(1, 1, "u"), (2, 1, "new")]
    refused = invoke(line.replace("insert-only", "inserts"))
    assert (refused.exit_code, "'inserts' is not one of changes, insert-only" in refused.output) == (2, True)


CLAUSES = """
- {when: matched, condition: s.op = 'd', then: delete}
- {when: matched, then: update, set: {name: "concat(t.name, '+', s.name)"}}
- {when: not_matched, condition: s.op != 'd', then: insert}
- {when: not_matched_by_source, condition: t.id > 100, then: delete}
"""


def test_a_folder_is_merged_by_clauses_of_one_s_own(
    spark: SparkSession, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, in the words of a job file; what is in quarantine cannot be replayed alone, and says so."""
    line = files_of_one_event(spark, monkeypatch).replace(" --sequence-by lsn", " --except-columns op --clauses c.yaml")
    Path("c.yaml").write_text(CLAUSES)
    Path("in/a.json").write_text('{"id": 1, "name": "one", "op": "u"}\n{"id": 2, "name": "two", "op": "u"}\n')
    Path("in/b.json").write_text('{"id": 101, "name": "far", "op": "u"}\n')
    assert invoke(line).exit_code == 0
    Path("in/c.json").write_text('{"id": 1, "name": "x", "op": "u"}\n{"id": 2, "op": "d"}\n{"id": 3, "op": "d"}\n')

    result = invoke(line)

    assert (result.exit_code, result.stderr) == (0, "")
    assert target_rows(spark, str(Path("table").resolve())) == [(1, "one+x")]
    explained = invoke("explain ./table")
    assert 'keys ["id"], filled as clauses' in explained.output
    assert "must not merge into it: the table is filled as clauses" in explained.output
    Path("in/d.json").write_text('{"id": 7, "name": "new", "op": "u"}\nno JSON\n')
    broken = invoke(line)
    assert (broken.exit_code, "so their rows would count as missing" in broken.stderr) == (3, True)
    assert target_rows(spark, str(Path("table").resolve())) == [(1, "one+x")]
    replayed = invoke(f"{line} --replay-quarantine")
    assert (replayed.exit_code, "are not all rows of" in replayed.stderr) == (2, True)


def test_clauses_that_are_none_are_refused_with_their_places(
    spark: SparkSession, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = files_of_one_event(spark, monkeypatch)
    Path("c.yaml").write_text("- {when: matched, then: insert, on: x}\n- {when: always, then: delete}\n")

    wrong = invoke(f"{line} --clauses c.yaml")
    both = invoke(f"{line} --clauses c.yaml --shape changes")
    absent = invoke(f"{line} --clauses d.yaml")

    assert [wrong.exit_code, both.exit_code, absent.exit_code] == [2, 2, 2]
    assert "[INVALID_SETTING] c.yaml: clauses.1.when: must be 'matched', 'not_matched' or" in wrong.stderr
    assert "[CONFLICTING_SETTINGS] --shape and --clauses" in both.stderr
    assert "clause file 'd.yaml' cannot be read: No such file or directory" in absent.stderr
    assert not Path("table").exists()
