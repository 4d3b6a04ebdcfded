"""Batches outside a stream: with `app_id` a batch that comes again is recognised by its id.

python examples/backfill.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge import MergeSink
from stream_merge.session import delta_packages, small_batches


def main(folder: Path) -> None:
    """Load a table day by day, and one day again; a stream that began earlier is not overwritten."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    sink = MergeSink(target=str(folder / "orders"), keys=["id"], sequence_by="at", app_id="backfill")
    days = {
        20261101: [(1, "2026-11-01 08:00:00", "lamp"), (2, "2026-11-01 09:00:00", "chair")],
        20261102: [(1, "2026-11-02 08:00:00", "desk lamp")],
    }
    for day in (20261101, 20261102, 20261102):  # batch ids of an app_id must grow
        events = spark.createDataFrame(days[day], "id bigint, at string, item string")
        sink(events.selectExpr("id", "cast(at AS timestamp) AS at", "item"), day)
        print(day, sink.last_result.outcome)

    for row in spark.read.format("delta").load(str(folder / "orders")).orderBy("id").collect():
        print(row.id, row.item)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
