"""The chart's manifests run: podman plays them on this machine, and a real broker feeds the job."""

from __future__ import annotations

import base64
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import services
import yaml
from delta_log_values import live_rows
from kafka import KafkaAdminClient, KafkaProducer
from services import containers, free_port, helm, wait_until
from services.containers import podman
from services.helm import Manifest, rendered

from stream_merge.jobs.kafka import load
from stream_merge.jobs.kafka.history import trail

CONTAINER = "shop-stream-merge-pod-0-job"
TOKEN = base64.b64encode(b"a-token").decode()
"""In the Secret and, since podman 4.3 mounts what it does not decode, in the pod."""
START_SECONDS = 300


def for_podman(manifests: list[Manifest]) -> list[Manifest]:
    """What podman 4.3 plays of them: nothing but the lines here differs from what a cluster gets."""
    played = [m for m in manifests if m["kind"] not in {"Service", "NetworkPolicy"}]  # unknown to podman
    for manifest in played:
        if manifest["kind"] != "StatefulSet":
            continue
        manifest["kind"] = "Deployment"
        pod = manifest["spec"]["template"]["spec"]
        pod["hostNetwork"] = True  # where the broker is
        (job,) = pod["containers"]
        del job["ports"]  # on the host's network podman maps none
        probe = job["livenessProbe"].pop("httpGet")  # podman would call curl, which the image lacks, on port 0
        url = f"http://127.0.0.1:{yaml.safe_load(job_file(manifests))['metrics']['port']}{probe['path']}"
        ask = f"python -c \"import urllib.request; urllib.request.urlopen('{url}')\""
        job["livenessProbe"]["exec"] = {"command": [ask]}
        for volume in pod["volumes"]:
            if "secret" in volume:
                volume["secret"]["optional"] = False  # podman 4.3.1 crashes without it
    return played


def job_file(manifests: list[Manifest]) -> str:
    (text,) = [manifest["data"]["job.yaml"] for manifest in manifests if manifest["kind"] == "ConfigMap"]
    return str(text)


class Played:
    """A release of the chart, its topic, and what its table must hold."""

    def __init__(self, broker: services.Broker, folder: Path) -> None:
        self.port = free_port()
        self.rows: dict[int, str] = {}
        self.produced = 0
        self._admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        self._admin.create_topics({"orders": {"num_partitions": 1, "replication_factor": 1}})
        self._producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
        query = {
            "name": "orders",
            "topic": "orders",
            "target": "/data/orders",
            "keys": "id",
            "checkpoint": "/data/checkpoint",
            "value_format": {"type": "debezium", "columns": {"id": "bigint", "name": "text"}},
            "trigger": "100 ms",
            "limits": {"max_events_per_batch": 50},
        }
        repository, _, tag = containers.IMAGE.rpartition(":")
        values = {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "job": {
                "kafka": {"bootstrap": "${BROKER}"},
                "metrics": {"port": self.port, "token_file": "/etc/metrics/token"},
                "queries": [query],
            },
            "secretEnv": {"BROKER": {"secret": "kafka", "key": "bootstrap"}},
            "secretMounts": {"/etc/metrics": "metrics"},
            "resources": {"limits": {"memory": "3Gi"}, "requests": {"memory": "3Gi"}},
        }
        manifests = rendered(values, folder=folder)
        # As podman 4.3 reads them: a Secret for variables is JSON of its own, one for files is a manifest.
        bootstrap = base64.b64encode(broker.bootstrap.encode()).decode()
        (folder / "secret.json").write_text(json.dumps({"bootstrap": bootstrap}))
        podman("secret", "create", "kafka", str(folder / "secret.json"))
        secret = {
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": "metrics"},
            "data": {"token": TOKEN},
        }
        self.file = folder / "manifests.yaml"
        self.file.write_text(yaml.safe_dump_all([secret, *for_podman(manifests)]))
        podman("kube", "play", str(self.file))
        self.data = Path(podman("volume", "inspect", "-f", "{{.Mountpoint}}", "shop-stream-merge-data").stdout.strip())
        self._copy = folder / "job.yaml"
        """The job file as the host sees it."""
        text = job_file(manifests).replace("/data/", f"{self.data}/").replace("/etc/metrics/token", str(self.file))
        self._copy.write_text(text.replace("${BROKER}", broker.bootstrap))

    def close(self) -> None:
        self._producer.close()
        self._admin.close()

    def write(self, keys: range, name: str) -> None:
        """One event of each key; every tenth key is deleted."""
        for key in keys:
            row = {"id": key, "name": name}
            is_delete = key % 10 == 9
            lsn = 1_000 + self.produced
            source = {"lsn": lsn, "ts_ms": 1_700_000_000_000, "snapshot": "false"}
            images = (
                {"op": "d", "before": row, "after": None} if is_delete else {"op": "u", "before": None, "after": row}
            )
            value = {**images, "source": source}
            self._producer.send("orders", key=json.dumps({"id": key}).encode(), value=json.dumps(value).encode())
            self.produced += 1
            if is_delete:
                self.rows.pop(key, None)
            else:
                self.rows[key] = name
        self._producer.flush()

    def merged(self) -> int:
        """Records that commits account for, each as often as it was merged, and those of a planned batch."""
        return sum(step.offsets for step in trail(load(self._copy).queries[0])) if self._has_table() else 0

    def has_all_rows(self) -> bool:
        if not self._has_table():
            return False
        table = live_rows(self.data / "orders")
        return dict(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True)) == self.rows

    def _has_table(self) -> bool:
        return any((self.data / "orders" / "_delta_log").glob("*.json"))

    def status(self, path: str, **headers: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as err:
            return err.code
        except OSError:
            return 0

    def is_ready(self) -> bool:
        return self.status("/readyz") == 200


def state(what: str) -> str:
    return podman("inspect", "-f", f"{{{{{what}}}}}", CONTAINER).stdout.strip()


@pytest.fixture
def played(broker: services.Broker, tmp_path: Path) -> Iterator[Played]:
    helm.need()
    containers.need()
    containers.build()
    played: Played | None = None
    try:
        played = Played(broker, tmp_path)
        yield played
    finally:
        if played is not None:
            played.close()
        logs = podman("logs", CONTAINER, check=False)
        print(logs.stdout, logs.stderr)  # which pytest shows of a test that fails
        podman("kube", "down", str(tmp_path / "manifests.yaml"), check=False)
        podman("volume", "rm", "-f", "shop-stream-merge-data", "shop-stream-merge-job", "tmp", "scratch", check=False)
        podman("secret", "rm", "kafka", "metrics", check=False)


@pytest.mark.timeout(1200)
def test_the_pod_starts_is_killed_goes_on_and_stops(played: Played) -> None:
    """As uid 1000 with a read-only root, no capability, and the job file, Secrets and volumes of the manifests."""
    played.write(range(200), "first")
    wait_until(played.is_ready, "the job is ready", seconds=START_SECONDS)
    wait_until(played.has_all_rows, "all rows arrived", seconds=START_SECONDS)
    assert played.merged() == played.produced
    assert played.status("/metrics") == 401
    assert played.status("/metrics", Authorization=f"Bearer {TOKEN}") == 200
    assert podman("healthcheck", "run", CONTAINER).stdout.strip() == ""
    assert podman("exec", CONTAINER, "sh", "-c", "id -u; touch /a", check=False).stdout.strip() == "1000"
    query_id = (played.data / "checkpoint" / "metadata").read_text()

    played.write(range(100, 1_100), "second")
    wait_until(lambda: played.merged() > 300, "it is amid the second lot", seconds=START_SECONDS)
    os.kill(int(state(".State.Pid")), signal.SIGKILL)
    was_amid = not played.has_all_rows()
    wait_until(lambda: state(".RestartCount") == "1", "podman starts it again")
    wait_until(played.is_ready, "the job is ready again", seconds=START_SECONDS)
    wait_until(played.has_all_rows, "all rows arrived", seconds=START_SECONDS)

    assert was_amid
    assert played.merged() == played.produced
    assert (played.data / "checkpoint" / "metadata").read_text() == query_id
    podman("pod", "stop", "-t", "60", CONTAINER.removesuffix("-job"))
    assert state(".State.ExitCode") == "0"
