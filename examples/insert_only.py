"""Page views that may be delivered twice, into a table that only grows: the first of a key stays.

python examples/insert_only.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeSink
from stream_merge.session import delta_packages, small_batches
from stream_merge.shapes import InsertOnly


def main(folder: Path) -> None:
    """Append two batches that overlap."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    target = str(folder / "views")
    sink = MergeSink(target=target, keys=["view_id"], shape=InsertOnly(), app_id="views")

    def views(*rows: tuple[str, str]) -> DataFrame:
        return spark.createDataFrame(rows, "view_id string, page string")

    for batch_id, batch in enumerate(
        [
            views(("a", "/"), ("b", "/docs"), ("b", "/docs")),
            views(("b", "/docs"), ("c", "/")),
            views(("a", "/"), ("c", "/")),
        ]
    ):
        sink(batch, batch_id)
        print(sink.last_result.outcome, sink.last_result.events)

    for row in spark.read.format("delta").load(target).orderBy("view_id").collect():
        print(row.view_id, row.page)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
