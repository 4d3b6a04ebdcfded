"""Images that are built and run for a test, by Debian's podman and buildah, without a registry and without networks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from services import ROOT

IMAGE = "localhost/stream-merge:test"
_BASE = "localhost/debian:bookworm-slim"
_FOLDER = ROOT / ".jars" / "podman"
_HOST_TRUST = {"certificates": "/etc/ssl/certs/ca-certificates.crt", "cacerts": "/etc/ssl/certs/java/cacerts"}
_SETTINGS = {
    # crun refuses hybrid cgroups; without limits of its own podman asks for higher ones than a container here may set.
    "CONTAINERS_CONF": """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
""",
    "CONTAINERS_STORAGE_CONF": f"""[storage]
driver = "overlay"
runroot = "{_FOLDER}/run"
graphroot = "{_FOLDER}/storage"
""",
}


def need() -> None:
    """Skip the test, with the reason, where containers cannot be run."""
    if not (_FOLDER / ".found").exists():
        pytest.skip("podman is not there; 'make test-all' gets it")
    if podman("image", "exists", _BASE, check=False).returncode:
        podman("import", "-q", str(_FOLDER / "base.tar"), _BASE)
    tried = podman("run", "--rm", "--network=host", "--read-only", _BASE, "true", check=False)
    if tried.returncode:
        pytest.skip(f"podman cannot run a container here: {tried.stderr.strip().splitlines()[-1]}")


def build() -> None:
    """Build the image of this clone; what an earlier build has made is used again where nothing has changed."""
    command = ["buildah", "bud", "--layers", "--format=docker", "--isolation=chroot", f"--build-arg=BASE={_BASE}"]
    for name, file in _HOST_TRUST.items():
        command += ["--secret", f"id={name},src={file}"] if Path(file).is_file() else []
    command += ["-f", str(ROOT / "deployments" / "Dockerfile"), "-t", IMAGE, str(ROOT)]
    _done(command, check=True)


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman with settings that change nothing else on this machine; its answer."""
    return _done(["podman", *arguments], check=check)


def _done(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
    found = {}
    for name, text in _SETTINGS.items():
        file = _FOLDER / f"{name.lower()}.conf"
        if not file.exists():
            file.write_text(text)
        found[name] = str(file)
    done = subprocess.run(command, env={**os.environ, **found}, capture_output=True, text=True, check=False)
    if check and done.returncode:
        msg = f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise AssertionError(msg)
    return done
