"""Which calls of sinks may be at work on one table at the same time."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import pytest

from stream_merge import ConfigError
from stream_merge.merge.running_calls import Part, claims
from stream_merge.model.settings import MergeSpec

LOCAL, ON_S3 = "file:/lake/t", "s3a://lake/t"


def spec(*, promised: bool) -> MergeSpec:
    return MergeSpec(target="t", keys=("id",), sequence_by=("lsn",), single_writer=promised)


def held(
    identity: str | None, settings: MergeSpec, location: str, *, part: Part | None = None
) -> AbstractContextManager[None]:
    return claims.held(object(), identity, settings, location, part=part)


@pytest.mark.parametrize("promises", [(True, True), (True, False), (False, True)])
def test_a_sink_that_was_to_be_alone_is_told_of_another_one(promises: tuple[bool, bool]) -> None:
    """On an object store Spark overwrites what delta-rs commits between its look and its write."""
    first, second = (spec(promised=promised) for promised in promises)
    with held("a", first, ON_S3):
        with (
            pytest.raises(ConfigError, match="at the same time, and one has single_writer=True"),
            held("b", second, ON_S3),
        ):
            pass
        with held("b", second, "s3a://lake/another"):
            pass
    with held("b", second, ON_S3):  # one after the other, as after a restart
        pass


@pytest.mark.parametrize(("location", "promised"), [(ON_S3, False), (LOCAL, True)])
def test_sinks_whose_commits_exclude_each_other_work_side_by_side(location: str, promised: bool) -> None:
    """Spark's in one process do, everywhere."""
    with ExitStack() as together:
        for identity in ("a", "b", None):
            together.enter_context(held(identity, spec(promised=promised), location))


def test_one_identity_is_at_work_once() -> None:
    with (
        held("a", spec(promised=False), LOCAL),
        pytest.raises(ConfigError, match="under the same identity 'a'"),
        held("a", spec(promised=False), LOCAL),
    ):
        pass


def test_a_sink_is_given_one_thing_after_the_other() -> None:
    """From two threads: whoever commits second would be taken for the first, delivered again."""
    sink, only = object(), spec(promised=False)
    with (
        claims.held(sink, "a", only, LOCAL),
        pytest.raises(ConfigError, match="this sink is already merging into 't'"),
        claims.held(sink, "a", only, LOCAL),
    ):
        pass
    with claims.held(sink, "a", only, LOCAL):
        pass


def test_a_batch_is_given_whole() -> None:
    """The table would take the second part of its events for the first one, delivered again."""

    def part(run_id: str, batch_id: int, events: int) -> Part:
        return Part(run_id=run_id, batch_id=batch_id, events=events)

    only, place = spec(promised=False), "file:/lake/once"
    with pytest.raises(ValueError, match="lost"), held("a", only, place, part=part("1", 4, 0)):
        raise ValueError("lost")  # noqa: EM101
    again, later, started_anew = part("1", 4, 1), part("1", 5, 1), part("2", 5, 2)
    for given in (again, again, later, started_anew):
        with held("a", only, place, part=given):
            pass
    with (
        pytest.raises(ConfigError, match="a sink has already merged other events of batch 5 into 't'"),
        held("a", only, place, part=part("2", 5, 3)),
    ):
        pass
    with held("b", only, place, part=part("2", 5, 3)), held(None, only, place, part=part("2", 5, 3)):
        pass
