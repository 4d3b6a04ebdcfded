"""A table that follows another one: the change data feed of the first is the change stream of the second.

    python examples/chained_table.py [FOLDER]

A target's feed is on unless you switch it off. `_commit_version` orders the changes of a key.
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge import MergeSink
from stream_merge.session import delta_packages, small_batches


def main(folder: Path) -> None:
    """Two batches into the first table, each followed by the second table."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    orders, open_orders = str(folder / "orders"), str(folder / "open_orders")
    first = MergeSink(target=orders, keys=["id"], sequence_by="lsn", apply_as_deletes="op = 'd'", app_id="example")
    second = MergeSink(
        target=open_orders,
        keys=["id"],
        sequence_by="_commit_version",
        # An order that is paid leaves the second table as if it had been deleted.
        apply_as_deletes="_change_type = 'delete' OR state = 'paid'",
        column_list=["id", "state"],
    )

    def follow() -> None:
        feed = spark.readStream.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
        changes = feed.load(orders).where(F.col("_change_type") != "update_preimage")
        stream = changes.writeStream.queryName("open_orders").foreachBatch(second)
        stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
        stream.trigger(availableNow=True).start().awaitTermination()
        rows = spark.read.format("delta").load(open_orders).orderBy("id").collect()
        print("open:", [(row.id, row.state) for row in rows])

    schema = "id bigint, lsn bigint, op string, state string"
    first(spark.createDataFrame([(1, 1, "c", "new"), (2, 2, "c", "new"), (3, 3, "c", "new")], schema), 0)
    follow()
    first(spark.createDataFrame([(1, 4, "u", "paid"), (2, 5, "d", None), (3, 6, "u", "sent")], schema), 1)
    follow()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
