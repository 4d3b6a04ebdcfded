"""Columns and their types: names, comparison, order, and conversion to the target's type."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    CharType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    UserDefinedType,
    VarcharType,
)

from stream_merge.model.names import quote
from stream_merge.spark.jvm import each, strings

_INTEGER_DIGITS: dict[type[DataType], int] = {ByteType: 3, ShortType: 5, IntegerType: 10, LongType: 19}
_EXACT_IN: dict[type[DataType], tuple[type[DataType], ...]] = {
    ByteType: (ShortType, IntegerType, LongType, FloatType, DoubleType),
    ShortType: (IntegerType, LongType, FloatType, DoubleType),
    IntegerType: (LongType, DoubleType),
    FloatType: (DoubleType,),
    StringType: (CharType, VarcharType),
    CharType: (StringType, VarcharType),
    VarcharType: (StringType, CharType),
}
"""Types that hold every value of another one exactly; decimals depend on their digits."""
_WITHOUT_ORDER = ("map", "variant", "void", "interval")
"""Types by their names: PySpark 3.5 has no class for the second and the last one."""
CHAR_VARCHAR_METADATA = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark keeps char(n) and varchar(n) as string with this field metadata."""


def resolve(name: str, available: Sequence[str], *, case_sensitive: bool) -> str | None:
    """The available column that a name means, or None."""
    if name in available:
        return name
    if case_sensitive:
        return None
    return next((candidate for candidate in available if candidate.lower() == name.lower()), None)


def resolved(frame: DataFrame, listed: Iterable[str]) -> list[str]:
    """The frame's columns among these names, by the session's case sensitivity."""
    case_sensitive = is_case_sensitive(frame.sparkSession)
    names = (resolve(name, frame.columns, case_sensitive=case_sensitive) for name in listed)
    return [name for name in names if name is not None]


def is_case_sensitive(session: SparkSession) -> bool:
    """Whether the session compares names with case (`spark.sql.caseSensitive`)."""
    return str(session.conf.get("spark.sql.caseSensitive")).lower() == "true"


def column(name: str, frame: str | None = None) -> Column:
    """A literal top-level column, whatever characters its name has."""
    return F.col(quote(name) if frame is None else f"{frame}.{quote(name)}")


def is_older(at: Column, seconds: float, *, now: Column) -> Column:
    """Whether a time is more than so many seconds before `now`; a comparison of times, by which files are skipped."""
    return at < F.timestamp_micros(F.unix_micros(now) - F.lit(int(seconds * 1_000_000)))


def all_of(conditions: Iterable[Column]) -> Column:
    """Conjunction; TRUE when there are none."""
    return _joined(operator.and_, list(conditions), F.lit(True))


def any_of(conditions: Iterable[Column]) -> Column:
    """Disjunction; FALSE when there are none."""
    return _joined(operator.or_, list(conditions), F.lit(False))


def _joined(join: Callable[[Column, Column], Column], parts: Sequence[Column], none: Column) -> Column:
    """The parts in their order, as a tree of least height: Spark walks it by recursion."""
    if len(parts) <= 1:
        return parts[0] if parts else none
    half = len(parts) // 2
    return join(_joined(join, parts[:half], none), _joined(join, parts[half:], none))


def or_empty(texts: Column) -> Column:
    """A list of texts; an empty one instead of NULL."""
    return F.coalesce(texts, F.array().cast("array<string>"))


def has_order(dtype: DataType) -> bool:
    """Whether Spark can compare two values with `<` (maps and variants have neither order nor equality)."""
    return dtype.typeName() not in _WITHOUT_ORDER and all(has_order(inner) for _, inner in _parts("", dtype))


def canonical(value: Column, dtype: DataType) -> Column:
    """A form of the value that has order and equality: map entries sorted by key, variants as JSON text.

    NULL stays NULL at every level, so two values are equal exactly when their forms are (`<=>`).
    """
    if has_order(dtype):
        return value
    if isinstance(dtype, MapType):
        return F.array_sort(
            _map_entries(value, lambda k: canonical(k, dtype.keyType), lambda v: canonical(v, dtype.valueType))
        )
    if isinstance(dtype, ArrayType):
        return F.transform(value, lambda item: canonical(item, dtype.elementType))
    if isinstance(dtype, StructType):
        fields = [canonical(value.getField(f.name), f.dataType).alias(f"f{i}") for i, f in enumerate(dtype.fields)]
        return F.when(value.isNotNull(), F.struct(*fields))
    if dtype.typeName() == "variant":
        return F.to_json(value)
    return value.cast("string")


def _map_entries(value: Column, key: Callable[[Column], Column], item: Callable[[Column], Column]) -> Column:
    return F.transform(
        F.map_entries(value), lambda e: F.struct(key(e["key"]).alias("key"), item(e["value"]).alias("value"))
    )


def differs(one: Column, other: Column, dtype: DataType) -> Column:
    """Whether values differ: not `<=>` (NaN equals NaN, 0.0 equals -0.0), maps and variants by canonical form."""
    return ~canonical(one, dtype).eqNullSafe(canonical(other, dtype))


def holds_null(value: Column, dtype: DataType) -> Column:
    """Whether a value is NULL or, for a struct, has a NULL component at any depth."""
    if not isinstance(dtype, StructType):
        return value.isNull()
    return any_of([value.isNull(), *(holds_null(value.getField(f.name), f.dataType) for f in dtype.fields)])


def conform(value: Column, source: DataType, stored: DataType) -> Column:
    """The value in the stored type, where `refusal` has no objection.

    Struct fields are matched by name: Spark's cast of a struct goes by position. Those that the source lacks are NULL.
    """
    if source.simpleString() == stored.simpleString():
        return value
    if isinstance(source, StructType) and isinstance(stored, StructType):
        in_source = {f.name.lower(): f for f in source.fields}
        fields = []
        for f in stored.fields:
            theirs = in_source.get(f.name.lower())
            null = F.lit(None).cast(f.dataType)
            own = null if theirs is None else conform(value.getField(theirs.name), theirs.dataType, f.dataType)
            fields.append(own.alias(f.name))
        return F.when(value.isNotNull(), F.struct(*fields))
    if isinstance(source, ArrayType) and isinstance(stored, ArrayType):
        return F.transform(value, lambda item: conform(item, source.elementType, stored.elementType))
    if isinstance(source, MapType) and isinstance(stored, MapType):
        entries = _map_entries(
            value,
            lambda k: conform(k, source.keyType, stored.keyType),
            lambda v: conform(v, source.valueType, stored.valueType),
        )
        return F.map_from_entries(entries)
    return value.cast(stored)


def lacks_fields(source: DataType, stored: DataType) -> bool:
    """Whether the stored struct, itself inside structs alone, has fields that the source's lacks."""
    if not (isinstance(source, StructType) and isinstance(stored, StructType)):
        return False
    return bool(_lacking(source, stored)) or any(lacks_fields(*both) for _, *both in common_parts(source, stored) or ())


def completed(value: Column, row: Column, source: DataType, stored: DataType) -> Column:
    """A conformed value with the row's own fields where the source lacks them; a NULL struct stays NULL."""
    if not (isinstance(source, StructType) and isinstance(stored, StructType) and lacks_fields(source, stored)):
        return value
    in_source = {f.name.lower(): f.dataType for f in source.fields}
    fields = []
    for f in stored.fields:
        ours, own = value.getField(f.name), row.getField(f.name)
        theirs = in_source.get(f.name.lower())
        fields.append((own if theirs is None else completed(ours, own, theirs, f.dataType)).alias(f.name))
    return F.when(value.isNotNull(), F.struct(*fields))


def nullable(dtype: DataType) -> DataType:
    """The type without NOT NULL at any depth: Delta refuses it inside arrays and maps (4.4)."""
    if isinstance(dtype, StructType):
        return StructType([StructField(f.name, nullable(f.dataType), True, f.metadata) for f in dtype.fields])
    if isinstance(dtype, ArrayType):
        return ArrayType(nullable(dtype.elementType), containsNull=True)
    if isinstance(dtype, MapType):
        return MapType(nullable(dtype.keyType), nullable(dtype.valueType), valueContainsNull=True)
    return dtype


_STORABLE = re.compile(
    r"boolean|tinyint|smallint|int|bigint|float|double|decimal\(.*\)|string|(var)?char\(.*\)|binary|date|timestamp"
    r"|timestamp_ntz|variant"
)


def unstorable(name: str, dtype: DataType) -> dict[str, str]:
    """Dotted name and type of each part of a column that Delta does not store (4.4).

    Delta creates a table with a struct without fields, but no write succeeds on it.
    """
    if isinstance(dtype, UserDefinedType):
        return unstorable(name, dtype.sqlType())
    parts = _parts(name, dtype)
    if not parts and not _STORABLE.fullmatch(dtype.simpleString()):
        return {name: dtype.simpleString()}
    return {path: what for part in parts for path, what in unstorable(*part).items()}


def twins(name: str, dtype: DataType) -> list[str]:
    """Nested fields, by dotted names, that differ from a sibling in case alone."""
    seen: dict[str, str] = {}
    fields = dtype.names if isinstance(dtype, StructType) else []
    alike = [f"{name}.{field}" for field in fields if seen.setdefault(field.lower(), field) != field]
    return alike + [one for part in _parts(name, dtype) for one in twins(*part)]


def _parts(name: str, dtype: DataType) -> list[tuple[str, DataType]]:
    """Dotted names and types of what is directly inside a nested type."""
    if isinstance(dtype, StructType):
        return [(f"{name}.{f.name}", f.dataType) for f in dtype.fields]
    if isinstance(dtype, ArrayType):
        return [(f"{name}.element", dtype.elementType)]
    if isinstance(dtype, MapType):
        return [(f"{name}.key", dtype.keyType), (f"{name}.value", dtype.valueType)]
    return []


_CHAR = re.compile(r"\bchar\(")


def is_padded(field: StructField) -> bool:
    """Whether a column is char(n): Spark pads its values on write."""
    return str(field.metadata.get(CHAR_VARCHAR_METADATA, "")).startswith("char(")


def pads_inside(field: StructField) -> bool:
    """Whether a part of a nested column is char(n): Delta pads it, too, on write (4.4)."""
    return not is_padded(field) and _CHAR.search(str(field.metadata.get(CHAR_VARCHAR_METADATA, ""))) is not None


def as_stored_text(value: Column, field: StructField) -> Column:
    """The value as a char(n) column stores it: padded, so a key 'a' is 'a  '."""
    if not is_padded(field):
        return value
    declared = str(field.metadata[CHAR_VARCHAR_METADATA])
    width = int(declared[len("char(") : -1])
    return F.when(F.length(value) < width, F.rpad(value, width, " ")).otherwise(value)


def merged(source: DataType, target: DataType) -> DataType:
    """The target's type with the source's new nested fields at the end of their structs."""
    if isinstance(source, StructType) and isinstance(target, StructType):
        types = {f.name.lower(): f.dataType for f in source.fields}
        known = {f.name.lower() for f in target.fields}
        fields = [
            StructField(f.name, merged(types.get(f.name.lower(), f.dataType), f.dataType), f.nullable, f.metadata)
            for f in target.fields
        ]
        new = [f for f in source.fields if f.name.lower() not in known]
        return StructType([*fields, *(StructField(f.name, nullable(f.dataType)) for f in new)])
    if isinstance(source, ArrayType) and isinstance(target, ArrayType):
        return ArrayType(merged(source.elementType, target.elementType), target.containsNull)
    if isinstance(source, MapType) and isinstance(target, MapType):
        key, value = merged(source.keyType, target.keyType), merged(source.valueType, target.valueType)
        return MapType(key, value, target.valueContainsNull)
    return target


def refusal(name: str, source: DataType, target: DataType, *, may_lack: bool = False) -> str | None:
    """Why values of the source type cannot be stored exactly in the target type; None if they can.

    With `may_lack` structs of the source may lack fields, which an update then keeps; not inside arrays and maps, where
    no row's struct corresponds.
    """
    is_struct = isinstance(source, StructType) and isinstance(target, StructType)
    absent = _lacking(source, target) if is_struct else []
    if absent and not may_lack:
        return (
            f"[TYPE_MISMATCH] column {name!r} of the source lacks field(s) {absent!r} of the target; add them (NULL"
            " where unknown)"
        )
    parts = common_parts(source, target)
    if parts is not None:
        inside = may_lack and is_struct
        problems = (refusal(f"{name}.{part}", ours, theirs, may_lack=inside) for part, ours, theirs in parts)
        return next((problem for problem in problems if problem), None)
    if holds(source, target):
        return None
    return (
        f"[TYPE_MISMATCH] column {name!r} is {source.simpleString()} in the source and {target.simpleString()} in the"
        f" target, which cannot hold it exactly; cast it in the stream to {target.simpleString()}"
    )


def _lacking(source: DataType, target: DataType) -> list[str]:
    """Fields of the target's struct that the source's lacks."""
    known = {field.name.lower() for field in getattr(source, "fields", ())}
    return [field.name for field in getattr(target, "fields", ()) if field.name.lower() not in known]


def common_parts(one: DataType, other: DataType) -> list[tuple[str, DataType, DataType]] | None:
    """Name in the other type, and both types, of what is directly inside two types of one nested kind; else None."""
    if isinstance(one, StructType) and isinstance(other, StructType):
        types = {field.name.lower(): field.dataType for field in one.fields}
        return [(f.name, types[f.name.lower()], f.dataType) for f in other.fields if f.name.lower() in types]
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        return [("element", one.elementType, other.elementType)]
    if isinstance(one, MapType) and isinstance(other, MapType):
        return [("key", one.keyType, other.keyType), ("value", one.valueType, other.valueType)]
    return None


def new_fields(source: StructType, target: StructType, *, case_sensitive: bool, prefix: str = "") -> list[str]:
    """Dotted names of the columns and nested fields that the source has and the target lacks."""
    names = [f.name for f in target.fields]
    new: list[str] = []
    for f in source.fields:
        known = resolve(f.name, names, case_sensitive=case_sensitive)
        if known is None:
            new.append(prefix + f.name)
        else:
            new.extend(_new_in(f.dataType, target[known].dataType, f"{prefix}{f.name}.", case_sensitive))
    return new


def _new_in(source: DataType, target: DataType, prefix: str, case_sensitive: bool) -> list[str]:
    if isinstance(source, StructType) and isinstance(target, StructType):
        return new_fields(source, target, case_sensitive=case_sensitive, prefix=prefix)
    parts = common_parts(source, target) or ()
    return [new for part, ours, theirs in parts for new in _new_in(ours, theirs, f"{prefix}{part}.", case_sensitive)]


def holds(source: DataType, target: DataType) -> bool:
    """Whether every value of the source's scalar type is a value of the target's."""
    if isinstance(source, NullType) or type(target) in _EXACT_IN.get(type(source), ()):
        return True
    if isinstance(target, DecimalType):
        if isinstance(source, DecimalType):
            whole_digits = source.precision - source.scale
            return target.scale >= source.scale and target.precision - target.scale >= whole_digits
        digits = _INTEGER_DIGITS.get(type(source))
        return digits is not None and target.precision - target.scale >= digits
    return type(source) is type(target)


_COLUMN = "UnresolvedAttribute"
"""A column in Catalyst's parsed expressions (Spark 4.2); literals, functions and variables of lambdas are others."""


def columns_read(session: SparkSession, expression: str) -> set[tuple[str, ...]]:
    """The columns in an expression, nested fields as paths; not fields of an array, a map or a call."""
    leaves = session._jsparkSession.sessionState().sqlParser().parseExpression(expression).collectLeaves()
    return {strings(leaf.nameParts()) for leaf in each(leaves) if leaf.getClass().getSimpleName() == _COLUMN}
