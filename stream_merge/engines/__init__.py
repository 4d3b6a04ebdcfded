"""Who executes the clauses of a merge: one folder for each engine, and which of them merges a batch."""

from __future__ import annotations

from stream_merge.engines.base import Engine
from stream_merge.engines.driver.engine import Driver
from stream_merge.engines.spark.engine import Spark

ENGINES: tuple[Engine, ...] = (Driver(), Spark())
"""Every engine there is; of equally cheap ones the first merges the batch."""
