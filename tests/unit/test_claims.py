"""Which calls of sinks may be at work on one table at the same time."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from stream_merge import ConfigError
from stream_merge.microbatch.claims import claims
from stream_merge.model.settings import MergeSpec

LOCAL, ON_S3 = "file:/lake/t", "s3a://lake/t"


def spec(*, promised: bool) -> MergeSpec:
    return MergeSpec(target="t", keys=("id",), sequence_by=("lsn",), single_writer=promised)


@pytest.mark.parametrize("promises", [(True, True), (True, False), (False, True)])
def test_a_sink_that_was_to_be_alone_is_told_of_another_one(promises: tuple[bool, bool]) -> None:
    """On an object store Spark overwrites what delta-rs commits between its look and its write."""
    first, second = (spec(promised=promised) for promised in promises)
    with claims.held(object(), "a", first, ON_S3):
        with (
            pytest.raises(ConfigError, match="at the same time, and one has single_writer=True"),
            claims.held(object(), "b", second, ON_S3),
        ):
            pass
        with claims.held(object(), "b", second, "s3a://lake/another"):
            pass
    with claims.held(object(), "b", second, ON_S3):  # one after the other, as after a restart
        pass


@pytest.mark.parametrize(("location", "promised"), [(ON_S3, False), (LOCAL, True)])
def test_sinks_whose_commits_exclude_each_other_work_side_by_side(location: str, promised: bool) -> None:
    """Spark's in one process do, everywhere."""
    with ExitStack() as held:
        for identity in ("a", "b", None):
            held.enter_context(claims.held(object(), identity, spec(promised=promised), location))


def test_one_identity_is_at_work_once() -> None:
    with (
        claims.held(object(), "a", spec(promised=False), LOCAL),
        pytest.raises(ConfigError, match="under the same identity 'a'"),
        claims.held(object(), "a", spec(promised=False), LOCAL),
    ):
        pass
