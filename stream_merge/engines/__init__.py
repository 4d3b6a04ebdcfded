"""Who executes the clauses of a merge: one folder for each way, and which of them has a batch."""

from __future__ import annotations

from stream_merge.engines.base import Engine
from stream_merge.engines.delta_rs.engine import DeltaRs
from stream_merge.engines.merge_on_read.engine import MergeOnRead
from stream_merge.engines.spark.engine import Spark

ENGINES: tuple[Engine, ...] = (DeltaRs(), MergeOnRead(), Spark())
"""Every engine there is; of equally cheap ones the first has the batch."""
