"""Sinks and commands on tables of a Hive metastore (Spark's own, in Derby); what each check saw, as JSON.

The catalog of a session is chosen when its JVM starts, so that this is a process of its own.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import Only, with_costs
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from services import SPARK_JARS
from typer.testing import CliRunner

from stream_merge import MergeSink
from stream_merge.cli.app import app
from stream_merge.cli.commands.shared import session_starter
from stream_merge.jobs.kafka import jars
from stream_merge.metrics.instruments import MergeMetrics

EVENTS = "id bigint, lsn bigint, op string, name string"
ROWS = "id bigint, lsn bigint, name string"


class Checks:
    """Run in the folder that the process works in, one after the other on one session."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.root = Path.cwd()
        metrics = spark.sparkContext._jvm.org.apache.spark.metrics.source.HiveCatalogMetrics
        self._calls = metrics.METRIC_HIVE_CLIENT_CALLS()
        spark.sql("CREATE SCHEMA shop")

    # -- helpers -----------------------------------------------------------------------------

    def events(self, *events: tuple[int | None, int, str, str | None]) -> DataFrame:
        return self.spark.createDataFrame(list(events), EVENTS)

    def sink(self, target: str, **settings: Any) -> MergeSink:
        given = {"keys": "id", "sequence_by": "lsn", "apply_as_deletes": "op = 'd'", "except_column_list": ["op"]}
        metrics = MergeMetrics(registry=CollectorRegistry())
        return sink_with(**{"target": target, "app_id": "hive", "metrics": metrics, **given, **settings})

    def rows(self, table: str) -> list[list[Any]]:
        return [list(row) for row in self.spark.table(table).orderBy("id").collect()]

    def stored(self, place: Path) -> list[list[Any]]:
        return [list(row) for row in self.spark.read.format("delta").load(str(place)).orderBy("id").collect()]

    def refused(self, target: str) -> str:
        """What a sink says of a target that it must not have."""
        try:
            self.sink(target)(self.events((1, 1, "u", "a")), 0)
        except Exception as err:
            return f"{type(err).__name__}: {err}"
        return "merged"

    def command(self, line: str) -> tuple[int, str]:
        found = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "300"})
        return found.exit_code, found.output

    # -- checks ------------------------------------------------------------------------------

    def engines(self) -> dict[str, Any]:
        """Each engine on a table of its own; calls of the catalog by a batch that makes no table."""
        found: dict[str, Any] = {}
        events: list[tuple[int | None, int, str, str | None]]
        for engine in ("driver", "spark"):
            target, calls, merged = f"shop.by_{engine}", [], []
            sink = with_costs(self.sink(target), Only(engine))
            for number in range(3):
                before = self._calls.getCount()
                events = [(1, number, "u", f"v{number}"), (2, number, "ud"[number % 2], None)]
                if engine != "spark" or not number:  # each takes Spark a second
                    events.append((None, number, "u", "no key"))
                sink(self.events(*events), number)
                calls.append(self._calls.getCount() - before)
                assert sink.last_result is not None
                merged.append(sink.last_result.engine)
            found[engine] = {"rows": self.rows(target), "calls": calls[-1], "engines": merged}
        place = self.root / "spark-warehouse" / "shop.db"
        found["writers"] = sorted(path.name for path in place.glob("__stream_merge_writers_*"))
        found["tables"] = sorted(row["tableName"] for row in self.spark.sql("SHOW TABLES IN shop").collect())
        return found

    def moved(self) -> dict[str, Any]:
        """One sink while its table is dropped and made again elsewhere; delta-rs merges, which works by the place."""
        old, new = self.root / "old", self.root / "new"
        sink = self.sink("shop.moved", engine="driver")
        for number, place in enumerate((old, new)):
            self.spark.sql("DROP TABLE IF EXISTS shop.moved")
            self.spark.sql(f"CREATE TABLE shop.moved ({ROWS}) USING delta LOCATION '{place}'")
            sink(self.events((number, 1, "u", "a")), number)
        return {"old": self.stored(old), "new": self.stored(new)}

    def moved_under_a_query(self) -> dict[str, Any]:
        """As `moved`, of a query, whose checkpoint says that the table holds its batches."""
        old, new, source = self.root / "query_old", self.root / "query_new", self.root / "source"
        self.spark.sql(f"CREATE TABLE shop.queried ({ROWS}) USING delta LOCATION '{old}'")
        said = ""
        for number in range(2):
            self.events((number, 1, "u", "a")).coalesce(1).write.mode("append").json(str(source))
            stream = self.spark.readStream.schema(EVENTS).json(str(source)).writeStream
            stream = stream.foreachBatch(self.sink("shop.queried", app_id=None)).trigger(availableNow=True)
            query = stream.option("checkpointLocation", str(self.root / "checkpoint")).start()
            try:
                query.awaitTermination()
            except Exception as err:
                said = str(err)
            self.spark.sql("DROP TABLE shop.queried")
            self.spark.sql(f"CREATE TABLE shop.queried ({ROWS}) USING delta LOCATION '{new}'")
        return {"said": said, "old": self.stored(old), "new": self.stored(new)}

    def odd_place(self) -> list[list[Any]]:
        """A location that is another place if it is read as a URI."""
        place = self.root / "50%20 #1" / "t"
        self.spark.sql(f"CREATE TABLE shop.odd ({ROWS}) USING delta LOCATION '{place}'")
        self.sink("shop.odd")(self.events((1, 1, "u", "a")), 0)
        return self.stored(place)

    def refusals(self) -> dict[str, str]:
        spark = self.spark
        spark.sql(f"CREATE TABLE shop.parquet_table ({ROWS}) USING parquet")
        spark.sql(f"CREATE TABLE shop.orc_table ({ROWS}) STORED AS ORC")
        spark.sql("CREATE VIEW shop.some_view AS SELECT 1L AS id, 1L AS lsn, 'a' AS name")
        spark.range(1).createOrReplaceTempView("some_temporary_view")
        spark.sql(f"CREATE TABLE shop.folder_gone ({ROWS}) USING delta")
        shutil.rmtree(self.root / "spark-warehouse" / "shop.db" / "folder_gone")
        names = ("shop.parquet_table", "shop.orc_table", "shop.some_view", "some_temporary_view", "shop.folder_gone")
        names += ("away.APP.t", "nowhere.t", "nowhere.shop.t", "spark_catalog.a.b.t")
        names += ("shop.`a b`", "shop.`a/b`", "shop..t")
        found = {name: self.refused(name) for name in names}
        spark.sql("USE lake.APP")
        found["short"] = self.refused("short")
        spark.sql("USE spark_catalog.default")
        return found

    def managed_by_a_catalog(self) -> dict[str, Any]:
        """A table whose protocol says that its catalog commits, by its name in one that does not, and by its path."""
        place = self.root / "managed"
        in_time = "TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true', 'delta.enableDeletionVectors' = 'true')"
        self.spark.sql(f"CREATE TABLE shop.managed ({ROWS}) USING delta LOCATION '{place}' {in_time}")
        log = place / "_delta_log"
        first = log / f"{0:020}.json"
        actions = [json.loads(line) for line in first.read_text().splitlines()]
        (protocol,) = (action["protocol"] for action in actions if "protocol" in action)
        for features in ("readerFeatures", "writerFeatures"):
            protocol[features] = [*protocol[features], "catalogManaged", "vacuumProtocolCheck"]
        first.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
        for checksum in log.glob("*.crc"):
            checksum.unlink()
        self.spark.sparkContext._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        before = sorted(place.rglob("*"))
        return {
            "sink": [self.refused(target) for target in ("shop.managed", str(place))],
            "explain": self.command(f"explain {place}"),
            "is_unchanged": sorted(place.rglob("*")) == before,
        }

    def commands(self) -> dict[str, Any]:
        """`files` and `maintain` by a name of three parts; what `explain` says of one."""
        source = self.root / "in"
        source.mkdir()
        (source / "1.json").write_text('{"id": 1, "lsn": 1, "name": "one"}\n{"id": null, "lsn": 1, "name": "no key"}\n')
        options = f"--source {source} --format json --keys id --sequence-by lsn --checkpoint {self.root / 'files'}"
        files = f"files {options} --target spark_catalog.shop.orders --once --metrics-port 0"
        first = self.command(files)
        (source / "2.json").write_text('{"id": 1, "lsn": 2, "name": "new"}\n')
        second = self.command(files)
        return {
            "files": [first, second],
            "maintain": self.command("maintain spark_catalog.shop.orders"),
            "explain": self.command("explain shop.orders"),
            "rows": self.rows("shop.orders"),
            "quarantined": self.spark.table("shop.__stream_merge_quarantine_orders").count(),
            "locks": [path.name for path in (self.root / "spark-warehouse" / "shop.db").glob("__stream_merge_lock_*")],
            "place": str(self.spark.sql("DESCRIBE DETAIL shop.orders").collect()[0]["location"]),
        }


@contextmanager
def hive(root: Path) -> Iterator[SparkSession]:
    """A session as commands have it, with a metastore of its own under a folder."""
    confs = {
        **jars.conf(str(SPARK_JARS)),
        "spark.sql.catalogImplementation": "hive",
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={root}/metastore;create=true",
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={root} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.memory": "1g",
        # Catalogs of another kind; the database of one is not there.
        **_of_database("lake", "memory:lake;create=true"),
        **_of_database("away", f"{root}/nowhere"),
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.artifact.isolation.enabled": "false",
    }
    with session_starter("hive", confs) as start:
        spark = start()
        yield spark
        spark.stop()


def _of_database(name: str, database: str) -> dict[str, str]:
    conf = f"spark.sql.catalog.{name}"
    return {
        conf: "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog",
        f"{conf}.url": f"jdbc:derby:{database}",
        f"{conf}.driver": "org.apache.derby.iapi.jdbc.AutoloadedDriver",
    }


def seen(check: Callable[[], Any]) -> Any:
    try:
        return check()
    except Exception:
        return traceback.format_exc()


def main() -> None:
    with hive(Path.cwd()) as spark:
        checks = Checks(spark)
        wanted = sys.argv[1:]
        print(json.dumps({name: seen(getattr(checks, name)) for name in wanted}))


if __name__ == "__main__":
    main()
