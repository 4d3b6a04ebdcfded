"""The image as it is deployed: built here, run as uid 1000 with a read-only root, on a real broker."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import services
from deltalake import DeltaTable
from kafka import KafkaAdminClient, KafkaProducer
from services import containers

pytestmark = pytest.mark.timeout(1_200)  # with the build
GRACE_SECONDS = 60
START_SECONDS = 240


class Deployment:
    """A topic, a folder that uid 1000 owns, a job file in it, and the containers that run it."""

    def __init__(self, broker: services.Broker, folder: Path) -> None:
        self.port = services.free_port()
        self.name = f"stream-merge-{self.port}"
        self._folder = folder
        self._topic = folder.name
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        admin.create_topics({self._topic: {"num_partitions": 1, "replication_factor": 1}})
        admin.close()
        self._producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
        (folder / "job.yaml").write_text(
            f"""
kafka: {{bootstrap: "{broker.bootstrap}"}}
metrics: {{port: {self.port}}}
queries:
  - name: orders
    topic: {self._topic}
    target: ./orders
    keys: id
    checkpoint: checkpoint
    trigger: 1 second
    value_format: {{type: debezium, columns: {{id: bigint, name: text}}}}
"""
        )
        os.chown(folder, 1000, 1000)

    def run(self, *arguments: str, detached: bool = False, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`podman run` with what the page says of deployments."""
        own = ["--detach", "--name", self.name] if detached else ["--rm"]
        limits = ["--network=host", "--no-healthcheck", "--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--memory=3g"]
        volume = f"--volume={self._folder}:/data"
        return containers.podman("run", *own, *limits, volume, containers.IMAGE, *arguments, check=check)

    def write(self, *keys: int) -> None:
        for key in keys:
            source = {"lsn": time.time_ns(), "ts_ms": int(time.time() * 1000), "snapshot": "false"}
            value = {"op": "c", "before": None, "after": {"id": key, "name": "n"}, "source": source}
            record_key = json.dumps({"id": key}).encode()
            self._producer.send(self._topic, key=record_key, value=json.dumps(value).encode())
        self._producer.flush()

    def rows(self) -> list[int]:
        return sorted(DeltaTable(str(self._folder / "orders")).to_pyarrow_table(columns=["id"])["id"].to_pylist())

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url(path), timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def health(self) -> int:
        """Exit code of the image's own check, at this job's port."""
        found = containers.podman("image", "inspect", "--format={{json .HealthCheck.Test}}", containers.IMAGE).stdout
        _, *command = [word.replace(":9108/", f":{self.port}/") for word in json.loads(found)]
        return containers.podman("exec", self.name, *command, check=False).returncode

    def stop(self) -> tuple[int, float]:
        """Exit code and seconds after SIGTERM."""
        begun = time.monotonic()
        containers.podman("stop", "--time", str(GRACE_SECONDS), self.name)
        code = containers.podman("wait", self.name).stdout.strip()
        return int(code), time.monotonic() - begun

    def log(self) -> str:
        done = containers.podman("logs", self.name, check=False)
        return done.stdout + done.stderr

    def remove(self) -> None:
        containers.podman("rm", "--force", "--ignore", "--time", "0", self.name, check=False)

    def close(self) -> None:
        self.remove()
        self._producer.close()


@pytest.fixture(scope="module")
def image() -> None:
    containers.need()
    containers.build()


@pytest.fixture
def deployment(image: None, broker: services.Broker, tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(broker, tmp_path)
    yield deployment
    deployment.close()


def test_the_image_runs_a_job_and_sigterm_ends_it(deployment: Deployment):
    deployment.write(1, 2)
    checked = deployment.run("check", "/data/job.yaml").stdout
    assert "limit 3.0 GiB: 1.0 GiB for Spark's heap" in " ".join(checked.split()), checked

    deployment.run("run", "--once", "/data/job.yaml")
    assert deployment.rows() == [1, 2]

    deployment.write(3)
    deployment.run("run", "/data/job.yaml", detached=True)
    try:
        services.wait_until(lambda: deployment.answers("readyz"), "it is ready", seconds=START_SECONDS)
        services.wait_until(lambda: deployment.rows() == [1, 2, 3], "the event is merged", seconds=START_SECONDS)
        assert deployment.answers("livez")
        assert deployment.health() == 0
        code, seconds = deployment.stop()
    except (AssertionError, TimeoutError) as err:
        err.add_note(deployment.log())
        raise

    assert code == 0, deployment.log()
    assert seconds < GRACE_SECONDS


def test_sigterm_ends_it_while_spark_starts(deployment: Deployment):
    """The kernel does not deliver to process 1 what nobody handles: the job would run on until it is killed."""
    deployment.run("run", "/data/job.yaml", detached=True)
    services.wait_until(lambda: "Spark: starting" in deployment.log(), "Spark starts", seconds=START_SECONDS)

    code, seconds = deployment.stop()

    assert code == 0, deployment.log()
    assert seconds < GRACE_SECONDS


def test_nothing_but_the_job_is_in_the_image(image: None):
    """No setting of the machine that built it, no program that installs others, nothing that uid 1000 may change."""

    def said(program: str, *arguments: str) -> str:
        own = ["run", "--rm", "--network=host", "--no-healthcheck", "--tmpfs=/tmp", f"--entrypoint={program}"]
        return containers.podman(*own, containers.IMAGE, *arguments, check=False).stdout

    looked_at = "id -u; ls /etc/pip.conf /run/secrets 2>/dev/null; find / -xdev -writable -type f ! -path '/proc/*'"
    assert said("sh", "-c", looked_at).split() == ["1000"]

    own = {file.read_text().strip() for file in Path("/usr/local/share/ca-certificates").glob("*.crt")}
    trusted = said("cat", "/etc/ssl/certs/ca-certificates.crt")
    assert [text for text in own if text in trusted] == []
