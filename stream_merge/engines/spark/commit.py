"""One MERGE by Spark as one commit, under the sink's transaction id and metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from delta.tables import DeltaMergeBuilder
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.errors import CommitStateUnknownError, MergeFailedError
from stream_merge.model import names
from stream_merge.model.snapshot import CommitRecord, TableSnapshot, is_applied
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import columns
from stream_merge.spark.confs import committed_as, holding
from stream_merge.spark.delta import LAST_COMMIT_VERSION_CONF, merge_metrics
from stream_merge.spark.versions import ANSWERS_MERGE
from stream_merge.tables import spark_table
from stream_merge.tables.spark_table import delta_table

MATERIALIZE_CONF = "spark.databricks.delta.merge.materializeSource"
AUTO_COMPACT_CONF = "spark.databricks.delta.autoCompact.enabled"
"""Overrides a table's property (`AutoCompactUtils`, Delta 3.3 and 4.4)."""
DELETION_VECTORS_CONF = "spark.databricks.delta.merge.deletionVectors.persistent"
"""Whether a MERGE into a table with deletion vectors writes any (Delta 4.4)."""
RECORDING_CONFS = ("spark.databricks.delta.commitInfo.enabled", "spark.databricks.delta.history.metricsEnabled")
"""Whether a commit says who made it, and what it did; on unless somebody switches them off."""


class SparkCommits:
    """The commits of a table, by Spark."""

    def __init__(self, session: SparkSession, target: TableRef) -> None:
        self._session = session
        self._target = target

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        return spark_table.find(self._session, self._target)

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        return spark_table.history(self._session, self._target, newer_than=newer_than, up_to=up_to)


def record(session: SparkSession, target: TableRef, tag: CommitTag) -> MergeReport:
    """Commit a tag's transaction id and metadata alone: a MERGE that matches no row."""
    with committing(session, tag):
        nothing = delta_table(session, target).alias("t").merge(session.range(0).alias("s"), F.lit(False))
        return executed(session, target, nothing.whenMatchedDelete(), tag)


def add_filled(
    session: SparkSession, target: TableRef, values: Mapping[str, Column], within: Column | None, tag: CommitTag
) -> MergeReport:
    """Add missing columns with a value in all rows `within` (None: all), in one commit. Cost: rewrites these rows.

    The version that the handle shows is the one that the MERGE changes: Delta refuses it where the table has got a
    column since (`DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS`, 4.4).
    """
    table = delta_table(session, target)
    known = table.toDF().columns
    new = {name: value for name, value in values.items() if columns.resolve(name, known, case_sensitive=False) is None}
    if not new:
        return MergeReport()
    source = session.range(1).select(*(value.alias(name) for name, value in new.items())).alias("s")
    with committing(session, tag):
        builder = table.alias("t").merge(source, F.lit(True) if within is None else within)
        builder = builder.whenMatchedUpdate(set={names.quote(name): columns.column(name, "s") for name in new})
        return executed(session, target, builder.withSchemaEvolution(), tag)


def executed(session: SparkSession, target: TableRef, builder: DeltaMergeBuilder, tag: CommitTag) -> MergeReport:
    """Run a MERGE and report what it did; without a row in its answer Delta knew its transaction id already."""
    if not ANSWERS_MERGE:
        return _executed_unanswered(session, target, builder, tag)
    result = builder.execute()
    rows = result.collect()
    metrics = merge_metrics(result)
    if not rows:
        return MergeReport(already_applied=True)
    counts = rows[0]
    version = session.conf.get(LAST_COMMIT_VERSION_CONF, None)
    return MergeReport(
        inserted=counts["num_inserted_rows"],
        updated=counts["num_updated_rows"],
        deleted=counts["num_deleted_rows"],
        version=None if not version else int(version),
        metrics=metrics,
    )


def _executed_unanswered(
    session: SparkSession, target: TableRef, builder: DeltaMergeBuilder, tag: CommitTag
) -> MergeReport:
    """`executed` for Delta versions whose MERGE returns no frame: the counts come from its commit (a Spark job).

    Delta notes no commit for the session where it knew the transaction id already, and where a MERGE without one has
    changed nothing.
    """
    commits = SparkCommits(session, target)
    before = commits.find()
    builder.execute()
    noted, after = session.conf.get(LAST_COMMIT_VERSION_CONF, None), commits.find()
    if before is None or after is None:
        msg = (
            f"[TABLE_NOT_FOUND] target {target!r} disappeared after batch {tag.batch_id} was read; restore it, then"
            " restart the query"
        )
        raise MergeFailedError(msg, target=target, batch_id=tag.batch_id)
    if not noted:
        return MergeReport(already_applied=is_applied(after.transaction, tag.app_id, tag.batch_id))
    for commit in commits.history(newer_than=before.version, up_to=after.version):
        if tag.token in (commit.user_metadata or ""):
            return MergeReport(
                inserted=commit.metrics["numTargetRowsInserted"],
                updated=commit.metrics["numTargetRowsUpdated"],
                deleted=commit.metrics["numTargetRowsDeleted"],
                version=commit.version,
                metrics=commit.metrics,
            )
    msg = (
        f"[COMMIT_STATE_UNKNOWN] batch {tag.batch_id} was committed to {target!r} as version {noted} or earlier, but"
        f" the table's history lacks {tag.token!r}; restart the query, which checks it again"
    )
    raise CommitStateUnknownError(msg, target=target, batch_id=tag.batch_id)


@contextmanager
def committing(session: SparkSession, tag: CommitTag, *, deletion_vectors: bool | None = None) -> Iterator[None]:
    """Set the confs that a commit takes its identity from, and restore them whatever happens."""
    wanted: dict[str, str | None] = {
        **committed_as(tag.app_id, tag.batch_id, tag.user_metadata),
        # The events are materialised already; Delta would write them to disk once more.
        MATERIALIZE_CONF: "none",
        LAST_COMMIT_VERSION_CONF: None,
        # Its OPTIMIZE would come between a MERGE and its answer, under the sink's metadata; `Maintenance` packs files.
        AUTO_COMPACT_CONF: "false",
        # Where the MERGE gives no answer, they are its answer.
        **({} if ANSWERS_MERGE else dict.fromkeys(RECORDING_CONFS, "true")),
    }
    if deletion_vectors is not None:
        wanted[DELETION_VECTORS_CONF] = str(deletion_vectors).lower()
    with holding(session, wanted):
        yield
