"""Calls a sink under an unprivileged uid on tables that belong to somebody else; prints what it was told as JSON."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from importlib import import_module

import pyspark.sql.classic
import pyspark.testing.utils
from pyspark.sql import SparkSession

from stream_merge import ConfigError, MergeSink
from stream_merge.session import small_batches

NOBODY = 65534


def become_nobody() -> None:
    """Give up every right; what Python imports late must be there before, its own folder may be closed then."""
    for module in pkgutil.iter_modules(pyspark.sql.classic.__path__, "pyspark.sql.classic."):
        import_module(module.name)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def main(jars: str, scratch: str, targets: list[str]) -> None:
    """Try every target once."""
    become_nobody()
    builder = SparkSession.builder.master("local[1]").config(
        map={
            "spark.jars": jars,
            "spark.driver.memory": "600m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.local.dir": scratch,
            "spark.sql.warehouse.dir": f"file:{scratch}/warehouse",
            "spark.driver.extraJavaOptions": f"-Duser.home={scratch} -Djava.io.tmpdir={scratch}",
        }
    )
    spark = small_batches(builder).getOrCreate()
    events = spark.range(1).selectExpr("id", "1L AS lsn")
    said: dict[str, list[str]] = {}
    for target in targets:
        try:
            MergeSink(target=target, keys=["id"], sequence_by="lsn")(events, 0)
        except ConfigError as err:
            said[target] = list(err.problems)
        except Exception as err:
            said[target] = [f"{type(err).__name__}: {err}"]
        else:
            said[target] = []
    sys.stdout.write("\nSAID " + json.dumps(said) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
