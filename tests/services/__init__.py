"""Real servers for tests: each started on loopback and free ports, and ended by its own process id."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from stream_merge.spark import versions

ROOT = Path(__file__).parents[2]
SPARK_JARS = Path(os.environ.get("STREAM_MERGE_JARS") or ROOT / ".jars" / "spark")
SERVICE_JARS = ROOT / ".jars" / "services"
_START_SECONDS = 90
_STOP_SECONDS = 30


def missing() -> str | None:
    """Why the servers cannot be started here, or None."""
    if not (SERVICE_JARS / ".copied").exists() or not (SPARK_JARS / ".copied").exists():
        return "the jars of Kafka and its servers are not there; 'make test-all' gets them"
    if not jars_are_of_this_spark():
        return f"the jars in {SPARK_JARS} are of another Spark than {pyspark.__version__}"
    return None


def jars_are_of_this_spark() -> bool:
    """Whether what `make` has fetched for Spark belongs to the PySpark that runs; jars of versions are never mixed."""
    return any(SPARK_JARS.glob(f"{versions.OWN.delta_jar}-*.jar"))


def need() -> None:
    """Skip the test, with the reason, where the servers cannot be started."""
    reason = missing()
    if reason:
        pytest.skip(reason)


def tell_hadoop(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Let a running Spark know of settings for a store, without a word on any command line."""
    context: Any = spark.sparkContext
    hadoop = context._jsc.hadoopConfiguration()
    for name, value in settings.items():
        hadoop.set(name, value)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until(done: Callable[[], bool], what: str, *, seconds: float = _START_SECONDS) -> None:
    """Ask again and again; fail with what was waited for."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            msg = f"{what} within {seconds} s"
            raise TimeoutError(msg)
        time.sleep(0.2)


class Server:
    """A process of its own, with its output in a file."""

    def __init__(
        self, command: list[str], folder: Path, *, user: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._folder = folder
        self._user = user
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return (self._folder / "output.log").read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, is_up: Callable[[], bool]) -> None:
        with (self._folder / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=self._user,
                env=self._environment,
            )

        def up() -> bool:
            if not self.is_running:
                msg = f"{self._command[0]} ended by itself: {self.output[-2000:]}"
                raise AssertionError(msg)
            return is_up()

        wait_until(up, f"{' '.join(self._command)[:80]} is up")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        if self.is_running:
            os.killpg(self._process.pid, how)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def java(memory: str, *args: str) -> list[str]:
    home = os.environ.get("JAVA_HOME")
    program = f"{home}/bin/java" if home else "java"
    return [program, f"-Xmx{memory}", "-XX:TieredStopAtLevel=1", "-cp", f"{SERVICE_JARS}/*", *args]


def command_lines() -> list[bytes]:
    """Of every process of this machine, as `ps` shows them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes())
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


class Broker:
    """A Kafka 4.1 broker, its own controller.

    Args:
        folder: its own.
        settings: more of them, or others.
        listeners: security protocols to listen with beside PLAINTEXT; `bootstraps` says where.
    """

    def __init__(
        self, folder: Path, *, settings: Mapping[str, str] | None = None, listeners: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self.bootstraps = {protocol: f"127.0.0.1:{free_port()}" for protocol in listeners}
        controller = free_port()
        places = ",".join(
            f"{name}://{place}" for name, place in {"PLAINTEXT": self.bootstrap, **self.bootstraps}.items()
        )
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"{places},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": places,
            "listener.security.protocol.map": ",".join(
                ("CONTROLLER:PLAINTEXT", *(f"{name}:{name}" for name in ("PLAINTEXT", *listeners)))
            ),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(folder / "log"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "message.max.bytes": str(12 * 2**20),
            "log.cleaner.backoff.ms": "100",
            "auto.create.topics.enable": "false",
            **(settings or {}),
        }
        properties = folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
        identity = str(uuid.uuid4()).replace("-", "")[:22]
        formatting = java("256m", "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(properties))
        subprocess.run(formatting, check=True, capture_output=True)
        self._server = Server(java("512m", "kafka.Kafka", str(properties)), folder)

    def start(self) -> None:
        self._server.start(lambda: _listens(self.port) and "Kafka Server started" in self._server.output)

    def stop(self) -> None:
        self._server.stop()

    def kill(self) -> None:
        self._server.stop(signal.SIGKILL)


class Postgres:
    """A PostgreSQL server with logical replication, owned by an unprivileged user where this one is root.

    Its data are gone when it has stopped.
    """

    def __init__(self) -> None:
        self.port = free_port()
        # Not in a test's folder: pytest makes those private to root, now and again while others run.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="stream-merge-postgres-"))
        found = subprocess.run(
            [str(ROOT / "deployments" / "setup.sh"), "postgres"], check=True, capture_output=True, text=True
        )
        self._bin = Path(found.stdout.strip())
        self._user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        self._data = folder / "data"
        if os.getuid() == 0:
            shutil.chown(folder, self._user)
        self._as_owner("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(folder),
            "wal_level": "logical",
            "fsync": "off",
        }
        command = [str(self._bin / "postgres"), "-D", str(self._data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        self._server = Server(command, folder, user=self._user if os.getuid() == 0 else None)

    def start(self) -> None:
        self._server.start(lambda: _listens(self.port) and "ready to accept connections" in self._server.output)

    def stop(self) -> None:
        self._server.stop(signal.SIGINT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, statements: str, *, database: str = "postgres") -> str:
        """Run SQL; what it answers, unaligned, without headers."""
        command = [str(self._bin / "psql"), "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", database]
        done = subprocess.run(
            [*command, "-v", "ON_ERROR_STOP=1", "-qAt"], input=statements, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def in_open_transaction(self, statements: str) -> Iterator[None]:
        """What SQL has written, not committed before the end."""
        command = [str(self._bin / "psql"), "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        options = ["-v", "ON_ERROR_STOP=1", "-qAt"]
        with subprocess.Popen(
            [*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as session:
            if session.stdin is None or session.stdout is None:
                raise AssertionError
            session.stdin.write(f"BEGIN; {statements} SELECT 'written';\n")
            session.stdin.flush()
            assert session.stdout.readline() == "written\n"
            yield
            session.stdin.write("COMMIT;\n")
            session.stdin.close()
            assert session.wait(60) == 0

    def rows(self, query: str, *, database: str = "postgres") -> list[dict[str, Any]]:
        """The rows of a query, as PostgreSQL's own JSON."""
        answer = self.run(f"SELECT row_to_json(q) FROM ({query}) q;", database=database)
        return [json.loads(line) for line in answer.splitlines()]

    def _as_owner(self, program: str, *args: str) -> None:
        user = self._user if os.getuid() == 0 else None
        subprocess.run([str(self._bin / program), *args], check=True, capture_output=True, user=user, cwd=self._folder)


class MariaDB:
    """A MariaDB server with a binlog of whole rows, and a database `shop`. Its data are gone when it has stopped."""

    def __init__(self) -> None:
        self.port = free_port()
        # A path for a socket has 107 bytes at most, and pytest makes a test's folder private to root.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="stream-merge-mariadb-"))
        program = subprocess.run(
            [str(ROOT / "deployments" / "setup.sh"), "mariadb"], check=True, capture_output=True, text=True
        ).stdout.strip()
        data = ["--no-defaults", f"--datadir={folder / 'data'}", f"--user={pwd.getpwuid(os.getuid()).pw_name}"]
        install = ["mariadb-install-db", *data, "--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run(install, check=True, capture_output=True)
        options = {
            "port": str(self.port),
            "bind-address": "127.0.0.1",
            "socket": str(folder / "socket"),
            "pid-file": str(folder / "pid"),
            "server-id": "7",
            "log-bin": "binlog",
            "binlog-format": "ROW",
            "binlog-row-image": "FULL",
            "character-set-server": "utf8mb4",
            "sql-mode": "STRICT_ALL_TABLES",
            "default-time-zone": "+00:00",
            "innodb-flush-log-at-trx-commit": "0",
            "innodb-buffer-pool-size": "64M",
        }
        command = [program, *data, *(f"--{name}={value}" for name, value in options.items()), "--skip-name-resolve"]
        self._server = Server(command, folder)

    def start(self) -> None:
        self._server.start(lambda: _listens(self.port) and "ready for connections" in self._server.output)
        self.run("CREATE USER IF NOT EXISTS root@'127.0.0.1'; GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION")
        self.run("CREATE DATABASE IF NOT EXISTS shop")

    def stop(self) -> None:
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, statements: str) -> str:
        """Run SQL in the database; what it answers, a row a line, without headers."""
        command = ["mariadb", "--no-defaults", "-u", "root", f"--socket={self._folder / 'socket'}", "-N", "-B", "-r"]
        if "CREATE DATABASE" not in statements and "CREATE USER" not in statements:
            command += ["shop"]
        done = subprocess.run(
            [*command, "--default-character-set=utf8mb4"],
            input=statements,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(self, columns: Mapping[str, str], table: str) -> list[dict[str, Any]]:
        """The rows of a table as MariaDB's own JSON: name of each column -> expression."""
        pairs = ", ".join(f"'{name}', {expression}" for name, expression in columns.items())
        return [json.loads(line) for line in self.run(f"SELECT JSON_OBJECT({pairs}) FROM {table}").splitlines()]


class Connect:
    """Kafka Connect with one connector of Debezium."""

    def __init__(self, folder: Path, broker: Broker, connector: Mapping[str, str], *, schemas: bool) -> None:
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        converter = "org.apache.kafka.connect.json.JsonConverter"
        worker = {
            "bootstrap.servers": broker.bootstrap,
            "key.converter": converter,
            "value.converter": converter,
            "key.converter.schemas.enable": str(schemas).lower(),
            "value.converter.schemas.enable": str(schemas).lower(),
            "value.converter.replace.null.with.default": "false",
            "offset.storage.file.filename": str(folder / "offsets.dat"),
            "offset.flush.interval.ms": "1000",
            "listeners": f"HTTP://127.0.0.1:{self.port}",
            "plugin.discovery": "service_load",
            "producer.max.request.size": str(12 * 2**20),
        }
        files = {"connect.properties": worker, "connector.properties": dict(connector)}
        for name, settings in files.items():
            (folder / name).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = java("512m", "org.apache.kafka.connect.cli.ConnectStandalone", *files)
        self._name = connector["name"]
        self._server = Server(command, folder)

    def start(self) -> None:
        self._server.start(self._is_running)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self._server.stop(how)

    def _is_running(self) -> bool:
        address = f"http://127.0.0.1:{self.port}/connectors/{self._name}/status"
        try:
            with urllib.request.urlopen(address, timeout=2) as answer:
                status = json.load(answer)
        except (OSError, urllib.error.URLError, ValueError):
            return False
        states = [status["connector"]["state"], *(task["state"] for task in status["tasks"])]
        if "FAILED" in states:
            msg = f"the connector failed: {status}"
            raise AssertionError(msg)
        return len(states) > 1 and set(states) == {"RUNNING"}


def postgres_connector(postgres: Postgres, *, tables: str, **settings: str) -> dict[str, str]:
    """Settings of a connector that captures tables of the database `postgres` under the prefix `shop`."""
    return {
        "name": "shop",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "database.hostname": "127.0.0.1",
        "database.port": str(postgres.port),
        "database.user": "postgres",
        "database.password": "unused",
        "database.dbname": "postgres",
        "topic.prefix": "shop",
        "plugin.name": "pgoutput",
        "table.include.list": tables,
        "slot.name": "shop",
        "poll.interval.ms": "50",
        "topic.creation.default.partitions": "2",
        "topic.creation.default.replication.factor": "1",
        "topic.creation.enable": "true",
        **settings,
    }


def mariadb_connector(mariadb: MariaDB, folder: Path, *, tables: str, **settings: str) -> dict[str, str]:
    """Settings of a connector that captures tables of the database `shop` under the prefix `shop`.

    Args:
        mariadb: the server.
        folder: for the history of the tables' definitions, which only this connector needs.
        tables: to capture.
        settings: more of them, or others.
    """
    return {
        "name": "shop",
        "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
        "tasks.max": "1",
        "database.hostname": "127.0.0.1",
        "database.port": str(mariadb.port),
        "database.user": "root",
        "database.password": "",
        "database.server.id": "5401",
        "database.ssl.mode": "disable",
        "topic.prefix": "shop",
        "table.include.list": tables,
        "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
        "schema.history.internal.file.filename": str(folder / "history.dat"),
        "poll.interval.ms": "50",
        "topic.creation.default.partitions": "2",
        "topic.creation.default.replication.factor": "1",
        "topic.creation.enable": "true",
        **settings,
    }


class SparkCluster:
    """A standalone master and two workers of one core each, which have no folder in common but the tests'."""

    def __init__(self, folder: Path) -> None:
        port, self._ui = free_port(), free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self.workers = [folder / f"worker{number}" for number in (1, 2)]
        spark = Path(pyspark.__path__[0])
        self.environment = {"SPARK_HOME": str(spark), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}

        def server(kind: str, folder: Path, *args: str) -> Server:
            folder.mkdir(parents=True)
            command = [str(spark / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1"]
            return Server([*command, *args], folder, environment=self.environment)

        self._master = server("master.Master", folder / "master", "--port", str(port), "--webui-port", str(self._ui))
        self._workers = [
            server("worker.Worker", path, "--webui-port", "0", "-c", "1", "-m", "1g", "-d", str(path), self.url)
            for path in self.workers
        ]

    def start(self) -> None:
        self._master.start(lambda: self._alive() == 0)
        for number, worker in enumerate(self._workers, start=1):
            worker.start(lambda number=number: self._alive() == number)

    def stop(self) -> None:
        for server in (*self._workers, self._master):
            server.stop()

    def _alive(self) -> int | None:
        """Workers that have found the master; None before there is one."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ui}/json/", timeout=2) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError):
            return None


@contextmanager
def running(*servers: Any) -> Iterator[None]:
    """Servers for as long as a block takes, started in order and stopped in the reverse one."""
    started: list[Any] = []
    try:
        for server in servers:
            server.start()
            started.append(server)
        yield
    finally:
        for server in reversed(started):
            server.stop()
