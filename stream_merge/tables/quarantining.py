"""Which way the invalid events of a batch go to the quarantine: by delta-rs where the driver has them, or by Spark."""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge.errors import MergeFailedError
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.batch import Batch
from stream_merge.spark.errors import reason
from stream_merge.tables import quarantine, quarantine_delta_rs
from stream_merge.tables.reader import Store
from stream_merge.tables.side_commits import SideCommit

log = logging.getLogger(__name__)


def write(
    batch: Batch,
    spec: MergeSpec,
    store: Store,
    session: SparkSession,
    *,
    query: str,
    now_micros: int,
    commit: SideCommit,
) -> None:
    """Append the invalid events of a batch, once per batch.

    delta-rs writes only what belongs to this sink alone: a table that was named may be shared with another
    sink, whose commit by Spark at the same moment a local disk would not keep apart from ours. It writes only
    under a transaction id; of a batch that is here already Spark finds what is missing.
    """
    table, invalid = spec.quarantine_table, batch.rows.invalid_at_hand()
    if invalid is not None and commit.app_id is not None and spec.quarantine_target is None:
        try:
            if quarantine_delta_rs.write(
                invalid,
                table,
                lambda: store.native(session, table),
                query=query,
                recorded_micros=now_micros,
                commit=commit,
            ):
                return
        except MergeFailedError as err:
            tell(log.warning, "quarantine_left_to_spark", target=spec.label, error=reason(err))
    recorded_at = F.timestamp_micros(F.lit(now_micros))
    quarantine.write(batch.rows.invalid(), table, query=query, recorded_at=recorded_at, commit=commit)
