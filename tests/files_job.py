"""`stream-merge files --shape snapshot --once` over a folder of a test's own, without the command line."""

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
from stream_merge.sources.files.reader import Folder
from stream_merge.testing import target_rows

SCHEMA = "id bigint, name string"
ANY = Snapshot(max_delete_share=1.0)


class Job:
    """`stream-merge files --shape snapshot --once` over a folder of its own."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.source = root / "in"
        self.source.mkdir()
        self.target = str(root / "customers")
        self.checkpoint = str(root / "checkpoint")
        self.put_at = 1_700_000_000

    def settings(self, **options: Any) -> FilesSettings:
        return FilesSettings(
            **{
                "folder": Folder(path=str(self.source), format="json"),
                "target": self.target,
                "checkpoint": self.checkpoint,
                "keys": ("id",),
                "shape": ANY,
                "schema": SCHEMA,
                "once": True,
                **options,
            }
        )

    def __call__(self, **options: Any) -> list[MergeResult]:
        return run(
            self.settings(**options),
            console=Console(file=StringIO(), width=200),
            start_session=lambda: self.spark,
            metrics_url="nowhere",
        )

    def put(self, name: str, *lines: str) -> None:
        """Each file a second younger than the one before."""
        path = self.source / name
        path.write_text("".join(f"{line}\n" for line in lines))
        self.put_at += 1
        os.utime(path, (self.put_at, self.put_at))

    def rows(self) -> list[tuple[Any, ...]]:
        return target_rows(self.spark, self.target)

    def put_folder(self, name: str, files: Mapping[str, str], *, is_whole: bool = True) -> Path:
        """A folder of files with these texts; with `_SUCCESS`, unless it is not whole."""
        folder = self.source / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
        if is_whole:
            (folder / "_SUCCESS").touch()
        return folder
