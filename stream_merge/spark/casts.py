"""What Delta's MERGE makes of a value whose type is not its column's: whether there is a cast at all.

Read from `castIfNeeded` (UpdateExpressionsSupport, Delta 4.4): structs by the names of their fields, arrays and maps of
structs element by element, all else by the cast that `spark.sql.storeAssignmentPolicy` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, NullType, StructType

from stream_merge.spark.columns import nullable
from stream_merge.spark.jvm import java_class
from stream_merge.spark.versions import KEEPS_NULL_STRUCTS

_RULES: Mapping[str, str] = {"ANSI": "canAnsiCast", "STRICT": "canUpCast", "LEGACY": "canCast"}
"""Policy -> what Spark's Cast is asked."""


def obstacle(session: SparkSession, held: DataType, stored: DataType, *, evolves: bool, at: str = "") -> str | None:
    """Why Delta cannot store values of a type in a column of another one; None where it can.

    Args:
        session: whose store assignment policy counts.
        held: the value's type.
        stored: the column's type, with the fields that schema evolution adds.
        evolves: whether the MERGE evolves the schema: only then may structs lack fields, which become NULL.
        at: where in the column.

    Cost: no Spark job; a call to the JVM per pair of types that differ.
    """
    if isinstance(held, NullType) or nullable(held) == nullable(stored):
        return None
    if isinstance(held, StructType) and isinstance(stored, StructType):
        return _of_structs(session, held, stored, evolves=evolves, at=at)
    inside: list[tuple[str, DataType, DataType]] = []
    if isinstance(held, ArrayType) and isinstance(stored, ArrayType):
        # All other arrays are cast as a whole, as in Spark.
        if isinstance(held.elementType, StructType) and isinstance(stored.elementType, StructType):
            inside = [("element", held.elementType, stored.elementType)]
    elif isinstance(held, MapType) and isinstance(stored, MapType):
        inside = [("key", held.keyType, stored.keyType), ("value", held.valueType, stored.valueType)]
    if not inside:
        return _of_plain(session, held, stored, at=at)
    found = (obstacle(session, one, other, evolves=evolves, at=_below(at, name)) for name, one, other in inside)
    return next((problem for problem in found if problem), None)


def _of_structs(session: SparkSession, held: StructType, stored: StructType, *, evolves: bool, at: str) -> str | None:
    whose = f"{at!r} of it" if at else "it"
    if not KEEPS_NULL_STRUCTS:
        return (
            f"{whose} is {held.simpleString()} for {stored.simpleString()}, and beside Spark 3.5 Delta makes a struct"
            " of NULLs of a NULL one when it casts; cast it in the clause"
        )
    known, given = ({field.name.lower(): field.dataType for field in one.fields} for one in (stored, held))
    unknown = [field.name for field in held.fields if field.name.lower() not in known]
    if unknown:
        return f"{whose} has field(s) {unknown!r} that the column lacks"
    lacking = [field.name for field in stored.fields if field.name.lower() not in given]
    if lacking and not evolves:
        return f"{whose} lacks field(s) {lacking!r} of the column; add them (NULL where unknown)"
    found = (
        obstacle(session, given[f.name.lower()], f.dataType, evolves=evolves, at=_below(at, f.name))
        for f in stored.fields
        if f.name.lower() in given
    )
    return next((problem for problem in found if problem), None)


def _of_plain(session: SparkSession, held: DataType, stored: DataType, *, at: str) -> str | None:
    policy = str(session.conf.get("spark.sql.storeAssignmentPolicy")).upper()
    one, other = (session._jsparkSession.parseDataType(nullable(dtype).json()) for dtype in (held, stored))
    cast = java_class(session, "org.apache.spark.sql.catalyst.expressions.Cast")
    if getattr(cast, _RULES[policy])(one, other):
        return None
    whose = f"{at!r} of it" if at else "it"
    return (
        f"{whose} is {held.simpleString()} for {stored.simpleString()}, which spark.sql.storeAssignmentPolicy={policy}"
        " does not cast; cast it in the clause"
    )


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
