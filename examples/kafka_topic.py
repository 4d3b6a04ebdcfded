"""A topic of Debezium's envelopes into a table, by a job in your own program.

    python examples/kafka_topic.py BROKER:PORT [FOLDER]

It writes a few events to a new topic first, as Debezium would. `stream-merge run` does the same without a program.
"""

import json
import sys
import tempfile
import uuid
from pathlib import Path

from kafka import KafkaAdminClient, KafkaProducer
from pyspark.sql import SparkSession

from stream_merge.jobs.kafka import load, run
from stream_merge.session import delta_packages, kafka_packages, small_batches

JOB = """
kafka: {{bootstrap: "{bootstrap}"}}
queries:
  - name: orders
    topic: {topic}
    value_format:
      type: debezium
      columns: {{id: bigint, item: text, price: "numeric(10,2)"}}
      decimal_handling_mode: string
    target: ./orders
    keys: id
    checkpoint: checkpoint
"""


def write_events(bootstrap: str, topic: str) -> None:
    """An insert, an update that comes late, and the update that overtook it."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    admin.close()
    producer = KafkaProducer(bootstrap_servers=bootstrap)
    for lsn, op, price in ((100, "c", "9.50"), (300, "u", "8.00"), (200, "u", "9.00")):
        after = {"id": 1, "item": "lamp", "price": price}
        source = {"lsn": lsn, "ts_ms": 1_700_000_000_000, "snapshot": "false"}
        value = {"op": op, "before": None, "after": after, "source": source}
        producer.send(topic, key=json.dumps({"id": 1}).encode(), value=json.dumps(value).encode())
    producer.close()


def main(bootstrap: str, folder: Path) -> None:
    """Write the events, merge what is there, print the table."""
    spark = delta_packages(kafka_packages(small_batches(SparkSession.builder))).getOrCreate()
    folder.mkdir(parents=True, exist_ok=True)
    topic = f"example.{uuid.uuid4()}"
    write_events(bootstrap, topic)
    (folder / "job.yaml").write_text(JOB.format(bootstrap=bootstrap, topic=topic))

    done = run(load(folder / "job.yaml"), spark, once=True)  # without once: until `stopping` is set
    for name, error in done.failures.items():
        print(name, "failed:", error)
    for result in done.results.get("orders", ()):
        print(result.outcome, result.events)
    for row in spark.read.format("delta").load(str(folder / "orders")).collect():
        print(row.id, row.item, row.price)


if __name__ == "__main__":
    _, broker, *folder = sys.argv
    main(broker, Path(*folder or [tempfile.mkdtemp()]))
