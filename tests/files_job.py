"""`stream-merge files --once` over a folder of a test's own, without the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from stream_merge import MergeResult
from stream_merge.jobs.files.run import FilesSettings, run
from stream_merge.shapes import Snapshot
from stream_merge.sources.files.reader import Folder, Format
from stream_merge.testing import target_rows

SCHEMA = "id bigint, name string"
ANY = Snapshot(max_delete_share=1.0)


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
                "target": self.target,
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


class SnapshotJob(Job):
    """`stream-merge files --shape snapshot --once` over a folder of its own."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        super().__init__(spark, root)
        self.put_at = 1_700_000_000

    def settings(self, file_format: Format = "json", **options: Any) -> FilesSettings:
        return super().settings(file_format, **{"shape": ANY, "schema": SCHEMA, **options})

    def put(self, name: str, *lines: str) -> None:
        """Each file a second younger than the one before."""
        path = self.source / name
        path.write_text("".join(f"{line}\n" for line in lines))
        self.put_at += 1
        os.utime(path, (self.put_at, self.put_at))

    def put_folder(self, name: str, files: Mapping[str, str], *, is_whole: bool = True) -> Path:
        """A folder of files with these texts; with `_SUCCESS`, unless it is not whole."""
        folder = self.source / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
        if is_whole:
            (folder / "_SUCCESS").touch()
        return folder
