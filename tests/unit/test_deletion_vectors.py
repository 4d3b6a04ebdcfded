"""From which size of files on marking rows is cheaper than writing them again."""

from __future__ import annotations

from stream_merge.engines.costs import Work, favours_deletion_vectors


def test_deletion_vectors_pay_off_from_some_size_on():
    """Their fixed price is about a second more."""
    assert not favours_deletion_vectors(Work(events=1_000, bytes=10_000_000, cores=2))
    assert favours_deletion_vectors(Work(events=10_000, bytes=400_000_000, cores=2))
    assert not favours_deletion_vectors(Work(events=10_000, bytes=400_000_000, cores=64))
