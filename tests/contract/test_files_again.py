"""A folder that was merged before, by a command with other settings."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from stream_merge import ConfigError
from stream_merge.files.reader import Folder
from stream_merge.files.run import FilesSettings
from stream_merge.files.run import run as run_files


def test_other_keys_are_refused_though_no_file_is_new(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"id": 1, "lsn": 1, "name": "x"}\n')

    def merge(keys: tuple[str, ...]) -> None:
        settings = FilesSettings(
            folder=Folder(path=str(tmp_path / "in"), format="json"),
            target=str(tmp_path / "table"),
            checkpoint=str(tmp_path / "checkpoint"),
            keys=keys,
            sequence_by=("lsn",),
            once=True,
        )
        run_files(settings, console=Console(file=StringIO()), start_session=lambda: spark, metrics_url="nowhere")

    merge(("id",))
    with pytest.raises(ConfigError, match=r"is merged by keys \['id'\], now keys=\['name'\]; use the recorded keys"):
        merge(("name",))
