"""Metrics in a registry of your own, served where Prometheus can scrape them.

python examples/watch_metrics.py [FOLDER]
"""

import sys
import tempfile
import urllib.request
from pathlib import Path

from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics, MergeSink
from stream_merge.metrics import serve
from stream_merge.session import delta_packages, small_batches


def main(folder: Path) -> None:
    """Merge a batch, then read what Prometheus would."""
    spark = delta_packages(small_batches(SparkSession.builder)).getOrCreate()
    registry = CollectorRegistry()
    sink = MergeSink(
        target=str(folder / "orders"), keys=["id"], sequence_by="lsn", metrics=MergeMetrics(registry), app_id="example"
    )
    schema = "id bigint, lsn bigint, item string"
    sink(spark.createDataFrame([(1, 1, "lamp"), (1, 2, "desk lamp"), (None, 3, "nobody's")], schema), 0)

    result = sink.last_result
    print(f"{result.engine}: {result.plan}")
    with serve(port=0, registry=registry) as server:  # 0: a free port; a job takes a fixed one
        text = urllib.request.urlopen(server.url, timeout=10).read().decode()
    for line in text.splitlines():
        if line.startswith("stream_merge_events_total") and not line.endswith(" 0.0"):
            print(line)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
