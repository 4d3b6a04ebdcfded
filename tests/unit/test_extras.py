"""What works without the extra `cli`."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

from stream_merge.cli import EXTRA

WITHOUT = dedent(
    f"""
    import sys
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {EXTRA!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    sys.meta_path.insert(0, Missing())
    """
)


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_sink_in_your_own_code_needs_no_package_of_the_extra():
    done = _run("import stream_merge, stream_merge.session, stream_merge.testing")

    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_says_what_to_install():
    done = _run("from stream_merge.cli import main; main()")

    assert (done.returncode, done.stderr) == (
        2,
        "stream-merge: typer is not installed; run: pip install 'stream-merge[cli]'\n",
    )
