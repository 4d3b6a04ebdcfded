"""What Delta makes of a struct of another type depends on its release."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as T

from stream_merge.spark import casts


@pytest.mark.parametrize("wrapped", [lambda dtype: dtype, T.ArrayType, lambda dtype: T.MapType(T.StringType(), dtype)])
def test_a_struct_that_beside_spark_3_would_be_cast_is_refused(monkeypatch: pytest.MonkeyPatch, wrapped: Any) -> None:
    """A NULL one would become a struct of NULLs; those of the very type are not cast."""
    held, stored = (wrapped(T.StructType([T.StructField("a", dtype)])) for dtype in (T.IntegerType(), T.LongType()))
    session: Any = None  # which only plain types ask
    monkeypatch.setattr(casts, "KEEPS_NULL_STRUCTS", False)

    assert casts.obstacle(session, held, held, evolves=True) is None
    refused = casts.obstacle(session, held, stored, evolves=True)

    assert refused is not None
    assert refused.endswith(
        "it is struct<a:int> for struct<a:bigint>, and beside Spark 3.5 Delta makes a struct of NULLs of a NULL one"
        " when it casts; cast it in the clause"
    )
