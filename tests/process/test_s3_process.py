"""Commands and sessions of their own on S3, and that nobody reads their secrets in `ps`.

Processes with a JVM: what stands in a command line is decided when a JVM starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from services import SPARK_JARS, command_lines, running, s3

from stream_merge.jobs.kafka.jars import jars_in

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Bucket]:
    """A bucket on a server of its own."""
    s3.need()
    server = s3.S3Server(tmp_path_factory.mktemp("s3"))
    with running(server):
        yield server.bucket("lake")


@pytest.fixture
def defaults(lake: s3.Bucket, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that knows the bucket by `spark-defaults.conf` and has its keys."""
    settings = {f"spark.hadoop.{name}": value for name, value in lake.settings().items() if ".key" not in name}
    settings["spark.jars"] = ",".join(jars_in(str(SPARK_JARS)))
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    keys = {name: lake.storage_options()[name] for name in KEYS}
    return {**os.environ, **keys, "SPARK_CONF_DIR": str(tmp_path)}


def put(lake: s3.Bucket, path: str, *rows: dict[str, object]) -> None:
    """JSON lines."""
    lake.put(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def watched(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str, set[bytes]]:
    """Run a command to its end: exit code, what it said, and the command lines that were seen meanwhile."""
    seen: set[bytes] = set()
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        while process.poll() is None:
            seen.update(command_lines())
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
    return process.returncode, (folder / "said.txt").read_text(), seen


def test_files_of_a_bucket_are_merged_into_a_table_of_the_bucket(
    lake: s3.Bucket, defaults: dict[str, str], tmp_path: Path
) -> None:
    """Source, target, checkpoint and quarantine are there, spelled `s3:`; the keys come from the environment."""
    put(lake, "files/in/1.json", {"id": 1, "lsn": 1, "name": "one"}, {"id": 2, "lsn": 1, "name": "two"})
    put(lake, "files/in/2.json", {"id": 1, "lsn": 2, "name": "new"}, {"id": None, "lsn": 2, "name": "no key"})
    options = {
        "--source": "s3://lake/files/in",
        "--target": "s3://lake/files/orders",
        "--checkpoint": "s3://lake/files/checkpoint",
        "--format": "json",
        "--keys": "id",
        "--sequence-by": "lsn",
        "--schema": "id bigint, lsn bigint, name string",
    }
    command = [sys.executable, "-m", "stream_merge.cli", "files", "--once", "--single-writer"]
    command += [part for pair in options.items() for part in pair]

    code, said, seen = watched(command, defaults, tmp_path)
    again, said_again, _ = watched(command, defaults, tmp_path)

    table = deltalake.DeltaTable("s3://lake/files/orders", storage_options=lake.storage_options())
    found = deltalake.QueryBuilder().register("t", table).execute("SELECT id, lsn, name FROM t ORDER BY id")
    assert (code, again) == (0, 0), said + said_again
    assert "0 events in 0 micro-batches" in said_again
    assert pa.table(found.read_all()).to_pylist() == [
        {"id": 1, "lsn": 2, "name": "new"},
        {"id": 2, "lsn": 1, "name": "two"},
    ]
    assert {path.name for path in (lake.folder / "files").iterdir()} == {
        "in",
        "orders",
        "checkpoint",
        "__stream_merge_quarantine_orders",
    }
    kept = [file.read_bytes() for file in lake.folder.rglob("*") if file.is_file()]
    secret = lake.server.secret_key.encode()
    assert len(seen) > 1
    assert [text[:80] for text in [*seen, *kept, said.encode(), said_again.encode()] if secret in text] == []


def test_a_secret_among_the_confs_of_a_session_is_no_argument_of_its_jvm(lake: s3.Bucket, tmp_path: Path) -> None:
    """PySpark alone would start the JVM with each conf of the builder as an argument."""
    put(lake, "confs/1.json", {"id": 1}, {"id": 2})
    confs = {f"spark.hadoop.{name}": value for name, value in lake.settings().items()}
    confs["spark.jars"] = ",".join(jars_in(str(SPARK_JARS)))
    (tmp_path / "confs.json").write_text(json.dumps(confs))
    code = """
        import json, sys
        from stream_merge.session import local_session

        session = local_session("secret", cores=1, memory="512m", confs=json.load(open(sys.argv[1])))
        print(session.read.schema("id int").json("s3a://lake/confs").count(), "rows")
        session.stop()
    """

    code_, said, seen = watched(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "confs.json")], {**os.environ}, tmp_path
    )

    assert (code_, said) == (0, "2 rows\n")
    assert any(b"spark.jars=" in line for line in seen)
    assert [line for line in seen if lake.server.secret_key.encode() in line] == []
    assert [line for line in seen if lake.server.access_key.encode() in line] == []
