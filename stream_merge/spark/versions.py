"""What differs between the versions of PySpark that the sink runs on: each difference once, behind one name.

Which way counts is decided by the installed version, when this module is imported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyspark
from py4j.java_gateway import JavaObject
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StructField, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

_MAJOR, _MINOR = pyspark.__version__.split(".")[:2]
SPARK = (int(_MAJOR), int(_MINOR))
"""Version of the installed PySpark: (4, 2)."""

HADOOP = {(4, 0): "3.4.1", (4, 1): "3.4.2"}.get(SPARK, "3.5.0")
"""Version of Hadoop in PySpark's package; file systems that are added must have the same."""

AWS_SDK = {(4, 0): "2.24.6", (4, 1): "2.29.52"}.get(SPARK, "2.35.4")
"""Version of Amazon's SDK that this Hadoop's S3 file system was built with (hadoop-project's POM)."""

DELTA_PACKAGE = f"io.delta:delta-spark_{_MAJOR}.{_MINOR}_2.13:4.4.0"
"""Maven's coordinates of Delta for this Spark: Delta builds a jar for each minor version."""

if SPARK >= (4, 1):
    from pyspark.sql.pandas.functions import arrow_udf

Decode = Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]
"""Gets the columns of each Arrow batch of a task in turn, and gives one array of as many rows for each of them."""


def arrow_type(dtype: DataType) -> pa.DataType:
    """The type as Arrow takes it to Spark and from there; instants are in UTC."""
    if SPARK >= (4, 2):  # until then the zone was not asked for: UTC, unless told that there is none
        return to_arrow_type(dtype, timezone="UTC")
    return to_arrow_type(dtype)


def observed(observation: Observation) -> dict[str, Any]:
    """The values of aggregates: numbers, truth values and texts, and arrays of them as lists.

    Until Spark 4.1 PySpark left arrays to the JVM, as Scala's.

    Raises:
        TypeError: a value is something else, which the JVM of an older Spark would not hand over whole.
    """
    found = observation.get
    return {name: _in_python(name, value) for name, value in found.items()} if SPARK < (4, 1) else found


def _in_python(name: str, value: Any) -> Any:
    if not isinstance(value, JavaObject):
        return value
    if not value.getClass().getName().startswith("scala.collection."):
        msg = f"observed value {name!r} is a {value.getClass().getName()}"
        raise TypeError(msg)
    return [_in_python(name, element) for element in map(value.apply, range(value.size()))]


def decoded(
    records: DataFrame,
    decode: Decode,
    *inputs: Column | str,
    dtype: DataType,
    name: str,
    keep: Sequence[Column | str] = (),
    is_repeatable: bool = True,
) -> DataFrame:
    """Columns of records, and one that Python makes of Arrow batches; pandas is not needed. Nothing runs yet.

    An Arrow UDF (Spark 4.1). Spark 4.0 has none: there it is `mapInArrow`, whose way through PySpark's public API would
    ask for pandas, although it uses none. It has the other columns in hand, too; Spark never runs it twice for a row.

    Args:
        records: what to read.
        decode: sent to the workers.
        inputs: columns that `decode` gets.
        dtype: of what it gives.
        name: of the new column.
        keep: columns that stand before it.
        is_repeatable: whether Spark may run `decode` a second time for the same rows, to filter by what it gives.
    """
    if SPARK < (4, 1):
        return _mapped(records, decode, inputs, StructField(name, dtype), keep)

    def udf(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:  # PySpark reads the hints
        # A single column comes without a tuple around it.
        yield from decode(batch if isinstance(batch, tuple) else (batch,) for batch in batches)

    made: Any = arrow_udf(udf, dtype)  # type: ignore[call-overload]  # the stubs know no struct there
    return records.select(*keep, (made if is_repeatable else made.asNondeterministic())(*inputs).alias(name))


def _mapped(
    records: DataFrame, decode: Decode, inputs: Sequence[Column | str], new: StructField, keep: Sequence[Column | str]
) -> DataFrame:
    given = [F.col(one) if isinstance(one, str) else one for one in inputs]
    frame: Any = records.select(*keep, *(one.alias(f"{new.name}_{i}") for i, one in enumerate(given)))
    kept = len(keep)
    schema = StructType([*frame.schema.fields[:kept], new])

    def batches_with_new(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        beside: deque[pa.RecordBatch] = deque()

        def decoder_inputs() -> Iterator[tuple[pa.Array, ...]]:
            for batch in batches:
                beside.append(batch)
                yield tuple(batch.columns[kept:])

        for made in decode(decoder_inputs()):
            batch = beside.popleft()
            fields = [*(batch.schema.field(i) for i in range(kept)), pa.field(new.name, made.type)]
            yield pa.RecordBatch.from_arrays([*batch.columns[:kept], made], schema=pa.schema(fields))

    udf = UserDefinedFunction(batches_with_new, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    mapped = frame._jdf.mapInArrow(udf(*(frame[column] for column in frame.columns))._jc, False, None)
    return DataFrame(mapped, frame.sparkSession)
