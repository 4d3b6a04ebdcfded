"""What orders the events of a key, and the names that a job's events have beside the row's columns."""

from __future__ import annotations

EPOCH, POSITION, STREAMED, PARTITION, OFFSET = "$epoch", "$position", "$streamed", "$partition", "$offset"
SEQUENCE = (EPOCH, POSITION, STREAMED, PARTITION, OFFSET)
"""The first three say where the event stands in the source; the others, which delivery of it came last. Fixed from
the first version on: the target stores it."""
POSITION_COMPONENTS = 3
COMPONENTS = ("c1", "c2", "c3", "c4", "c5")
"""Their names inside `__stream_merge_sequence`."""
BY_LOG_POSITION, BY_OFFSET = "postgresql/1", "offset/1"
"""Names of the sequence's definition, recorded with each commit: what `POSITION` is."""
DELETE = "$delete"
TOPIC = "$topic"
