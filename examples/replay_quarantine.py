"""Events that broke the contract: looked at in the quarantine table, repaired, and merged after all.

    python examples/replay_quarantine.py [FOLDER]

Records of topics and files that could not be read are replayed by commands: `stream-merge quarantine replay job.yaml`,
`stream-merge files … --replay-quarantine`.
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge import MergeSink
from stream_merge.session import delta_packages, small_batches

SCHEMA = "id bigint, lsn bigint, item string"


def main(folder: Path) -> None:
    """A batch with an event that has no sequence, and the same event with one."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    target, quarantine = str(folder / "orders"), str(folder / "__stream_merge_quarantine_orders")
    sink = MergeSink(target=target, keys=["id"], sequence_by="lsn", app_id="example")
    sink(spark.createDataFrame([(1, 1, "lamp"), (2, None, "chair")], SCHEMA), 0)

    broken = spark.read.format("delta").load(quarantine).where(F.array_contains("reasons", "null_sequence"))
    for row in broken.collect():
        print(row.reasons, row.event)

    events = broken.select(F.from_json("event", SCHEMA).alias("event")).select("event.*")
    # Whatever repairs them. An event that is older than the stored row changes nothing, so 0 is on the safe side.
    # Batch ids of an app_id must grow, so a repair has an app_id of its own.
    repair = MergeSink(target=target, keys=["id"], sequence_by="lsn", app_id="repair of 24 November")
    repair(events.withColumn("lsn", F.coalesce("lsn", F.lit(0).cast("bigint"))), 0)

    for row in spark.read.format("delta").load(target).orderBy("id").collect():
        print(row.id, row.lsn, row.item)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
