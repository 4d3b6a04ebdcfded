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
    """Merge three whole price lists; the second lacks an item, which comes back, and withdraws another."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    target = str(folder / "prices")
    columns = "item string, price int, was int, listed boolean"
    spark.sql(f"CREATE TABLE IF NOT EXISTS delta.`{target}` ({columns}) USING delta")
    sink = MergeSink(
        target=target,
        keys=["item"],
        except_column_list=["note"],
        app_id="prices",
        shape=Clauses(
            [
                when_matched("s.note = 'withdrawn'").delete(),
                when_matched("NOT s.price <=> t.price").update(
                    {"price": "s.price", "was": "t.price", "listed": "true"}
                ),
                when_matched("NOT t.listed").update({"listed": "true"}),
                when_not_matched("NOT s.note <=> 'withdrawn'").insert(
                    {"item": "s.item", "price": "s.price", "listed": "true"}
                ),
                when_not_matched_by_source("t.listed").update({"listed": "false"}),
            ]
        ),
    )

    def prices(*rows: tuple[str, int, str | None]) -> DataFrame:
        return spark.createDataFrame(rows, "item string, price int, note string")

    days = {  # ids of an app_id must grow: one that is not above the last is skipped
        20261101: prices(("lamp", 40, None), ("chair", 90, None), ("desk", 200, None), ("rug", 70, None)),
        20261102: prices(("lamp", 45, None), ("chair", 90, None), ("rug", 70, "withdrawn"), ("vase", 30, "withdrawn")),
        20261103: prices(("lamp", 45, None), ("chair", 95, None), ("desk", 200, None)),
    }
    for day, batch in days.items():
        sink(batch, day)
        print(sink.last_result.outcome, sink.last_result.events)

    for row in spark.read.format("delta").load(target).orderBy("item").collect():
        print(row.item, row.price, row.was, row.listed)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
