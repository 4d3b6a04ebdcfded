"""A shop to try a job on: PostgreSQL, Kafka and Debezium on this machine, until Ctrl-C.

    make shop ARGS=shop

starts the servers on loopback, creates a table, and writes `job.yaml` into the folder.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import services

SCHEMA = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer text, price numeric(12,2), at timestamptz DEFAULT now());
ALTER TABLE orders REPLICA IDENTITY FULL;
INSERT INTO orders (id, customer, price) VALUES (1, 'Ada', 9.50), (2, 'Grace', 12.00);
"""
JOB = """\
kafka: {{bootstrap: "{bootstrap}"}}
queries:
  - name: orders
    topic: shop.public.orders
    value_format: {{type: debezium}}
    target: tables/orders
    keys: id
    checkpoint: checkpoints/orders
"""


def main(folder: Path) -> None:
    """Start the servers, say where they are, and wait."""
    reason = services.missing() or (f"{folder} is there already; name a new folder" if folder.exists() else None)
    if reason:
        raise SystemExit(reason)
    folder.mkdir(parents=True)
    broker, postgres = services.Broker(folder / "kafka"), services.Postgres()
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with services.running(broker, postgres):
        postgres.run(SCHEMA)
        # By default Debezium tells nobody of a TRUNCATE.
        connector = services.postgres_connector(postgres, tables="public.orders", **{"skipped.operations": "none"})
        with services.running(services.Connect(folder / "connect", broker, connector, schemas=True)):
            (folder / "job.yaml").write_text(JOB.format(bootstrap=broker.bootstrap))
            print(f"job:        {folder / 'job.yaml'}")
            print(f"database:   psql -h 127.0.0.1 -p {postgres.port} -U postgres")
            print(f"broker:     {broker.bootstrap}, topic shop.public.orders")
            print("Ctrl-C ends all of it", flush=True)
            over.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "shop").resolve())
