"""Sentences of the screen count one thing and many."""

from __future__ import annotations

import io

from rich.console import Console

from stream_merge.cli.screens.versions import show_explained
from stream_merge.jobs.kafka.replay import Replayed
from stream_merge.model.logs import counted
from stream_merge.tables.explain import Explained


def test_a_noun_is_singular_behind_one_alone() -> None:
    assert [counted(n, "file") for n in (0, 1, 2_000)] == ["0 files", "1 file", "2,000 files"]
    assert [counted(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_sentences_of_a_replay_and_of_explain_count_one() -> None:
    console = Console(file=io.StringIO(), width=200)
    explained = Explained(
        version=0, files=1, bytes=0, keys="id", shape=None, driver=None, merges=(), others=1, advice=()
    )
    show_explained(explained, "t", console=console)

    assert (
        Replayed(id="", records=1, changed=1, version=7).said() == "1 of 1 record replayed (1 row changed, version 7)"
    )
    said = console.file.getvalue().splitlines()
    assert (said[0], said[-1]) == ("t: version 0, 1 file, 0.0 MB, keys id", "a sink merged 0 of the newest 1 version")
