"""Tests of what a version of Spark or Delta has, or lacks, among those that the sink runs on."""

from __future__ import annotations

import pytest

from stream_merge.spark.versions import SPARK


def since(spark: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skip on an older Spark.

    Args:
        spark: version that is needed.
        what: is missing before.
    """
    return pytest.mark.skipif(spark > SPARK, reason=f"Spark {spark[0]}.{spark[1]} or newer: {what}")


def before(spark: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skip on this Spark and newer ones.

    Args:
        spark: version that has it.
        what: is missing before, and tested to be so.
    """
    return pytest.mark.skipif(spark <= SPARK, reason=f"older than Spark {spark[0]}.{spark[1]}: lacks {what}")


STRUCT_CASTS = since((4, 0), "a MERGE keeps NULL structs that it casts")
NEW_FIELDS = since((4, 0), "a MERGE keeps NULL structs that it gives a field")
