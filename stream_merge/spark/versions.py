"""Differences between supported versions of PySpark, each behind one name; the installed version decides."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyspark
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark import SparkContext, inheritable_thread_target
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StructField, StructType, _parse_datatype_string
from pyspark.sql.udf import PythonEvalType, UserDefinedFunction  # type: ignore[attr-defined]  # 3.5 has the first there

from stream_merge.errors import MergeFailedError

T = TypeVar("T")

_MAJOR, _MINOR = pyspark.__version__.split(".")[:2]
SPARK = (int(_MAJOR), int(_MINOR))
"""Version of the installed PySpark: (4, 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What belongs to a minor version of Spark."""

    pyspark: str
    """Version specifier of pip."""
    delta: str
    """Version of delta-spark."""
    delta_jar: str
    """Maven name of Delta's jar: Delta 4.4 has one for each minor version of Spark."""
    scala: str
    hadoop: str
    """Version of Hadoop in PySpark; added file systems must have the same."""
    aws_sdk: str
    """Version of Amazon's SDK for this Hadoop (hadoop-project's POM)."""

    def fits(self, patch: int) -> bool:
        """Whether a patch version is supported."""
        return patch >= int(self.pyspark.rpartition(".")[2])


def _with_delta_4_4(spark: str, pyspark: str, *, hadoop: str, aws_sdk: str) -> Parts:
    jar = f"delta-spark_{spark}_2.13"
    return Parts(pyspark=pyspark, delta="4.4.0", delta_jar=jar, scala="2.13", hadoop=hadoop, aws_sdk=aws_sdk)


PARTS = {
    (3, 5): Parts(
        pyspark="~=3.5.3",
        delta="3.3.2",
        delta_jar="delta-spark_2.12",
        scala="2.12",
        hadoop="3.3.4",
        aws_sdk="1.12.262",
    ),
    (4, 0): _with_delta_4_4("4.0", "~=4.0.1", hadoop="3.4.1", aws_sdk="2.24.6"),
    (4, 1): _with_delta_4_4("4.1", "~=4.1.0", hadoop="3.4.2", aws_sdk="2.29.52"),
    (4, 2): _with_delta_4_4("4.2", "~=4.2.0", hadoop="3.5.0", aws_sdk="2.35.4"),
}
"""Minor version of Spark -> what belongs to it; pyproject.toml has an extra for each."""

NEWEST = max(PARTS)
OWN = PARTS.get(SPARK, PARTS[NEWEST])
"""What belongs to the installed PySpark; `preflight` refuses an unlisted one."""

HADOOP, AWS_SDK, SCALA = OWN.hadoop, OWN.aws_sdk, OWN.scala
DELTA_PACKAGE = f"io.delta:{OWN.delta_jar}:{OWN.delta}"
"""Maven's coordinates of Delta for this Spark."""

TAKES_CATALOGS = SPARK >= (4, 0)
"""Whether `DeltaTable.forName` takes a catalog's name; Delta 3.3 takes Spark's own catalog alone."""

AWS_PARTS = (
    tuple(f"software.amazon.awssdk:{part}:{AWS_SDK}" for part in ("s3", "s3-transfer-manager", "sts"))
    if SPARK >= (4, 0)  # whose Hadoop uses the second SDK
    else tuple(f"com.amazonaws:aws-java-sdk-{part}:{AWS_SDK}" for part in ("s3", "sts", "dynamodb"))
)
"""Maven coordinates of the parts of Amazon's SDK that Hadoop's S3 file system uses."""
AWS_WHOLE = "software.amazon.awssdk:bundle" if SPARK >= (4, 0) else "com.amazonaws:aws-java-sdk-bundle"
"""The whole SDK, hundreds of MB."""

NEEDS_VECTOR_MODULE = SPARK >= (4, 0)
"""Whether Spark starts every JVM with `--add-modules jdk.incubator.vector`."""

ANSWERS_MERGE = SPARK >= (4, 0)
"""Whether `DeltaMergeBuilder.execute` returns a frame, whose plan has all metrics; Delta 3.3 returns None."""

WIDENS_BEYOND_INTEGERS = SPARK >= (4, 0)
"""Whether type widening can do more than byte -> short -> int, which is all that Spark 3.5 reads from Parquet."""

VECTOR_COLUMNS = frozenset(
    {"filepath", "rowindexcol", "deletionvectorid", "_metadata", *(() if SPARK >= (4, 0) else ("path",))}
)
"""Columns, in lower case, beside which Delta's MERGE cannot write deletion vectors: its own bare names are then
ambiguous (`DMLWithDeletionVectorsHelper`, Delta 4.4; 3.3 for `path`, too)."""

KEEPS_NULL_STRUCTS = SPARK >= (4, 0)
"""Whether a MERGE keeps a NULL struct whose fields it extends or casts, also in rows that it copies. Delta 4.4 does
(`spark.databricks.delta.merge.preserveNullSourceStructs`), Delta 3.3 writes a struct of NULLs."""

SHIFTS_PARTITION_TIMES = SPARK < (4, 0)
"""Whether Delta writes partition values of times in the JVM's zone, and reads them in the session's, as 3.3."""

ALTERS_SEVERAL_COLUMNS = SPARK >= (4, 0)
"""Whether one ALTER TABLE … ALTER COLUMN may name several."""

CALENDAR_CONFS = tuple(
    f"spark.sql.parquet.{kind}RebaseModeIn{way}"
    for kind in ("datetime", "int96")
    for way in ("Read", "Write")
    if SPARK < (4, 0)
)
"""EXCEPTION in Spark 3.5 (dates before 1582 and times before 1900 are an error), CORRECTED in Spark 4."""

IVY_FOLDER = ".ivy2.5.2" if SPARK >= (4, 0) else ".ivy2"
"""Spark's folder of downloads in a home (MavenUtils), unless `spark.jars.ivy` names another one."""

DATASET = "org.apache.spark.sql.classic.Dataset" if SPARK >= (4, 0) else "org.apache.spark.sql.Dataset"
"""Class of a frame in the JVM."""

if SPARK >= (4, 1):
    from pyspark.sql.pandas.functions import arrow_udf
if SPARK >= (4, 0):
    from pyspark.logger import PySparkLogger

Decode = Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]
"""From the columns of each Arrow batch of a task to one array of as many rows."""


def arrow_type(dtype: DataType) -> pa.DataType:
    """The Arrow type in which Spark exchanges values; instants are in UTC."""
    if SPARK >= (4, 2):  # which takes the zone; before, it is UTC
        return to_arrow_type(dtype, timezone="UTC")
    return to_arrow_type(dtype)


def arrow_table(df: DataFrame) -> pa.Table:
    """The rows of a frame, brought to Python by one Spark job."""
    if SPARK >= (4, 0):
        return df.toArrow()
    ours: Any = df
    batches = ours._collect_as_arrow()  # used by toPandas in Spark 3.5; none without rows
    schema = pa.schema([pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in df.schema.fields])
    return pa.Table.from_batches(batches).cast(schema) if batches else schema.empty_table()


def arrow_frame(session: SparkSession, rows: pa.Table, schema: StructType) -> DataFrame:
    """A frame of Arrow rows, one partition for each 10,000 of them; no job runs."""
    if SPARK >= (4, 0):
        return session.createDataFrame(rows, schema)
    if not rows.num_rows:
        return session.createDataFrame([], schema)
    # Spark 3.5 takes rows and pandas alone; this is its way for pandas, once converted to Arrow.
    from pyspark.sql.pandas.serializers import ArrowStreamSerializer  # noqa: PLC0415 - where it is needed alone

    ours: Any = session
    jvm, most = ours._jvm, int(ours._jconf.arrowMaxRecordsPerBatch())
    typed = rows.cast(pa.schema([pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in schema.fields]))
    batches = typed.combine_chunks().to_batches(max_chunksize=most if most > 0 else None)
    sent = ours._sc._serialize_to_jvm(
        batches, ArrowStreamSerializer(), jvm.PythonSQLUtils.readArrowStreamFromFile, jvm.ArrowIteratorServer
    )
    return DataFrame(jvm.PythonSQLUtils.toDataFrame(sent, schema.json(), ours._jsparkSession), session)


def from_ddl(text: str) -> Any:
    """The type of a text like `id bigint, name string`, by Spark's parser, which needs a Spark context."""
    return StructType.fromDDL(text) if SPARK >= (4, 0) else _parse_datatype_string(text)


def to_ddl(schema: StructType) -> str:
    """The text of a schema, such as `id bigint, name string`."""
    if SPARK >= (4, 0):
        return schema.toDDL()
    jvm: Any = SparkContext._jvm
    return str(jvm.org.apache.spark.sql.types.DataType.fromJson(schema.json()).toDDL())


def is_valid_utf8(text: Column) -> Column:
    """Whether a text's bytes are UTF-8; NULL for NULL."""
    if SPARK >= (4, 0):
        return F.is_valid_utf8(text)
    as_bytes: Any = text.cast("binary")  # Java reads invalid bytes as U+FFFD, which is written as other bytes
    legible: Column = F.decode(as_bytes, "UTF-8").cast("binary") == as_bytes
    return legible


def for_thread(session: SparkSession, run: Callable[..., T]) -> Callable[..., T]:
    """A function for another thread, with this thread's local properties of Spark; its JVM thread ends with it."""
    # Spark 3.5 takes the function alone.
    wrapped: Any = inheritable_thread_target(session) if SPARK >= (4, 0) else inheritable_thread_target
    inheriting: Callable[..., T] = wrapped(run)
    return inheriting


def error_loggers() -> list[logging.Logger]:
    """Loggers by which PySpark writes each error of Spark to stderr, caught or not, as a line of JSON.

    Spark 4.0 has the first, Spark 4.2 the second one; Spark 3.5 none.
    """
    if SPARK < (4, 0):
        return []
    return [PySparkLogger.getLogger(name) for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger")]


def captured(error: BaseException, what: Literal["desc", "stackTrace", "cause"]) -> Any:
    """A field of the Java error behind an error of PySpark; None for others. It is public in Spark 3.5."""
    return getattr(error, f"_{what}" if SPARK >= (4, 0) else what, None)


_OBSERVED_POLL_SECONDS = 0.002
OBSERVED_WITHIN_SECONDS = 300.0
"""How long Spark may take to report observed values after the job."""


def observed(observation: Observation, *, within_seconds: float = OBSERVED_WITHIN_SECONDS) -> dict[str, Any]:
    """The values of aggregates, once the job has ended: numbers, truth values and texts, and arrays of them as lists.

    Until Spark 4.1 PySpark left arrays to the JVM, as Scala's.

    Raises:
        MergeFailedError: Spark does not report them. Where the listener failed, or Spark dropped the event from a full
            queue, `Observation.get` waits forever (3.5 to 4.2).
        TypeError: a value of another type, which the JVM of an older Spark would not return whole.
    """
    _expect_observed(observation, within_seconds)
    values = observation.get
    return {name: _in_python(name, value) for name, value in values.items()} if SPARK < (4, 1) else values


def _expect_observed(observation: Observation, within_seconds: float) -> None:
    """Wait until the values have arrived."""
    java: Any = observation._jo
    try:
        future = java.future()  # 3.5.8 has it, too
        has_come = future.isCompleted
    except Py4JError as err:
        if SPARK >= (4, 0) or type(err) is not Py4JError:  # there is such a method, or Java has failed
            raise
        field = java.getClass().getDeclaredField("metrics")
        field.setAccessible(True)

        def has_come() -> bool:
            return bool(field.get(java).isDefined())

    deadline = time.monotonic() + within_seconds
    while not has_come():
        if time.monotonic() > deadline:
            msg = (
                f"[OBSERVATION_MISSING] Spark did not report the counts of the batch within {within_seconds:g} s; check"
                " Spark's log (ObservationListener, dropped events), then restart the query"
            )
            raise MergeFailedError(msg)
        time.sleep(_OBSERVED_POLL_SECONDS)


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
    """Columns of records, and one that Python decodes from Arrow batches, without pandas. Nothing runs yet.

    An Arrow UDF (Spark 4.1). Spark 4.0 has none: there it is `mapInArrow`, whose public API would need pandas without
    using it; it gets the other columns, too, and Spark never runs it twice for a row.

    Args:
        records: what to read.
        decode: sent to the workers.
        inputs: columns that `decode` gets.
        dtype: type of its result.
        name: name of the new column.
        keep: columns before it.
        is_repeatable: whether Spark may run `decode` twice for a row, to filter by its result.
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
    width = len(keep)
    schema = StructType([*frame.schema.fields[:width], new])

    def batches_with_new(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        beside: deque[pa.RecordBatch] = deque()

        def decoder_inputs() -> Iterator[tuple[pa.Array, ...]]:
            for batch in batches:
                beside.append(batch)
                yield tuple(batch.columns[width:])

        for made in decode(decoder_inputs()):
            batch = beside.popleft()
            fields = [*(batch.schema.field(i) for i in range(width)), pa.field(new.name, made.type)]
            yield pa.RecordBatch.from_arrays([*batch.columns[:width], made], schema=pa.schema(fields))

    udf = UserDefinedFunction(batches_with_new, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    called: Any = udf(*(frame[column] for column in frame.columns))._jc
    if SPARK >= (4, 0):
        mapped = frame._jdf.mapInArrow(called, False, None)
    else:  # which takes Catalyst's expression, and no profile of resources
        mapped = frame._jdf.pythonMapInArrow(called.expr(), False)
    return DataFrame(mapped, frame.sparkSession)
