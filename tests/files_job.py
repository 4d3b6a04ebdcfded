"""`stream-merge files --once` over a folder of a test's own, without the command line."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from stream_merge import MergeResult
from stream_merge.jobs.files.run import FilesSettings, run
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.files.reader import Folder, Format
from stream_merge.testing import target_rows

SCHEMA = "id bigint, name string"


class Job:
    """`stream-merge files --once` over a folder of its own."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.source = root / "in"
        self.source.mkdir()
        self.target = str(root / "customers")
        self.checkpoint = str(root / "checkpoint")
        self.said = ""

    def settings(self, file_format: Format = "json", **options: Any) -> FilesSettings:
        return FilesSettings(
            **{
                "folder": Folder(path=str(self.source), format=file_format),
                "target": TableRef(self.target),
                "checkpoint": self.checkpoint,
                "keys": ("id",),
                "once": True,
                **options,
            }
        )

    def __call__(self, file_format: Format = "json", **options: Any) -> list[MergeResult]:
        console = Console(file=StringIO(), width=200)
        settings = self.settings(file_format, **options)
        try:
            return run(settings, console=console, start_session=lambda: self.spark, metrics_url="nowhere")
        finally:
            self.said = console.file.getvalue()

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        return target_rows(self.spark, self.target, *columns)
