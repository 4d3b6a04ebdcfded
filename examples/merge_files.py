"""A folder of change files into a table: late events, a delete, and a line that cannot be read.

python examples/merge_files.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge import MergeSink, read_files
from stream_merge.session import delta_packages, small_batches

CHANGES = """\
{"id": 1, "lsn": 11, "op": "c", "item": "lamp"}
{"id": 2, "lsn": 12, "op": "c", "item": "chair"}
{"id": 1, "lsn": 14, "op": "u", "item": "desk lamp"}
{"id": 1, "lsn": 13, "op": "u", "item": "late, and overtaken"}
{"id": 2, "lsn": 15, "op": "d", "item": null}
{"id": "three", "lsn": 16, "op": "c", "item": "not a number"}
"""


def main(folder: Path) -> None:
    """Merge the file that is there, then one that comes later."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    source, target = folder / "changes", str(folder / "orders")
    source.mkdir(parents=True, exist_ok=True)
    (source / "1.json").write_text(CHANGES)

    sink = MergeSink(
        target=target, keys=["id"], sequence_by="lsn", apply_as_deletes="op = 'd'", except_column_list=["op"]
    )

    def merge_what_is_there() -> None:
        schema = "id bigint, lsn bigint, op string, item string"
        events = read_files(spark, str(source), format="json", schema=schema)
        stream = events.writeStream.queryName("orders").foreachBatch(sink)
        stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
        stream.trigger(availableNow=True).start().awaitTermination()
        print(sink.last_result.outcome, sink.last_result.events)

    merge_what_is_there()
    (source / "2.json").write_text('{"id": 2, "lsn": 10, "op": "u", "item": "older than the delete"}\n')
    merge_what_is_there()

    for row in spark.read.format("delta").load(target).collect():
        print(row.id, row.item)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
