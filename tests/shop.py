"""A shop to try a job on: PostgreSQL, Kafka, Debezium, Prometheus and Alertmanager on this machine, until Ctrl-C.

    make shop ARGS=shop
    make shop ARGS="shop --mariadb"

starts the servers on loopback, creates a table, and writes `job.yaml` into the folder. Table, job, and what Prometheus
and Alertmanager read are the files of `deployments/compose.yaml`; only addresses differ, and with `--mariadb` the
database.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import threading
from pathlib import Path

import services
from services import prometheus

COMPOSE = services.ROOT / "deployments" / "compose"
JOB_ADDRESS = "127.0.0.1:9108"


class Monitoring:
    """Prometheus with the alerts of this project, and the Alertmanager that it tells."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.alertmanager, self.prometheus = (f"127.0.0.1:{services.free_port()}" for _ in range(2))
        text = (COMPOSE / "prometheus.yml").read_text().replace("job:9108", JOB_ADDRESS)
        (folder / "prometheus.yml").write_text(text.replace("alertmanager:9093", self.alertmanager))
        shutil.copy(services.ROOT / "grafana" / "alerts.yaml", folder)
        program = prometheus.program()
        self._servers = {
            self.alertmanager: services.Server(
                [
                    str(prometheus.alertmanager_program()),
                    f"--config.file={prometheus.ALERTMANAGER_FILE}",
                    f"--storage.path={folder / 'alertmanager'}",
                    f"--web.listen-address={self.alertmanager}",
                    "--cluster.listen-address=",
                ],
                folder,
            ),
            self.prometheus: services.Server(
                [
                    str(program),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'prometheus'}",
                    f"--web.listen-address={self.prometheus}",
                ],
                folder,
            ),
        }

    def start(self) -> None:
        for address, server in self._servers.items():
            server.start(lambda address=address: prometheus.is_ready(int(address.rpartition(":")[2])))

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()


class PostgresShop:
    """The table of the composition."""

    topic = "shop.public.orders"

    def __init__(self) -> None:
        self.server = services.Postgres()
        self.client = f"psql -h 127.0.0.1 -p {self.server.port} -U postgres"

    def connector(self, folder: Path) -> dict[str, str]:
        """Create the table; settings of the connector that captures it."""
        self.server.run((COMPOSE / "shop.sql").read_text())
        return services.postgres_connector(self.server, tables="public.orders", **TRUNCATES)

    def job(self, text: str) -> str:
        """The job file of the composition for this database."""
        return text


class MariaDBShop:
    """The same in MariaDB."""

    topic = "shop.shop.orders"

    def __init__(self) -> None:
        self.server = services.MariaDB()
        self.client = f"mariadb -h 127.0.0.1 -P {self.server.port} -u root shop"

    def connector(self, folder: Path) -> dict[str, str]:
        """Create the table; settings of the connector that captures it."""
        self.server.run(
            "CREATE TABLE orders (id bigint PRIMARY KEY, customer text, price decimal(12,2),"
            " at timestamp DEFAULT now());"
            "INSERT INTO orders (id, customer, price) VALUES (1, 'Ada', 9.50), (2, 'Grace', 12.00);"
        )
        return services.mariadb_connector(self.server, folder, tables="shop.orders", **TRUNCATES)

    def job(self, text: str) -> str:
        """The job file of the composition for this database."""
        return text.replace(PostgresShop.topic, self.topic).replace(
            "{type: debezium}", "{type: debezium, database: mariadb}"
        )


TRUNCATES = {"skipped.operations": "none"}
"""By default Debezium tells nobody of a TRUNCATE."""


def job(bootstrap: str) -> str:
    """The job file of the composition, for this machine: its places are beside it."""
    text = (COMPOSE / "job.yaml").read_text().replace("kafka:19092", bootstrap)
    return text.replace("0.0.0.0", "127.0.0.1").replace("/data/", "")


def main(folder: Path, *, mariadb: bool) -> None:
    """Start the servers, say where they are, and wait."""
    reason = services.missing() or (f"{folder} is there already; name a new folder" if folder.exists() else None)
    if reason:
        raise SystemExit(reason)
    folder.mkdir(parents=True)
    broker, database = services.Broker(folder / "kafka"), MariaDBShop() if mariadb else PostgresShop()
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    monitoring = Monitoring(folder / "monitoring")
    with services.running(broker, database.server, monitoring):
        connector = database.connector(folder / "connect")
        with services.running(services.Connect(folder / "connect", broker, connector, schemas=True)):
            (folder / "job.yaml").write_text(database.job(job(broker.bootstrap)))
            print(f"job:        {folder / 'job.yaml'}")
            print(f"database:   {database.client}")
            print(f"broker:     {broker.bootstrap}, topic {database.topic}")
            print(f"alerts:     http://{monitoring.prometheus}/alerts, routed by http://{monitoring.alertmanager}")
            print("Ctrl-C ends all of it", flush=True)
            over.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("shop"))
    parser.add_argument("--mariadb", action="store_true")
    given = parser.parse_args()
    main(given.folder.resolve(), mariadb=given.mariadb)
