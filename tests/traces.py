"""What a batch leaves behind: the commits in a table's log, the jobs of a JVM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disk import on_disk
from pyspark.sql import SparkSession

USER_METADATA_CONF = "spark.databricks.delta.commitInfo.userMetadata"


def commits(table: str | Path) -> list[list[dict[str, Any]]]:
    """The actions of each version."""
    log = sorted((on_disk(str(table)) / "_delta_log").glob("*[0-9].json"))
    return [[json.loads(line) for line in commit.read_text().splitlines()] for commit in log]


def transactions(table: str | Path) -> list[list[tuple[str, int]]]:
    """The transaction ids of each version."""
    return [[(a["txn"]["appId"], a["txn"]["version"]) for a in version if "txn" in a] for version in commits(table)]


def jobs_so_far(spark: SparkSession) -> int:
    """Spark jobs that this JVM has run."""
    jobs: int = spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs()
    return jobs


def collectors(session: SparkSession) -> set[str]:
    """What the JVM calls its collectors."""
    beans = session.sparkContext._jvm.java.lang.management.ManagementFactory.getGarbageCollectorMXBeans()
    return {str(bean.getName()) for bean in beans}


def user_metadata(table: str | Path) -> list[str | None]:
    """The user metadata of each version."""
    return [a["commitInfo"].get("userMetadata") for version in commits(table) for a in version if "commitInfo" in a]
