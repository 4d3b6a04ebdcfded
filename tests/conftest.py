"""One Spark session for all tests, and a fresh table path for each."""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import engines
import pyspark
import pytest
import services
from disk import keep_bucket
from log_faults import LogFaults, class_path, compile_log_store
from pyspark.sql import SparkSession
from services import gcs, s3
from services import registry as schema_registry
from spared import spare_creations, spare_lookups, spare_processes
from turns import Turn, core, rank

from stream_merge.jobs.kafka import jars
from stream_merge.session import SMALL_BATCHES, local_session
from stream_merge.spark import preflight, versions
from stream_merge.spark.log_store import log_store_confs

CLASSES = services.ROOT / ".jars" / "classes.jsa"
PROJECTIONS = "spark.sql.codegen.factoryMode"
TASKS = dict.fromkeys(
    (
        "spark.sql.shuffle.partitions",
        "spark.databricks.delta.snapshotPartitions",
        "spark.sql.leafNodeDefaultParallelism",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism",  # of VACUUM: on Spark 3.5 it runs all 10,000
    ),
    "1",
)
"""A dozen rows in one task instead of four: a seventh of the processor time, together with the serial collector."""
JAVA_OPTIONS = "-XX:TieredStopAtLevel=4 -XX:ReservedCodeCacheSize=512m -XX:+UseSerialGC"
"""This JVM lives for long: the best compiler costs 1.2 s of processor time more for each of its first 20 merges and
saves 0.3 s of the next ones, 0.7 s from the 80th on (2.0 s instead of 2.7 s). Thousands of generated classes: the
default code cache fills up and compiling stops. Two threads of collectors for each of three JVMs on two cores only wait
for each other."""
PRESET = {setting.conf: setting.value for setting in SMALL_BATCHES}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of random tests; the default is a new one each run")

    parser.addoption(
        "--engines",
        choices=("all", "each", "shipped"),
        default="all",
        help="tests that are for several engines: on each of them and from batch to batch on another (all; with each"
        " that is for random histories alone), or as a sink chooses",
    )
    parser.addoption(
        "--core",
        action="store_true",
        help="the tests of `make test` alone (tests/turns.py), made quicker (tests/spared.py, tests/deliveries.py)",
    )
    parser.addoption(
        "--turn",
        type=int,
        default=None,
        help="with `--engines each`: the tests that have this turn (tests/turns.py); the default is all of them",
    )
    parser.addoption(
        "--place", choices=("disk", "s3"), default="disk", help="where the fixture `tmp_table` is: on the disk, on S3"
    )
    parser.addoption(
        "--newer-spark", action="store_true", help="run on a Spark and a Delta that the sink refuses: what would break"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # the processes that pytest-xdist starts inherit the environment: one seed for all
        chosen = os.environ.setdefault("STREAM_MERGE_SEED", str(random.SystemRandom().randrange(1_000_000)))
        config.option.seed = int(chosen)
    if config.option.newer_spark:
        ours = replace(versions.OWN, pyspark=f"=={pyspark.__version__}", delta=metadata.version("delta-spark"))
        versions.PARTS[versions.SPARK] = ours
        preflight.mixture_problem = lambda *_: None
    os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "spark-conf"))
    # JVMs of processes that tests start live for seconds: half of that is loading classes, or compiling them well.
    # Without the best compiler the JVM reserves 48 MB for what it compiles, and Spark fills them in a minute.
    archive = ["-Xlog:disable", f"-XX:SharedArchiveFile={CLASSES}"] if CLASSES.exists() else []
    os.environ.setdefault(
        "SPARK_SUBMIT_OPTS", shlex.join(["-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=256m", *archive])
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test is marked with its folder; files that take minutes come first, so that none is run alone at the end."""
    for item in items:
        item.add_marker(item.path.parent.name)
    items.sort(key=lambda item: rank(item.path.stem))


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--core` the core tests, with `--turn` those of this turn, of those that everything else has left."""
    if config.option.core:
        wanted = core(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted
    if config.option.turn is not None:
        turn = Turn(config.option.turn, items, engines.PARAMETER)
        config.hook.pytest_deselected(items=[item for item in items if not turn.has(item)])
        items[:] = filter(turn.has, items)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """What random tests start from."""
    return int(request.config.option.seed)


@pytest.fixture(scope="session")
def spark(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Real Spark with real Delta and the preset for small batches; nothing is written outside temporary folders."""
    session = local_session(
        "stream_merge tests",
        cores=2,
        memory="3g",
        confs=_with_jars(
            {
                "spark.sql.warehouse.dir": tmp_path_factory.mktemp("warehouse").as_uri(),
                "spark.local.dir": str(tmp_path_factory.mktemp("spark-local")),
                "spark.sql.catalogImplementation": "in-memory",
                "spark.sql.artifact.isolation.enabled": "false",
                "spark.driver.extraJavaOptions": JAVA_OPTIONS,
                **TASKS,
                # A third of the processor time went into the text of projections, written anew for every task. Tests
                # that are marked `generated`, and the cluster, have them as users do.
                PROJECTIONS: "NO_CODEGEN",
            }
        ),
    )
    spare_lookups()
    spare_processes(session, tmp_path_factory.mktemp("local-files"))
    if pytestconfig.option.core:
        spare_creations(tmp_path_factory.mktemp("creations"))
    yield session
    session.stop()


def _with_jars(confs: dict[str, str]) -> dict[str, str]:
    """Those of the Kafka connector and of file systems for object stores, with the log store for S3, where they are."""
    if services.missing():
        return confs
    found = log_store_confs(jars.conf(str(services.SPARK_JARS), confs))
    return {**found, "spark.jars": ",".join([found["spark.jars"], *gcs.jars()])}


@pytest.fixture(scope="module", autouse=True)
def as_users_have_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """Projections generated and several tasks for a file that is marked so; else interpreted, one task."""
    if request.node.get_closest_marker("generated") is None:
        yield
        return
    session: SparkSession = request.getfixturevalue("spark")
    spared = {name: session.conf.get(name) for name in (PROJECTIONS, *TASKS)}
    session.conf.set(PROJECTIONS, "FALLBACK")
    for name in TASKS:
        session.conf.set(name, PRESET.get(name, "2"))
    yield
    for name, value in spared.items():
        session.conf.set(name, value)


@pytest.fixture(scope="module", autouse=True)
def delta_forgets() -> Iterator[None]:
    """Delta keeps each table's log and its plans, 3 MB, for an hour; the tests make hundreds of tables."""
    yield
    session = SparkSession.getActiveSession()
    if session is not None and session._jvm is not None:
        session._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.Broker]:
    """A real Kafka broker."""
    services.need()
    broker = services.Broker(tmp_path_factory.mktemp("kafka") / "broker")
    with services.running(broker):
        yield broker


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schema_registry.Registry]:
    """A real schema registry."""
    schema_registry.need()
    found = schema_registry.Registry(tmp_path_factory.mktemp("registry"))
    with services.running(found):
        yield found


@pytest.fixture(scope="session")
def postgres() -> Iterator[services.Postgres]:
    """A real PostgreSQL server with logical replication."""
    services.need()
    postgres = services.Postgres()
    with services.running(postgres):
        yield postgres


@pytest.fixture(scope="session")
def bucket(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Bucket]:
    """A bucket on a real S3 server, which Spark knows of."""
    s3.need()
    server = s3.S3Server(tmp_path_factory.mktemp("s3"))
    with services.running(server):
        found = server.bucket("lake")
        found.tell(spark)
        keep_bucket(found)
        yield found


@pytest.fixture
def tmp_table(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place where no table is yet."""
    if request.config.option.place == "disk":
        return str(tmp_path / "table")
    bucket: s3.Bucket = request.getfixturevalue("bucket")
    return bucket.uri(f"{uuid4().hex[:8]}/table")


@pytest.fixture(scope="session")
def log_store_classes(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log store of `log_faults`, compiled."""
    return compile_log_store(tmp_path_factory.mktemp("classes"), class_path(spark))


@pytest.fixture
def log_faults(spark: SparkSession, log_store_classes: Path) -> Iterator[LogFaults]:
    """Faults in the log of tables under `faulty_table`; none is left behind."""
    faults = LogFaults(spark, log_store_classes)
    yield faults
    faults.disarm()


@pytest.fixture
def faulty_table(log_faults: LogFaults, tmp_path: Path) -> str:
    """A location where no table is yet and `log_faults` can strike; Spark knows its scheme by them."""
    del log_faults
    return f"faulty:{tmp_path}/table"
