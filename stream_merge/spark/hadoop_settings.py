"""Hadoop's settings of a Spark session, secrets among them, and that delta-rs cannot be told what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from stream_merge.spark.jvm import java_class


class NotTranslatedError(ValueError):
    """Spark reaches the store in a way that delta-rs cannot be told; the sentence says which."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HadoopSettings:
    """Look-ups by whole names, each a call into the JVM or two. What they give is never shown."""

    setting: Callable[[str], str | None]
    secret: Callable[[str], str | None]
    """As `setting`, also from Hadoop's credential stores."""


def hadoop_settings(session: SparkSession) -> HadoopSettings:
    """Those that hold for the session now."""
    conf = session._jsparkSession.sessionState().newHadoopConf()
    text = java_class(session, "java.lang.String")

    def secret(name: str) -> str | None:
        found = conf.getPassword(name)
        return None if found is None else str(text.copyValueOf(found))

    return HadoopSettings(setting=conf.get, secret=secret)
