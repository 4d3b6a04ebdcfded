"""What `spark-submit.sh` tells spark-submit. A stand-in prints its arguments; the real one runs in test_cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deployments" / "spark-submit.sh"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """A Spark without jars of its own, and a folder with one of ours."""
    home, jars = tmp_path / "spark home", tmp_path / "our jars"
    for folder in (home / "bin", home / "jars", home / "conf", jars):
        folder.mkdir(parents=True)
    (home / "bin" / "spark-submit").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (home / "bin" / "spark-submit").chmod(0o755)
    (jars / "delta-spark_4.2_2.13-4.4.0.jar").touch()
    return {"SPARK_HOME": str(home), "STREAM_MERGE_JARS": str(jars), "PYSPARK_PYTHON": sys.executable}


def submitted(places: dict[str, str], *options: str, script: Path = SCRIPT) -> list[str]:
    command = ["/usr/bin/env", "bash", str(script), *options, "job.yaml", "--once"]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **places}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ([], ""),
        (["--jars", "a.jar,b.jar"], "a.jar,b.jar,"),
        (["--jars=a.jar"], "a.jar,"),
        (["--conf", "spark.jars=a.jar"], "a.jar,"),
        (["-c", "spark.jars=a.jar"], "a.jar,"),
        (["--conf=spark.jars=a.jar"], "a.jar,"),
        (["--conf", "spark.jars=a.jar", "--jars", "b.jar"], "b.jar,"),  # as spark-submit has it
    ],
)
def test_jars_of_ones_own_come_along(places: dict[str, str], options: list[str], own: str) -> None:
    told = submitted(places, "--conf", "spark.jars.packages=g:a:1", *options)

    assert told.count("--jars") == 1
    assert told[told.index("--jars") + 1] == f"{own}{places['STREAM_MERGE_JARS']}/delta-spark_4.2_2.13-4.4.0.jar"
    assert "spark.jars.packages=g:a:1" in told
    assert told[-4:] == [str(SCRIPT.with_name("job.py")), "run", "job.yaml", "--once"]


def test_jars_of_the_defaults_come_along(places: dict[str, str]) -> None:
    Path(places["SPARK_HOME"], "conf", "spark-defaults.conf").write_text(
        "spark.jars  a.jar\nspark.jars.packages g:a:1\n"
    )

    told = submitted(places)

    assert told[told.index("--jars") + 1].startswith("a.jar,")


@pytest.mark.parametrize("form", ["{option} {file}", "{option}={file}"])
def test_jars_of_a_file_of_properties_count_instead(places: dict[str, str], tmp_path: Path, form: str) -> None:
    Path(places["SPARK_HOME"], "conf", "spark-defaults.conf").write_text("spark.jars  a.jar\n")
    file = tmp_path / "my.conf"
    file.write_text("spark.jars = mine.jar\n")

    told = submitted(places, *form.format(option="--properties-file", file=file).split(" "))

    assert told[told.index("--jars") + 1].startswith("mine.jar,")
    assert str(file) in " ".join(told)


def test_a_link_leads_to_the_script(places: dict[str, str], tmp_path: Path) -> None:
    link = tmp_path / "spark-submit.sh"
    link.symlink_to(SCRIPT)

    assert str(SCRIPT.with_name("job.py")) in submitted(places, script=link)
