"""A customer list that comes whole every day: the table becomes it, and who is gone is flagged.

python examples/full_snapshot.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from stream_merge import ContractError, MergeSink
from stream_merge.session import delta_packages, small_batches
from stream_merge.shapes import Snapshot
from stream_merge.snapshots import merge_versions

EXPORTS = {
    1: [(1, "Ada"), (2, "Ben"), (3, "Cy"), (4, "Di")],
    2: [(1, "Ada"), (2, "Benjamin"), (4, "Di")],
    3: [(1, "Ada")],
}


def main(folder: Path) -> None:
    """Merge two exports; the third lacks too much to be true."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    target = str(folder / "customers")
    sink = MergeSink(
        target=target,
        keys=["id"],
        app_id="customer-export",
        shape=Snapshot(missing={"gone": "true"}, max_delete_share=0.25),
    )

    def next_export(latest: int | None) -> tuple[DataFrame, int] | None:
        version = 1 if latest is None else latest + 1
        if version not in EXPORTS:
            return None
        return spark.createDataFrame(EXPORTS[version], "id long, name string"), version

    try:
        merge_versions(sink, spark, next_export)
    except ContractError as err:
        print(err)

    for row in spark.read.format("delta").load(target).orderBy("id").collect():
        print(row.id, row.name, row.gone)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
