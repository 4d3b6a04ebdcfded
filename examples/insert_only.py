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
    """Append three hours that overlap."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    target = str(folder / "views")
    sink = MergeSink(target=target, keys=["view_id"], shape=InsertOnly(), app_id="views")

    def views(*rows: tuple[str, str]) -> DataFrame:
        return spark.createDataFrame(rows, "view_id string, page string")

    hours = {  # ids of an app_id must grow: one that is not above the last is skipped
        2026112408: views(("a", "/"), ("b", "/docs"), ("b", "/docs")),
        2026112409: views(("b", "/docs"), ("c", "/")),
        2026112410: views(("a", "/"), ("c", "/")),
    }
    for hour, batch in hours.items():
        sink(batch, hour)
        print(sink.last_result.outcome, sink.last_result.events)

    for row in spark.read.format("delta").load(target).orderBy("view_id").collect():
        print(row.view_id, row.page)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
