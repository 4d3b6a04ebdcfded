"""What orders the events of a key, and the names that a job's events have beside the row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

EPOCH, POSITION, STREAMED, PARTITION, OFFSET = "$epoch", "$position", "$streamed", "$partition", "$offset"
SEQUENCE = (EPOCH, POSITION, STREAMED, PARTITION, OFFSET)
"""The first three say where the event stands in the source; the others, which delivery of it came last. Fixed from
the first version on: the target stores it."""
POSITION_COMPONENTS = 3
COMPONENTS = ("c1", "c2", "c3", "c4", "c5")
"""Their names inside `__stream_merge_sequence`."""
BY_OFFSET = "offset/1"
"""Name of the sequence's definition, recorded with each commit: what `POSITION` is. Others: `Database.ordering`."""
DELETE = "$delete"
TOPIC = "$topic"


class Placing(Enum):
    """Where rows stand that a snapshot has read (`snapshot_reads`)."""

    FIRST = auto()
    """At the beginning of the epoch: no change was merged before."""
    BEHIND = auto()
    """Behind the newest change of their key before them."""
    AS_TOLD = auto()
    """Where the connector says: rows of the table came from other topics, whose offsets do not compare."""


class EpochBefore(NamedTuple):
    """Records of a batch that are of the epoch before the query's."""

    epoch: int
    ends: Mapping[tuple[str, int], int | None]
    """Topic and partition -> offset behind the last of them; None: all there."""
