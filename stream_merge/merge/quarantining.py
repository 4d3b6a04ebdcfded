"""Failed batches that go to the quarantine table instead, complete and once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell
from stream_merge.model.results import TARGET_FAILED
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import is_applied
from stream_merge.spark.confs import USER_METADATA_CONF
from stream_merge.spark.errors import reason
from stream_merge.spark.identity import caller
from stream_merge.spark.jvm import in_session
from stream_merge.tables import retry
from stream_merge.tables.delivery import fingerprint
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.side_table import SideCommit
from stream_merge.tables.table import Tables

log = logging.getLogger(__name__)


def _side_commit(
    batch_df: DataFrame, batch_id: int, spec: MergeSpec, session: SparkSession, sleep: Callable[[float], None]
) -> SideCommit:
    """The commit of a batch to the quarantine table.

    It has the target's name: a target that failed may have no readable id, and sinks may share a quarantine table.
    """
    who = caller(batch_df, spec)
    return SideCommit(
        app_id=who.app_id("quarantine-broken", about=spec.target.plain),
        batch_id=batch_id,
        run=lambda attempt: retry.run(attempt, spec.retry, sleep=sleep),
        fingerprint=fingerprint(who, batch_id, session),
        user=batch_df.sparkSession.conf.get(USER_METADATA_CONF, None),
    )


def write(
    batch_df: DataFrame,
    batch_id: int,
    spec: MergeSpec,
    session: SparkSession,
    *,
    error: Exception,
    sleep: Callable[[float], None],
) -> Mapping[str, int]:
    """Commit all events of a batch to the quarantine table, once per batch; returns numbers written by reason.

    A repeated batch may have more of them, from a stream or settings that were repaired since: these are added. An
    event that also breaks the contract may be there already, for that reason.
    """
    return quarantine.write_whole(
        in_session(batch_df, session),
        spec.quarantine_table,
        reason=TARGET_FAILED,
        error=reason(error),
        query=caller(batch_df, spec).query,
        commit=_side_commit(batch_df, batch_id, spec, session, sleep),
    )


def may_hold(batch_df: DataFrame, batch_id: int, spec: MergeSpec, tables: Tables) -> bool:
    """Whether the target holds the batch, or nobody can say."""
    app_id = caller(batch_df, spec).app_id("target")
    try:
        target = tables.target.snapshot()
        return target is not None and is_applied(target.transaction, app_id, batch_id)
    except ConfigError:
        return False  # what is there is no Delta table
    except Exception:
        tell(log.warning, "target_unreadable", target=spec.label, batch_id=batch_id, exc_info=True)
        return True


def is_written(
    batch_df: DataFrame, batch_id: int, spec: MergeSpec, session: SparkSession, sleep: Callable[[float], None]
) -> bool:
    """Whether `write` has committed this batch before."""
    commit = _side_commit(batch_df, batch_id, spec, session, sleep)
    return quarantine.is_written(session, spec.quarantine_table, commit)
