"""What two parts of a round of upkeep come to; each outcome has its place."""

from __future__ import annotations

from itertools import product

from stream_merge.model.results import UPKEEP_OUTCOMES, Upkeep
from stream_merge.tables.upkeep import both


def test_of_two_parts_the_worse_one_is_told() -> None:
    """A stream that is behind, whose engine has tidied after itself, has both."""
    for one, other in product(UPKEEP_OUTCOMES, repeat=2):
        found = both(Upkeep(outcome=one, removed_files=1), Upkeep(outcome=other, removed_files=2))
        assert found.outcome in (one, other)
        assert found == both(Upkeep(outcome=other, removed_files=2), Upkeep(outcome=one, removed_files=1))
        assert found.removed_files == 3
    assert both(Upkeep(outcome="done"), Upkeep(outcome="behind")).outcome == "behind"
    assert both(Upkeep(outcome="behind"), Upkeep(outcome="failed", detail="full")).outcome == "failed"
