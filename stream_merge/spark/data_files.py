"""The data files of a table as Delta's JVM lists them, with the rows that deletion vectors have taken out of each.

Through classes that are not public API, read and run on Spark 4.2.0 with Delta 4.4.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file of a table's newest version."""

    partition: str
    """Its partition's values as text, to tell one from another."""
    bytes: int
    deleted_share: float
    """Rows that a deletion vector has taken out, of all rows in the file."""
    is_clustered: bool
    """Whether OPTIMIZE has clustered it before."""


def data_files(session: SparkSession, snapshot: Any) -> list[DataFile]:
    """The files of one of Delta's own snapshots. Cost: one Spark job over the log."""
    rows = DataFrame(snapshot.allFiles().toDF(), session).selectExpr(
        "to_json(partitionValues) AS partition",
        "size",
        "coalesce(deletionVector.cardinality, 0) AS deleted",
        "get_json_object(stats, '$.numRecords') AS records",
        "clusteringProvider IS NOT NULL AS is_clustered",
    )
    return [
        DataFile(
            partition=row["partition"] or "",
            bytes=int(row["size"]),
            deleted_share=_share(row["deleted"], row["records"]),
            is_clustered=row["is_clustered"],
        )
        for row in rows.collect()
    ]


def _share(deleted: int, records: str | None) -> float:
    """Without a count of its rows a file with a vector counts as full of removed ones."""
    return min(1.0, deleted / int(records)) if records else float(deleted > 0)
