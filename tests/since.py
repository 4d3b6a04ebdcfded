"""Tests of what came with a later version of Spark or Delta than the oldest that the sink runs on."""

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
