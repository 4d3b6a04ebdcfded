"""Confs of Spark: set for a block, named for commits, and read from `spark-defaults.conf` as Spark reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark
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
"""Else reads skip files that are missing or broken, and MERGE and OPTIMIZE would commit the loss (Delta 4.4)."""

JARS = "spark.jars"
PACKAGES = "spark.jars.packages"
EXCLUDES = "spark.jars.excludes"
REPOSITORIES = "spark.jars.repositories"

_BLANKS = " \t\f"
_ENTRY = re.compile(r"((?:\\.|[^\\ \t\f=:])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@contextmanager
def holding(session: SparkSession, wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set confs for a block (None unsets one), and restore them."""
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


def in_effect(conf: str, confs: Mapping[str, str]) -> str:
    """A conf's value in a session with these confs, else in the file, else empty."""
    return confs[conf] if conf in confs else spark_defaults().get(conf, "")


def listed(conf: str, confs: Mapping[str, str]) -> list[str]:
    """The entries of a comma-separated conf in a session with these confs."""
    return [entry.strip() for entry in in_effect(conf, confs).split(",") if entry.strip()]


def spark_home() -> Path:
    """The Spark that a local session starts."""
    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)


def spark_defaults() -> dict[str, str]:
    """The entries of `spark-defaults.conf`; empty without the file."""
    file = Path(os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf", "spark-defaults.conf")
    return properties(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}


def properties(text: str) -> dict[str, str]:
    """The entries of a properties file by the rules of `java.util.Properties.load`; Spark 4.2 trims the values."""
    entries = {}
    lines = iter(re.split(r"\r\n|\r|\n", text))
    for first in lines:
        line = first.lstrip(_BLANKS)
        if not line or line[0] in "#!":
            continue
        while _goes_on(line):
            line = line[:-1] + next(lines, "").lstrip(_BLANKS)
        key, value = _ENTRY.fullmatch(line).groups()  # type: ignore[union-attr]  # matches every line
        entries[_plain(key)] = _plain(value).strip()
    return entries


def _goes_on(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _plain(escaped: str) -> str:
    return _ESCAPED.sub(
        lambda match: chr(int(match[1], 16)) if match[1] else _CONTROLS.get(match[2], match[2]), escaped
    )
