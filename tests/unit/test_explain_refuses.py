"""What `stream-merge explain` says where no table's log can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_merge import ConfigError
from stream_merge.tables.explain import explain


@pytest.mark.parametrize(
    ("table", "problem"), [("sales.orders", "is a catalog name"), ("/nowhere/at/all", "there is no Delta table")]
)
def test_what_is_not_a_table_is_one_sentence(table: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        explain(table)


def test_a_log_that_cannot_be_read_is_one_sentence(tmp_path: Path):
    log = tmp_path / "table" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("{broken")

    with pytest.raises(ConfigError, match="cannot be read without Spark"):
        explain(str(tmp_path / "table"))
