"""The jars that reading Kafka needs beside Delta's."""

from __future__ import annotations

from pathlib import Path

from stream_merge.errors import ConfigError

CONNECTOR = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
"""What Spark 4.2's Kafka source needs (deployments/pom.xml resolves them)."""


def conf(folder: str | None) -> dict[str, str]:
    """The Spark conf that puts the connector on the class path; None where Spark has it already.

    Raises:
        ConfigError: the folder lacks a jar.
    """
    if folder is None:
        return {}
    found = {name: sorted(Path(folder).glob(f"{name}*.jar")) for name in CONNECTOR}
    missing = [name for name, jars in found.items() if not jars]
    if missing:
        msg = f"--jars {folder!r} lacks {missing!r}; 'make jars' fills it"
        raise ConfigError(msg)
    return {"spark.jars": ",".join(str(jars[-1]) for jars in found.values())}
