"""Write an archive of the classes that a JVM with Spark and Delta loads, for the JVMs that tests start.

A JVM that maps it (class data sharing, JEP 350) starts Spark and merges its first batch in about half the time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import scenario
from pyspark import SparkContext

from stream_merge.session import local_session
from stream_merge.testing import change_rows


def main() -> None:
    """Merge on both engines, one batch of them from a stream; the JVM writes the archive when it ends."""
    archive = Path(sys.argv[1])
    unfinished = archive.with_suffix(".part")
    archive.parent.mkdir(parents=True, exist_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={unfinished} -XX:TieredStopAtLevel=1 -Xlog:disable"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        session = local_session("classes", cores=2, memory="1g", confs={"spark.sql.warehouse.dir": folder})
        scenario.write_files(work / "source", scenario.BATCHES[:1])
        driver, spark = (str(work / engine) for engine in ("driver", "spark"))
        scenario.stream(session, work / "source", work / "checkpoint", scenario.sink(driver))
        scenario.sink(spark, engine="spark")(scenario.events(session, scenario.BATCHES[0]), 0)
        scenario.sink(spark, engine="spark")(scenario.events(session, scenario.BATCHES[1]), 1)
        change_rows(session, spark)
        gateway: Any = SparkContext._gateway
        session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # PySpark's JVM ends with its standard input
        gateway.proc.wait()
    unfinished.replace(archive)


if __name__ == "__main__":
    main()
