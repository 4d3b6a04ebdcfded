"""A sink's own Spark session: what it sets there, and what others set elsewhere, does not meet."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from stream_merge.spark.confs import APP_ID_CONF, BATCH_ID_CONF, TIMESTAMP_CONF, TIMESTAMP_MICROS, WHOLE_READS
from stream_merge.spark.jvm import owned_session, same_session

STALENESS_CONF = "spark.databricks.delta.stalenessLimit"
"""Lets reads go without the newest version of a table for a while; 0 unless somebody sets it."""


class OwnSession:
    """A copy of the session that the batches come from, with the confs it had when it was first seen."""

    def __init__(self) -> None:
        self._sessions: tuple[SparkSession, SparkSession] | None = None
        self.ignored: dict[str, str | None] = {}
        """What the batches' own session says of `WHOLE_READS` that the copy does not: their source is read by it."""

    def of(self, batch_df: DataFrame) -> SparkSession:
        """The copy for this batch; a new one when the batches come from another session."""
        theirs = batch_df.sparkSession
        if self._sessions is None or not same_session(self._sessions[0], theirs):
            ours = owned_session(theirs)
            for conf in (APP_ID_CONF, BATCH_ID_CONF):
                # Ids of the user's own writes: under them Delta would drop appends to the side tables as repeated.
                ours.conf.unset(conf)
            ours.conf.set(TIMESTAMP_CONF, TIMESTAMP_MICROS)
            # A look at the rows must see what a MERGE would: it always takes the newest version (Delta 4.4).
            ours.conf.set(STALENESS_CONF, "0")
            said = {conf: theirs.conf.get(conf, whole) for conf, whole in WHOLE_READS.items()}
            self.ignored = {conf: value for conf, value in said.items() if str(value).lower() != WHOLE_READS[conf]}
            self._sessions = (theirs, ours)
        return self._sessions[1]
