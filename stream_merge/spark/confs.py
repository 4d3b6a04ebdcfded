"""Confs of a session that hold for a block only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

APP_ID_CONF = "spark.databricks.delta.write.txnAppId"
BATCH_ID_CONF = "spark.databricks.delta.write.txnVersion"
USER_METADATA_CONF = "spark.databricks.delta.commitInfo.userMetadata"
AUTO_RESET_CONF = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
TIMESTAMP_CONF = "spark.sql.parquet.outputTimestampType"
TIMESTAMP_MICROS = "TIMESTAMP_MICROS"
"""Spark's default is INT96, from which delta-rs reads years outside of 1677 to 2262 wrongly (1.6)."""
WHOLE_READS: Mapping[str, str] = dict.fromkeys(
    ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles"), "false"
)
"""Else reads go without the rows of files that are not there, or broken. A MERGE would take these for absent, OPTIMIZE
would leave them out, and both would commit the loss of them (Delta 4.4)."""


@contextmanager
def holding(session: SparkSession, wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set confs, None unsets one, and restore them whatever happens."""
    before = {key: session.conf.get(key, None) for key in wanted}
    try:
        _set(session, wanted)
        yield
    finally:
        _set(session, before)


def _set(session: SparkSession, confs: Mapping[str, str | None]) -> None:
    for key, value in confs.items():
        if value is None:
            session.conf.unset(key)
        else:
            session.conf.set(key, value)


def committed_as(app_id: str | None, version: int, user_metadata: str | None) -> dict[str, str | None]:
    """Confs by which a DML command of Delta commits under a transaction id and with metadata (3.3 and 4.4).

    Delta skips a command whose id is recorded with this version or a later one (`DeltaCommand.hasBeenExecuted`).
    """
    return {
        APP_ID_CONF: app_id,
        BATCH_ID_CONF: None if app_id is None else str(version),
        USER_METADATA_CONF: user_metadata,
        # Auto-reset drops the id while the commit is built, so a second attempt would go without it.
        AUTO_RESET_CONF: "false",
    }
