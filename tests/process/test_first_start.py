"""A first start that fails is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, since a JVM starts once per process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_jars_that_do_not_resolve_are_one_sentence_from_a_real_start(tmp_path):
    """A version that nobody published, with an empty Ivy cache and a repository that is not there."""
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="none"/><resolvers>'
        f'<ibiblio name="none" m2compatible="true" root="{(tmp_path / "no-repository").as_uri()}"/>'
        "</resolvers></ivysettings>"
    )

    done = run_python(
        f"""
        from stream_merge.errors import ConfigError
        from stream_merge.session import local_session

        try:
            local_session("no jars", memory="512m", confs={{
                "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:9.9.9",
                "spark.jars.ivy": {str(tmp_path / "ivy")!r},
                "spark.jars.ivySettings": {str(settings)!r},
            }})
        except ConfigError as err:
            print(err)
        """
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[JAR_DOWNLOAD_FAILED] io.delta:delta-spark_4.2_2.13:")
    assert "cannot be resolved" in done.stdout
    assert done.stdout.count("\n") == 1


def test_missing_java_is_one_sentence_from_a_real_start(tmp_path):
    done = run_python(
        """
        from stream_merge.errors import ConfigError
        from stream_merge.session import local_session

        try:
            local_session("no java")
        except ConfigError as err:
            print(err)
        """,
        PATH=str(tmp_path),
        JAVA_HOME="",
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[SPARK_CANNOT_START] no java was found in JAVA_HOME or on the PATH; install")
