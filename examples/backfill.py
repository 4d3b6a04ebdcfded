"""Batches outside a stream: with `app_id` a batch that comes again is recognised by its id.

One with an id below the last one is taken for one that came before and skipped, with a warning: load older days under
an `app_id` of their own. In whatever order they come, the newest event of a key wins.

python examples/backfill.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge import MergeSink
from stream_merge.session import delta_packages, small_batches


def main(folder: Path) -> None:
    """Load a table day by day, one day again, and an older one behind them."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    days = {
        20261031: [(2, "2026-10-31 09:00:00", "stool"), (3, "2026-10-31 10:00:00", "rug")],
        20261101: [(1, "2026-11-01 08:00:00", "lamp"), (2, "2026-11-01 09:00:00", "chair")],
        20261102: [(1, "2026-11-02 08:00:00", "desk lamp")],
    }

    def load(day: int, app_id: str) -> None:
        events = spark.createDataFrame(days[day], "id bigint, at string, item string")
        sink = MergeSink(target=str(folder / "orders"), keys=["id"], sequence_by="at", app_id=app_id)
        sink(events.selectExpr("id", "cast(at AS timestamp) AS at", "item"), day)
        print(day, sink.last_result.outcome)

    for day in (20261101, 20261102, 20261102):
        load(day, "backfill")
    load(20261031, "backfill")
    load(20261031, "backfill of October")

    for row in spark.read.format("delta").load(str(folder / "orders")).orderBy("id").collect():
        print(row.id, row.item)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
