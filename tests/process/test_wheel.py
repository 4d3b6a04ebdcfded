"""The wheel, built as `pip` builds it, in an environment that has nothing else of this repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

from stream_merge.spark.log_store import JAR, REPOSITORY

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def output(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What a command prints; the test fails with all that it said."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def named(requirement: str) -> str:
    """The distribution that a requirement is about."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found.group()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    output([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT], ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what it depends on is read from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index"]
    output([*pip, "--quiet", "--disable-pip-version-check", wheel], folder)
    # A .pth file in a folder that is added like this, such as that of an editable install, is not read.
    others = metadata.distribution("pyspark").locate_file("")
    (packages / "dependencies.pth").write_text(f"{others}\n")
    return folder


def test_the_installed_package_is_the_one_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    said = output(
        [installed / "bin" / "python", "-c", "import stream_merge as s; print(s.__file__, *s.__all__)"], tmp_path
    )

    file, *names = said.split()
    assert Path(file).is_relative_to(installed)
    assert "MergeSink" in names


def test_the_installed_command_knows_its_version_and_its_commands(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "stream-merge"

    assert output([command, "--version"], tmp_path) == f"stream-merge {PROJECT['version']}\n"
    helped = output([command, "--help"], tmp_path)
    assert [name for name in ("demo", "files", "explain", "run", "check", "jars", "stop") if name not in helped] == []


def test_what_is_run_or_provisioned_as_a_file_is_installed(installed: Path, tmp_path: Path) -> None:
    """`spark-submit.sh` finds the Python that it was installed with, before it says what it lacks."""
    share = installed / "share" / "stream-merge"
    script = share / "spark-submit.sh"

    for name in ("dashboards/overview.json", "alerts.yaml"):
        assert (share / "grafana" / name).read_bytes() == (ROOT / "grafana" / name).read_bytes()
    assert list((share / "grafana" / "provisioning").rglob("*.yaml"))
    assert (share / "job.py").is_file()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "SPARK_HOME")}
    environment |= {"STREAM_MERGE_JARS": str(tmp_path), "PS4": "+", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-x", script, "job.yaml"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert os.access(script, os.X_OK)
    assert done.returncode == 2
    assert f"no jars are in {tmp_path}; 'stream-merge jars {tmp_path}' fills it" in done.stderr
    assert f"PYSPARK_PYTHON={share}/../../bin/python" in done.stderr


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """No test, no bench, and classifiers that exist (a registry refuses others)."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = Parser().parsestr(archive.read(about).decode())

    assert {name.split("/")[0] for name in names if ".data/" not in name and ".dist-info/" not in name} == {
        "stream_merge"
    }
    assert {"stream_merge/py.typed", f"stream_merge/spark/{JAR.relative_to(REPOSITORY.parent)}"} <= set(names)
    assert described["Requires-Python"] == PROJECT["requires-python"]
    assert described.get_all("Classifier") == PROJECT["classifiers"]
    pinned = {text for text in described.get_all("Requires-Dist", []) if "extra ==" not in text}
    assert set(map(named, pinned)) == set(map(named, PROJECT["dependencies"]))
