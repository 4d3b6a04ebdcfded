"""One stream for many tables: events are routed by a column, and each table has a sink of its own.

python examples/many_tables.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge import MergeSink, MergeSinks, read_files
from stream_merge.session import delta_packages, small_batches

CHANGES = """\
{"table": "orders", "id": 1, "lsn": 1, "name": "lamp"}
{"table": "customers", "id": 1, "lsn": 2, "name": "Ada"}
{"table": "customers", "id": 1, "lsn": 3, "name": "Ada Lovelace"}
{"table": "parcels", "id": 1, "lsn": 4, "name": "nobody expects it"}
"""


def main(folder: Path) -> None:
    """Merge one file into two tables; an event of a third one goes to a quarantine table."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    (folder / "changes").mkdir(parents=True, exist_ok=True)
    (folder / "changes" / "1.json").write_text(CHANGES)
    tables = {
        name: MergeSink(target=str(folder / name), keys=["id"], sequence_by="lsn", column_list=["id", "lsn", "name"])
        for name in ("orders", "customers")
    }
    unrouted = str(folder / "unrouted")
    sinks = MergeSinks(tables, route_by="table", on_failure="quarantine", quarantine_target=unrouted)

    schema = "table string, id bigint, lsn bigint, name string"
    events = read_files(spark, str(folder / "changes"), format="json", schema=schema)
    stream = events.writeStream.queryName("shop").foreachBatch(sinks)
    stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
    stream.trigger(availableNow=True).start().awaitTermination()

    for name in tables:
        for row in spark.read.format("delta").load(str(folder / name)).collect():
            print(name, row.id, row.name)
    for row in spark.read.format("delta").load(unrouted).collect():
        print("unrouted", row.reasons, row.event)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
