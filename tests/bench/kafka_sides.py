"""The sides of the Kafka comparison, each in a process and a Spark of its own: `kafka_sides.py SIDE FOLDER`.

The folder holds the plan, the tables to begin with, and afterwards what the side measured.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from delta.tables import DeltaTable
from kafka_events import COLUMNS, VALUE_FORMAT, fill, fill_in_avro, table_files
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from services import SPARK_JARS

from stream_merge import MergeMetrics, MergeResult
from stream_merge.jobs.kafka import JobSettings, jars, run
from stream_merge.jobs.kafka.batch_offsets import Checkpoint
from stream_merge.session import DELTA_EXTENSION, delta_packages, local_session

TOPIC, WARM_TOPIC = "orders", "warm"
IN_AVRO = {TOPIC: "orders_in_avro", WARM_TOPIC: "warm_in_avro"}
"""Topic -> the one with the same events in Avro."""
JOB_TABLE, HAND_TABLE = "table", "table_with_lsn"
HEAP = "4g"
LIMIT_BYTES = 2 * 2**30
_ENVELOPE = (
    "op string, before struct<id bigint>, after struct<id bigint, customer bigint, status string, total string,"
    " item string, note string, created string>, source struct<lsn bigint>"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What all sides have to know."""

    folder: str
    bootstrap: str
    events: int
    rows: int
    batch: int
    """Events of a small micro-batch."""
    extrapolated_from: int
    """Small micro-batches of the sides that are not ours."""
    registry: str | None = None
    """URL of the schema registry; None: nothing is written in Avro."""
    schema_ids: tuple[int, int] = (0, 0)
    """Of keys and values in Avro."""

    def save(self) -> None:
        """For the processes to come."""
        Path(self.folder, "plan.json").write_text(json.dumps(asdict(self)))

    @property
    def warm_up_events(self) -> int:
        """Merged before anything is measured, from a topic and into a table of their own."""
        return min(self.events, 2 * self.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one query did."""

    events: int
    seconds: float
    batches: int
    rows: int = 0
    fingerprint: str = ""
    """Of all rows; the same for the same rows."""
    about: dict[str, Any] = field(default_factory=dict)


def of_checkpoint(path: Path, *, after_the_first: bool) -> Measured:
    """Whole triggers, by the times of the files that Spark keeps of each micro-batch.

    Args:
        path: the checkpoint.
        after_the_first: leave the first micro-batch out, which loads the table and compiles code.
    """
    checkpoint = Checkpoint.on_disk(str(path))
    last = max(int(entry.name) for entry in (path / "commits").iterdir() if entry.name.isdigit())

    def ends(batch: int) -> int:
        planned = checkpoint.planned(batch) or {}
        return sum(offset for partitions in planned.values() for offset in partitions.values())

    done = (path / "commits" / str(last)).stat().st_mtime
    if after_the_first and last:
        since, before = (path / "commits" / "0").stat().st_mtime, ends(0)
    else:
        since, before = (path / "offsets" / "0").stat().st_mtime, 0
    batches = last if after_the_first and last else last + 1
    return Measured(events=ends(last) - before, seconds=done - since, batches=batches)


class Side:
    """One way to bring a topic into a table."""

    table: str | None = HAND_TABLE
    """Copy of which table it writes to; None: it makes its own."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan = plan
        self.place = Path(plan.folder, name)
        self.place.mkdir()
        self.session = self.start()

    def start(self) -> SparkSession:
        """Spark as a person has it who set nothing but Delta's extensions."""
        builder = SparkSession.builder.master("local[*]").config(
            map={
                "spark.sql.extensions": DELTA_EXTENSION,
                "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
                "spark.driver.memory": HEAP,
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.log.level": "ERROR",
                "spark.sql.warehouse.dir": str(self.place / "warehouse"),
                **jars.conf(str(SPARK_JARS)),
            }
        )
        return delta_packages(builder).getOrCreate()

    def begin(self, label: str) -> tuple[str, Path]:
        """A fresh target, and a place for a checkpoint."""
        target = self.place / label
        if self.table is not None:
            shutil.copytree(Path(self.plan.folder, self.table), target)
        return str(target), self.place / f"{label}_checkpoint"

    def merge(self, topic: str, target: str, checkpoint: Path, *, batch: int, batches: int | None) -> dict[str, Any]:
        """Run until the topic has been read, or so many micro-batches after the first have ended."""
        stream = (
            self.session.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.plan.bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", batch)
            .load()
        )
        writer = self.sink(parsed(stream), target).option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        while query.isActive and (batches is None or not (checkpoint / "commits" / str(batches)).exists()):
            time.sleep(0.05)
        query.stop()
        error = query.exception()
        if error is not None:
            raise error
        return {}

    def sink(self, events: DataFrame, target: str) -> Any:
        """What each micro-batch goes through."""
        raise NotImplementedError

    def measure(self) -> dict[str, Measured]:
        """A warm-up, then small micro-batches, then everything in one."""
        plan = self.plan
        target, checkpoint = self.begin("warm_up")
        self.merge(WARM_TOPIC, target, checkpoint, batch=plan.batch, batches=None)
        shutil.rmtree(target)
        found = {}
        ours = isinstance(self, Job)
        for case, batch, batches in (
            ("small", plan.batch, None if ours else plan.extrapolated_from),
            ("large", plan.events, None),
        ):
            target, checkpoint = self.begin(case)
            about = self.merge(TOPIC, target, checkpoint, batch=batch, batches=batches)
            took = of_checkpoint(checkpoint, after_the_first=case == "small")
            rows, fingerprint = self.look_at(target)
            found[case] = replace(took, rows=rows, fingerprint=fingerprint, about=about)
            shutil.rmtree(target)
        return found

    def look_at(self, target: str) -> tuple[int, str]:
        """Number of rows, and a sum over the hashes of all."""
        hashed = F.sum(F.xxhash64(*COLUMNS).cast("decimal(38, 0)"))
        rows, fingerprint = (
            self.session.read.format("delta").load(target).select(F.count(F.lit(1)), hashed).collect()[0]
        )
        return int(rows), str(fingerprint)


def parsed(records: DataFrame) -> DataFrame:
    """Envelopes as people parse them; the columns and types are those of the job."""
    return (
        records.where("value IS NOT NULL")
        .select(F.from_json(F.col("value").cast("string"), _ENVELOPE).alias("e"))
        .selectExpr(
            "coalesce(e.after.id, e.before.id) AS id",
            "e.after.customer",
            "e.after.status",
            "cast(cast(conv(hex(unbase64(e.after.total)), 16, 10) AS bigint) / 100 AS decimal(12, 2)) AS total",
            "e.after.item",
            "e.after.note",
            "cast(e.after.created AS timestamp) AS created",
            "e.source.lsn AS lsn",
            "e.op AS op",
        )
    )


class ByHand(Side):
    """`row_number` and MERGE in `foreachBatch`, as people write it."""

    def sink(self, events: DataFrame, target: str) -> Any:
        """Latest event per key, then one MERGE."""
        values = {name: f"s.{name}" for name in (*COLUMNS, "lsn")}
        latest = Window.partitionBy("id").orderBy(F.col("lsn").desc())

        def merge(batch_df: DataFrame, _: int) -> None:
            source = batch_df.withColumn("rank", F.row_number().over(latest)).where("rank = 1").drop("rank")
            (
                DeltaTable.forPath(batch_df.sparkSession, target)
                .alias("t")
                .merge(source.alias("s"), "t.id = s.id")
                .whenMatchedDelete("s.op = 'd' AND s.lsn > t.lsn")
                .whenMatchedUpdate("s.op <> 'd' AND s.lsn >= t.lsn", values)
                .whenNotMatchedInsert("s.op <> 'd'", values)
                .execute()
            )

        return events.writeStream.foreachBatch(merge)


class Append(Side):
    """The parsed topic appended to a table: what reading, parsing and writing cost without merging."""

    table = None

    def sink(self, events: DataFrame, target: str) -> Any:
        """Delta's own sink."""
        return events.writeStream.format("delta").option("path", target)

    def look_at(self, target: str) -> tuple[int, str]:
        """Every event is a row."""
        return self.session.read.format("delta").load(target).count(), ""


class Job(Side):
    """A job, as `stream-merge run` runs it."""

    table = JOB_TABLE

    def start(self) -> SparkSession:
        """The session that the command starts; it keeps the files of all micro-batches, whose times are the measure."""
        confs = {"spark.sql.streaming.minBatchesToRetain": "100000", **jars.conf(str(SPARK_JARS))}
        return local_session("stream_merge bench", memory=HEAP, confs=confs)

    def merge(self, topic: str, target: str, checkpoint: Path, *, batch: int, batches: int | None) -> dict[str, Any]:
        """Until everything has been merged; the engines that did it, and where their calls' time went."""
        query = {
            "name": "orders",
            "topic": topic,
            "value_format": VALUE_FORMAT,
            "target": target,
            "keys": "id",
            "checkpoint": str(checkpoint),
            "limits": {"max_events_per_batch": batch},
        }
        kafka = {"bootstrap": self.plan.bootstrap}
        settings = JobSettings.model_validate(self.in_its_format({"kafka": kafka, "queries": [query]}))
        done = run(settings, self.session, once=True, metrics=MergeMetrics(CollectorRegistry()))
        for error in done.failures.values():
            raise error
        return _about(list(done.results["orders"]))

    def in_its_format(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings for the topic that it reads."""
        return settings


class AvroJob(Job):
    """The same events in Avro with a schema registry."""

    def in_its_format(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Records and keys in Avro."""
        settings["kafka"]["schema_registry"] = {"url": self.plan.registry}
        (query,) = settings["queries"]
        query |= {"topic": IN_AVRO[query["topic"]], "value_format": {"type": "debezium", "encoding": "avro"}}
        return settings


def _about(results: list[MergeResult]) -> dict[str, Any]:
    counted = results[1:] or results
    phases = {
        phase: statistics.median(result.seconds.get(phase, 0.0) for result in counted) for phase in counted[0].seconds
    }
    return {
        "engines": dict(Counter(result.engine for result in results)),
        "plan": counted[-1].plan,
        "median_seconds_by_phase": {phase: round(seconds, 3) for phase, seconds in phases.items()},
        "median_call_seconds": round(statistics.median(result.duration_seconds for result in counted), 3),
    }


class Limited(Job):
    """The same in 2 GiB of heap, with 2 GiB of address space for the driver's Python and for the workers together."""

    def start(self) -> SparkSession:
        """A session like the command's default; the limits come after the JVM, which would inherit them."""
        cores = os.cpu_count() or 1
        workers = {"spark.executor.pyspark.memory": f"{LIMIT_BYTES}b", "spark.executor.cores": str(cores)}
        session = local_session("stream_merge bench", memory="2g", confs={**jars.conf(str(SPARK_JARS)), **workers})
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return session

    def measure(self) -> dict[str, Measured]:
        """One micro-batch with everything, right after the start."""
        target, checkpoint = self.begin("limited")
        about = self.merge(TOPIC, target, checkpoint, batch=self.plan.events, batches=None)
        took = of_checkpoint(checkpoint, after_the_first=False)
        rows, fingerprint = self.look_at(target)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        about |= {"driver_python_peak_mib": round(peak), "jvm_peak_mib": round(_jvm_peak_mib(self.session))}
        return {"large": replace(took, rows=rows, fingerprint=fingerprint, about=about)}


def _jvm_peak_mib(session: SparkSession) -> float:
    jvm = session._jvm
    pid = jvm.java.lang.ProcessHandle.current().pid() if jvm is not None else 0
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return float("nan")
    return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def prepare(plan: Plan) -> dict[str, Measured]:
    """The topics and the tables that each side gets a copy of."""
    spark = local_session("stream_merge bench", memory=HEAP, confs=jars.conf(str(SPARK_JARS)))
    table_files(spark, plan.rows, Path(plan.folder, JOB_TABLE), with_position=False)
    table_files(spark, plan.rows, Path(plan.folder, HAND_TABLE), with_position=True)
    fill(spark, plan.bootstrap, WARM_TOPIC, events=plan.warm_up_events, rows=plan.rows)
    started = time.perf_counter()
    fill(spark, plan.bootstrap, TOPIC, events=plan.events, rows=plan.rows)
    took = time.perf_counter() - started
    for source, topic in IN_AVRO.items() if plan.registry is not None else ():
        fill_in_avro(spark, plan.bootstrap, topic, source=source, ids=tuple(plan.schema_ids))
    spark.stop()
    return {"produced": Measured(events=plan.events, seconds=took, batches=1)}


SIDES: dict[str, Callable[[Plan, str], Side]] = {
    "job": Job,
    "avro": AvroJob,
    "by hand": ByHand,
    "append": Append,
    "limited": Limited,
}


def main() -> None:
    """Run one side."""
    side, folder = sys.argv[1:]
    plan = Plan(**json.loads(Path(folder, "plan.json").read_text()))
    found = prepare(plan) if side == "prepare" else SIDES[side](plan, side.replace(" ", "_")).measure()
    Path(folder, f"{side}.json").write_text(json.dumps({name: asdict(one) for name, one in found.items()}))


if __name__ == "__main__":
    main()
