"""What a Delta table's log says at one version, whoever has read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pyspark.sql.types import StructType


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSnapshot:
    """One version of a Delta table."""

    table_id: str
    version: int
    location: str
    schema: StructType
    partition_columns: tuple[str, ...]
    properties: Mapping[str, str]
    files: int | None
    """Number of data files, where the log tells it without a Spark job."""
    transaction: Callable[[str], int | None] = field(repr=False)
    """The highest batch id recorded for an application id, or None."""
    read_by: str = "spark"
    """Who read the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """One commit, from the table's history."""

    version: int
    user_metadata: str | None
    metrics: Mapping[str, int]
    """Numbers of the operation, under the names of Delta's MERGE."""
