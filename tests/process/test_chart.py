"""The manifests of `deployments`: what Helm renders, and what Kubernetes and its operators accept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from services import ROOT, helm, prometheus
from services.helm import CHART, Manifest, expect_accepted, rendered, the

from stream_merge.jobs.kafka import load

VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
QUERY = {"name": "orders", "topic": "t", "target": "/data/orders", "keys": "id", "checkpoint": "/data/checkpoint"}
SMALL: dict[str, Any] = {"job": {"kafka": {"bootstrap": "broker:9092"}, "queries": [QUERY]}}


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    helm.need()


@pytest.fixture(scope="module", params=VALUES, ids=lambda file: file.stem)
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return rendered(request.param, folder=tmp_path_factory.mktemp("values"))


def pod(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = the("StatefulSet", manifests)["spec"]["template"]["spec"]
    return spec


def job_file(manifests: list[Manifest]) -> dict[str, Any]:
    (text,) = [manifest["data"]["job.yaml"] for manifest in manifests if "job.yaml" in manifest.get("data", {})]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_helm_finds_no_mistake(values: Path) -> None:
    done = helm.helm("lint", "--strict", CHART, "-f", values)

    assert done.returncode == 0, done.stdout


def test_kubernetes_and_the_operator_accept_every_manifest(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        expect_accepted(manifest)


def test_the_spark_operator_accepts_the_application() -> None:
    for manifest in yaml.safe_load_all((ROOT / "deployments" / "spark-application.yaml").read_text()):
        expect_accepted(manifest)


def test_an_unknown_field_is_not_accepted() -> None:
    """Which the two tests above rely on."""
    manifest = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "spec": {"endpoint": []}}

    with pytest.raises(Exception, match="endpoint"):
        expect_accepted(manifest)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicas": 2}, "at '/replicas': value must be 1"),
        ({"replica": 1}, "additional properties 'replica' not allowed"),
        ({"resources": {"limits": {"memory": None}}}, "missing property 'memory'"),
        ({"job": {**SMALL["job"], "queries": [{**QUERY, "checkpoint": "here"}]}}, "at '/job/queries/0/checkpoint'"),
        (
            {"job": {**SMALL["job"], "kafka": {"bootstrap": "b:1", "security": {"password": "secret"}}}},
            "at '/job/kafka/security/password'",
        ),
        ({"secretEnv": {"KAFKA_PASSWORD": "secret"}}, "at '/secretEnv/KAFKA_PASSWORD'"),
    ],
)
def test_the_chart_refuses(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Two pods on one checkpoint, a misspelt value, no limit to derive the heap from, a secret in the values."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({**SMALL, **wrong}))

    done = helm.helm("template", "shop", CHART, "-f", tmp_path / "values.yaml")

    assert done.returncode != 0
    assert message in done.stderr


def test_two_pods_never_share_a_checkpoint(manifests: list[Manifest]) -> None:
    """A StatefulSet starts a pod again only when the old one is gone; a volume of one pod lets in no other either."""
    assert the("StatefulSet", manifests)["spec"]["replicas"] == 1
    for claim in (manifest for manifest in manifests if manifest["kind"] == "PersistentVolumeClaim"):
        assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_pod_has_no_rights_and_writes_only_where_it_must(manifests: list[Manifest]) -> None:
    (job,) = pod(manifests)["containers"]

    assert job["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    told = pod(manifests)["securityContext"]
    assert (told["runAsNonRoot"], told["runAsUser"], told["seccompProfile"]) == (True, 1000, {"type": "RuntimeDefault"})
    assert not pod(manifests)["automountServiceAccountToken"]
    writable = {mount["mountPath"] for mount in job["volumeMounts"] if not mount.get("readOnly")}
    assert {"/tmp", "/scratch"} <= writable <= {"/tmp", "/scratch", "/data"}
    assert {"name": "SPARK_LOCAL_DIRS", "value": "/scratch"} in job["env"]


def test_the_job_accepts_its_file(manifests: list[Manifest], tmp_path: Path) -> None:
    """Of the metrics, TLS and token belong to files that only the pod has."""
    found = job_file(manifests)
    assert found["metrics"]["host"] == "0.0.0.0"
    found["metrics"] = {name: found["metrics"][name] for name in ("host", "port")}
    found["kafka"].get("security", {}).pop("ca_file", None)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(found))

    settings = load(tmp_path / "job.yaml", environment={"KAFKA_PASSWORD": "secret"})

    (job,) = pod(manifests)["containers"]
    assert [(port["name"], port["containerPort"]) for port in job["ports"]] == [("metrics", settings.metrics.port)]


def test_numbers_of_the_job_file_stay_whole(tmp_path: Path) -> None:
    """Helm writes large numbers as floats in some places: 1e+06."""
    values = {"job": {**SMALL["job"], "defaults": {"epoch": 3, "limits": {"max_events_per_batch": 12_345_678}}}}

    assert job_file(rendered(values, folder=tmp_path))["defaults"] == values["job"]["defaults"]


def test_a_change_of_the_job_file_restarts_the_pod(tmp_path: Path) -> None:
    def annotations(topic: str) -> dict[str, str]:
        values = {"job": {**SMALL["job"], "queries": [{**QUERY, "topic": topic}]}}
        metadata: Manifest = the("StatefulSet", rendered(values, folder=tmp_path))["spec"]["template"]["metadata"]
        return dict(metadata["annotations"])

    assert annotations("a") == annotations("a")
    assert annotations("a") != annotations("b")


def test_probes_ask_what_the_job_serves(manifests: list[Manifest]) -> None:
    (job,) = pod(manifests)["containers"]
    scheme = "HTTPS" if "certificate_file" in job_file(manifests)["metrics"] else "HTTP"

    asked = {name: job[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}

    expected = {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert asked == {name: {"path": path, "port": "metrics", "scheme": scheme} for name, path in expected.items()}


def test_prometheus_loads_the_rules_that_the_operator_hands_it(tmp_path: Path) -> None:
    prometheus.need()
    rule = the("PrometheusRule", rendered(CHART / "ci" / "monitored-values.yaml", folder=tmp_path))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))

    assert prometheus.promtool("check", "rules", "rules.yaml", folder=tmp_path) == ""
    assert rule["spec"] == yaml.safe_load((ROOT / "grafana" / "alerts.yaml").read_text())


def test_series_have_the_job_that_the_alerts_select(tmp_path: Path) -> None:
    manifests = rendered(CHART / "ci" / "monitored-values.yaml", folder=tmp_path)
    monitor = the("ServiceMonitor", manifests)["spec"]

    labels = the("Service", manifests)["metadata"]["labels"]

    assert labels[monitor["jobLabel"]] == "stream-merge"
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["endpoints"][0]["scheme"] == "https"


def test_a_disruption_budget_never_blocks_a_drain(tmp_path: Path) -> None:
    budget = the("PodDisruptionBudget", rendered(CHART / "ci" / "monitored-values.yaml", folder=tmp_path))

    assert budget["spec"]["maxUnavailable"] == 1
    assert "PodDisruptionBudget" not in {manifest["kind"] for manifest in rendered(SMALL, folder=tmp_path)}
