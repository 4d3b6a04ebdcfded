"""The engines of each test: as shipped, and where a test or its file is marked with `engines`, those in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
from deliveries import STREAMS, ChangeStream
from delta_log import check_table
from disk import on_disk

HISTORIES = "test_differential"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("engines")
    if marker is not None:
        metafunc.parametrize(engines.PARAMETER, marker.args, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--engines shipped` each test runs once; with `each` only random histories change engines on their way.

    Of these, one engine alone has its turn in each run, by the seed, where `--turn` does not choose; `make soak` has
    all of them.
    """
    wanted = config.option.engines
    alone = (engines.AS_SHIPPED, "spark", engines.REWRITE)[config.option.seed % 3]
    if wanted == "all":
        return

    def is_wanted(item: pytest.Item) -> bool:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        how = params.get(engines.PARAMETER, engines.AS_SHIPPED)
        if wanted == "shipped":
            return bool(how == engines.AS_SHIPPED)
        if item.path.stem == HISTORIES:
            return config.option.turn is not None or how in (engines.AT_RANDOM, alone)
        return how != engines.AT_RANDOM

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)


@pytest.fixture(autouse=True)
def judged_by(request: pytest.FixtureRequest, seed: int) -> Iterator[str]:
    """How the sinks of the test choose their engine."""
    how = getattr(request, "param", engines.AS_SHIPPED)
    with engines.judged(how, f"{seed} {request.node.nodeid}"):
        yield how


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """With `--core` the last batch of each stream is delivered again behind a test that has passed."""
    ChangeStream.replays_each = not pyfuncitem.config.option.core
    STREAMS.clear()
    done = yield
    for stream in STREAMS:
        stream.replay_last()
    return done


@pytest.fixture(autouse=True)
def commits_keep_the_protocol(request: pytest.FixtureRequest, tmp_path: Path, judged_by: str) -> Iterator[None]:
    """What the driver has committed is read again by a reader that shares no code with it."""
    if judged_by != engines.REWRITE:
        yield
        return
    folders = [tmp_path]
    if request.config.option.place != "disk" and "tmp_table" in request.fixturenames:
        folders.append(on_disk(request.getfixturevalue("tmp_table")).parent)
    yield
    for log in (log for folder in folders for log in folder.rglob("_delta_log")):
        if any(b'"engineInfo":"stream_merge/' in commit.read_bytes() for commit in log.glob("*.json")):
            check_table(log.parent)
