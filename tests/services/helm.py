"""The chart's manifests as Helm renders them, and what Kubernetes accepts."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services import ROOT

CHART = ROOT / "deployments" / "chart"
KUBERNETES = "1.34"
_CRDS = ROOT / ".jars" / "crds"

Manifest = dict[str, Any]


def need() -> None:
    """Skip the test, with the reason, where there is no Helm."""
    if _program() is None:
        pytest.skip("Helm is not there; 'make test-all' gets it")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(_program()), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(values: Path | Mapping[str, Any], *, folder: Path) -> list[Manifest]:
    """Manifests of a release `shop` in the order of the chart; values are a file, or written to one in the folder."""
    if not isinstance(values, Path):
        (folder / "values.json").write_text(json.dumps(values))
        values = folder / "values.json"
    done = helm("template", "shop", CHART, "--kube-version", KUBERNETES, "-f", values)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def the(kind: str, manifests: list[Manifest]) -> Manifest:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def expect_accepted(manifest: Manifest) -> None:
    """Fail where Kubernetes, or an operator by its resource's definition, does not accept a manifest or a field.

    Skips the test where the definitions are missing.
    """
    group = manifest["apiVersion"].partition("/")[0]
    if group not in {"monitoring.coreos.com", "sparkoperator.k8s.io"}:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    file = _CRDS / f"{group}_{manifest['kind'].lower()}s.yaml"
    if not file.exists():
        pytest.skip(f"{file.name} is not there; 'make test-all' gets it")
    (version,) = yaml.safe_load(file.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    _refuse_others(schema)
    jsonschema.Draft202012Validator(schema).validate(manifest)  # its patterns are Go's, so the schema is not checked


def _refuse_others(schema: Any) -> None:
    """A field that is not defined is a mistake, which the server would drop without a word."""
    if isinstance(schema, list):
        for entry in schema:
            _refuse_others(entry)
    if not isinstance(schema, dict):
        return
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "metadata" in schema.get("properties", {})
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        schema.setdefault("additionalProperties", False)
    for part in schema.values():
        _refuse_others(part)


def _program() -> str | None:
    return shutil.which("helm") or shutil.which("helm", path=ROOT / ".jars" / "helm")
