"""A day's prices merged by clauses of one's own: what rose is kept with its old price, what is gone is marked.

python examples/own_clauses.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeSink
from stream_merge.session import delta_packages, small_batches
from stream_merge.shapes import Clauses, when_matched, when_not_matched, when_not_matched_by_source


def main(folder: Path) -> None:
    """Merge two whole price lists; the second lacks an item and withdraws another."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    target = str(folder / "prices")
    spark.sql(f"CREATE TABLE delta.`{target}` (item string, price int, was int, listed boolean) USING delta")
    sink = MergeSink(
        target=target,
        keys=["item"],
        except_column_list=["note"],
        app_id="prices",
        shape=Clauses(
            [
                when_matched("s.note = 'withdrawn'").delete(),
                when_matched("s.price != t.price").update({"price": "s.price", "was": "t.price", "listed": "true"}),
                when_not_matched().insert({"item": "s.item", "price": "s.price", "listed": "true"}),
                when_not_matched_by_source("t.listed").update({"listed": "false"}),
            ]
        ),
    )

    def prices(*rows: tuple[str, int, str | None]) -> DataFrame:
        return spark.createDataFrame(rows, "item string, price int, note string")

    for batch_id, batch in enumerate(
        [
            prices(("lamp", 40, None), ("chair", 90, None), ("desk", 200, None), ("rug", 70, None)),
            prices(("lamp", 45, None), ("chair", 90, None), ("rug", 70, "withdrawn")),
        ]
    ):
        sink(batch, batch_id)
        print(sink.last_result.outcome, sink.last_result.events)

    for row in spark.read.format("delta").load(target).orderBy("item").collect():
        print(row.item, row.price, row.was, row.listed)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
