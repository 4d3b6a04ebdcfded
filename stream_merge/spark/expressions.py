"""Which columns an expression of Spark SQL reads, as Spark's own parser sees it."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

_COLUMN = "UnresolvedAttribute"
"""A column in Catalyst's parsed expressions (Spark 4.2); literals, functions and variables of lambdas are others."""


def columns_read(session: SparkSession, expression: str) -> set[tuple[str, ...]]:
    """The columns in an expression, nested fields as paths. A field of an array, of a map or of a call is not told.

    Raises:
        pyspark.errors.ParseException: Spark cannot read it.
    """
    ours: Any = session
    parsed = ours._jsparkSession.sessionState().sqlParser().parseExpression(expression)
    leaves = _listed(parsed.collectLeaves())
    return {tuple(_listed(leaf.nameParts())) for leaf in leaves if leaf.getClass().getSimpleName() == _COLUMN}


def _listed(sequence: Any) -> list[Any]:
    return [sequence.apply(i) for i in range(sequence.size())]
