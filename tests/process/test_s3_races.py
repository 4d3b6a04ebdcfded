"""Processes that merge into one table on S3 at once, one of them killed: what keeps them apart is the store alone.

Needs processes, each with a JVM: within one, Spark's own locks would help. `make soak` has more merges.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s3_race_child
from delta_log import check_table, live_rows
from deltalake import DeltaTable, write_deltalake
from racing import (
    COLUMNS,
    ENGINES,
    IN_A_ROUND,
    SHARED,
    app_id,
    as_tuples,
    commit,
    expect_changes,
    expected_rows,
    replayed,
)
from services import SPARK_JARS, running, s3

from stream_merge.jobs.kafka import jars
from stream_merge.spark.log_store import log_store_confs

log = logging.getLogger(__name__)

MERGES = int(os.environ.get("STREAM_MERGE_RACES", "17"))
PROCESSES = (("jvm", "left"), ("middle", "right"))
"""The writers of each; the second is killed and started anew."""
BATCHES = {name: -(-MERGES * share // sum(IN_A_ROUND.values())) for name, share in IN_A_ROUND.items()}
APPENDED = 6
"""Rows, beside all writers."""
SECONDS = 180 + 4 * MERGES


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[s3.Bucket]:
    """A bucket on a server of its own."""
    s3.need()
    server = s3.S3Server(tmp_path / "s3")
    with running(server):
        yield server.bucket("lake")


class Child:
    """A process of writers, and what it says of their batches."""

    def __init__(self, folder: Path, name: str, *args: str) -> None:
        self.said = folder / f"{name}.txt"
        command = [sys.executable, s3_race_child.__file__, str(folder / "settings.json"), *args]
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)

    def batches(self) -> list[dict[str, Any]]:
        """Those that are done."""
        lines = self.said.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def kill(self) -> None:
        """Without a word, its JVM included."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.timeout(2 * SECONDS)
def test_processes_lose_no_merge_of_each_other(lake: s3.Bucket, tmp_path: Path) -> None:
    """Spark and the driver, each in a process with another one, and a writer that is no sink."""
    target = lake.uri("races/t")
    root = lake.folder / "races" / "t"
    make(lake, target)
    confs = log_store_confs(jars.conf(str(SPARK_JARS), {"spark.hadoop." + k: v for k, v in lake.settings().items()}))
    settings = {"target": target, "options": lake.storage_options(), "confs": confs}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    wanted = [[f"{name}={BATCHES[name]}" for name in process] for process in PROCESSES]
    first = Child(tmp_path, "first", "--append", str(APPENDED), *wanted[0])
    killed = Child(tmp_path, "killed", *wanted[1])
    children = [first, killed]
    try:
        deadline = time.monotonic() + SECONDS
        while (
            len(killed.batches()) < BATCHES["right"] and killed.process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert killed.process.poll() is None, killed.said.read_text()
        killed.kill()
        children.append(Child(tmp_path, "again", *wanted[1]))
        codes = [child.process.wait(max(1, deadline - time.monotonic())) for child in (first, children[-1])]
        assert codes == [0, 0], "".join(child.said.read_text() for child in children)
    finally:
        for child in children:
            if child.process.poll() is None:
                child.kill()

    told = [one for child in children for one in child.batches()]
    expected = expected_rows(BATCHES, range(s3_race_child.BESIDE, s3_race_child.BESIDE + APPENDED))
    checked = check_table(root)
    assert as_tuples(live_rows(root)) == expected
    lines = {version: list(map(json.loads, commit(root, version))) for version in range(checked.version + 1)}
    made = {
        (line["txn"]["appId"], line["txn"]["version"]): version
        for version, of_version in lines.items()
        for line in of_version
        if "txn" in line
    }
    assert set(made) == {(app_id(name), number) for name, batches in BATCHES.items() for number in range(batches)}
    assert Counter("txn" in line for of_version in lines.values() for line in of_version)[True] == len(made)
    feed = changes(root)
    assert replayed(feed) == expected
    for name, batches in BATCHES.items():
        expect_changes(feed, name, [made[app_id(name), number] for number in range(batches)])
    engines = {(one["writer"], one["engine"]) for one in told if one["outcome"] == "committed"}
    assert engines == {(name, ENGINES[name]) for name in BATCHES}
    lost = {name: sum(one["lost"] for one in told if one["writer"] == name) for name in BATCHES}
    log.info("%d merges, %d versions; lost: %s", len(made), len(lines), lost)
    assert sum(lost.values()) > 0, "nobody lost a commit: the writers have not met"


def make(lake: s3.Bucket, target: str) -> None:
    """The table, with rows that all writers change; delta-rs would give it features that only Spark writes."""
    types = {"id": "long", "lsn": "long", "name": "string", "counted": "long"}
    fields = [{"name": name, "type": dtype, "nullable": True, "metadata": {}} for name, dtype in types.items()]
    properties = {"delta.enableDeletionVectors": "true", "delta.enableChangeDataFeed": "true"}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", "changeDataFeed"]}
    metadata = {
        "id": "races",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": properties,
    }
    actions = [
        {"commitInfo": {"timestamp": 1, "operation": "CREATE TABLE"}},
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"metaData": metadata},
    ]
    lake.put(f"races/t/_delta_log/{0:020d}.json", "".join(f"{json.dumps(action)}\n" for action in actions).encode())
    rows = {"id": [*SHARED], "lsn": [-1] * len(SHARED), "name": ["none"] * len(SHARED), "counted": [0] * len(SHARED)}
    write_deltalake(target, pa.table(rows), mode="append", storage_options=lake.storage_options())


def changes(root: Path) -> list[tuple[Any, ...]]:
    """The change feed, as `testing.change_rows` has it: version, kind, values."""
    found = pa.table(DeltaTable(str(root)).load_cdf(starting_version=0).read_all())
    return [tuple(row.values()) for row in found.select(["_commit_version", "_change_type", *COLUMNS]).to_pylist()]
