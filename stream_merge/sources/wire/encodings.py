"""Encodings of columns in JSON, with the Delta types that hold their values exactly."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql import types as T

from stream_merge.sources.wire import many as M
from stream_merge.sources.wire.strict_json import UndecodableError

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_A_NUMBER = Decimal("NaN")
_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Connect's JSON converter (Kafka 4.1, Jackson) for numbers that JSON lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """Encoding of a column. A value that its type cannot hold exactly is refused, never rounded, clamped or NULL."""

    dtype: T.DataType
    """Type of the column in the target."""
    arrow: pa.DataType
    """Arrow's type of `dtype`."""
    json_types: frozenset[type]
    """Python types of the JSON values that `one` reads."""
    one: Callable[[Any], Any]
    """Converts a JSON value other than null for Arrow; raises `UndecodableError`."""
    is_as_written: bool = False
    """Whether `one` only checks ranges that Arrow checks, too."""
    is_optional: bool = True
    """Whether null is a value."""
    placeholders: tuple[Any, ...] = ()
    """JSON values of Debezium's unavailable values; compared exactly."""
    default: Any = None
    """The column's default as a JSON value, from the schema block; None without."""
    wire: pa.DataType | None = None
    """Type in which Arrow's JSON reader reads the values exactly; None where it cannot."""
    many: M.Many | None = None
    """Converts a column of the type `wire`; None: `one` does."""

    def is_unavailable(self, value: Any) -> bool:
        """Whether this JSON value is a placeholder."""
        # Almost no value is equal to one; of those that are, `True` is not 1.
        return value in self.placeholders and any(
            type(value) is type(absent) and value == absent for absent in self.placeholders
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """A column of a batch."""

    values: pa.Array
    errors: dict[int, str]
    """Row -> why its value cannot be read; the value is NULL."""


def decode(encoding: Encoding, values: Sequence[Any]) -> Decoded:
    """A column of JSON values, None for NULL: at C speed if all have the expected type, else value by value."""
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if kinds <= encoding.json_types:
        try:
            if encoding.is_as_written and Decimal not in kinds:
                return Decoded(pa.array(values, encoding.arrow), {})
            return Decoded(pa.array([None if v is None else encoding.one(v) for v in values], encoding.arrow), {})
        except (UndecodableError, pa.ArrowException, UnicodeEncodeError, OverflowError, ValueError):
            pass  # one by one, for the errors
    return _one_by_one(encoding, values)


def _one_by_one(encoding: Encoding, values: Sequence[Any]) -> Decoded:
    column: list[Any] = []
    errors: dict[int, str] = {}
    for row, value in enumerate(values):
        read = None
        if value is not None:
            try:
                if type(value) not in encoding.json_types:
                    refuse(f"{shown(value)} is not a valid {encoding.dtype.simpleString()}")
                read = encoding.one(value)
                pa.array([read], encoding.arrow)
            except UndecodableError as err:
                errors[row], read = str(err), None
            except (pa.ArrowException, UnicodeEncodeError, OverflowError, ValueError):
                errors[row], read = f"{shown(value)} does not fit {encoding.dtype.simpleString()}", None
        column.append(read)
    return Decoded(pa.array(column, encoding.arrow), errors)


# -- plain values ------------------------------------------------------------------------------


def boolean() -> Encoding:
    """True and false."""
    return _as_written(T.BooleanType(), pa.bool_(), bool)


def integer(bits: int) -> Encoding:
    """A JSON number without a fraction, such as 1 or 1.0, of 8, 16, 32 or 64 bits."""
    dtype, arrow = {
        8: (T.ByteType(), pa.int8()),
        16: (T.ShortType(), pa.int16()),
        32: (T.IntegerType(), pa.int32()),
        64: (T.LongType(), pa.int64()),
    }[bits]
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def one(value: int | Decimal) -> int:
        if not least <= value <= most:
            refuse(f"{value} is out of range for {dtype.simpleString()}")
        if value != int(value):
            refuse(f"{value} is not a valid {dtype.simpleString()}")
        return int(value)

    return scalar(dtype, arrow, one, int, Decimal, is_as_written=True, wire=arrow, many=M.as_they_are)


def floating(bits: int) -> Encoding:
    """A JSON number as the nearest float of 32 or 64 bits; NaN and infinities in quotes, as Connect writes them."""
    dtype, arrow = (T.FloatType(), pa.float32()) if bits == 32 else (T.DoubleType(), pa.float64())  # noqa: PLR2004
    exact = 2**24 if bits == 32 else 2**53  # noqa: PLR2004

    def one(value: float | Decimal | str) -> float:
        if isinstance(value, str):
            if value not in _NOT_NUMBERS:
                refuse(f"{shown(value)} is not a number")
            return _NOT_NUMBERS[value]
        number = _nearest(value, bits)
        if math.isinf(number):
            refuse(f"{shown(value)} is out of range for {dtype.simpleString()}")
        if isinstance(value, int) and int(number) != value:
            refuse(f"{value} has no exact {dtype.simpleString()}")
        return number

    many = partial(M.floats, bits=bits, exact=exact)
    return scalar(dtype, arrow, one, float, int, Decimal, str, wire=pa.float64(), many=many)


def _nearest(value: float | Decimal, bits: int) -> float:
    """The nearest float; infinite where out of range."""
    try:
        number = float(value)
        return float(struct.unpack("<f", struct.pack("<f", number))[0]) if bits == 32 else number  # noqa: PLR2004
    except OverflowError:
        return math.inf


def string() -> Encoding:
    """A JSON string."""
    return _as_written(T.StringType(), pa.string(), str)


def binary() -> Encoding:
    """Bytes in base64."""

    def one(value: str) -> bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            msg = f"{shown(value)} is not base64"
            raise UndecodableError(msg) from None

    return scalar(T.BinaryType(), pa.binary(), one, str, wire=pa.string())


# -- numbers with a scale ----------------------------------------------------------------------


def decimal_from_bytes(precision: int, scale: int, *, written: int) -> Encoding:
    """Connect's Decimal: base64 of the unscaled value, two's complement, big-endian (Kafka 4.1, `data.Decimal`).

    `precision` and `scale` are the column's, `written` is the scale of the values.
    """
    raw = binary()

    def one(value: str) -> Decimal:
        return _fitting(_unscaled(raw.one(value), written), precision, scale)

    dtype, arrow = T.DecimalType(precision, scale), pa.decimal128(precision, scale)
    many = partial(M.decimals_from_bytes, precision=precision, scale=scale) if written == scale else None
    return scalar(dtype, arrow, one, str, wire=pa.string(), many=many)


def text_from_bytes(scale: int, *, written: int) -> Encoding:
    """Connect's Decimal as the text of the number, of any size; see `decimal_from_bytes`."""
    raw = binary()

    def one(value: str) -> str:
        return format(_fitting(_unscaled(raw.one(value), written), _MOST_DIGITS, scale), "f")

    return scalar(T.StringType(), pa.string(), one, str, wire=pa.string())


def decimal_from_text(precision: int, scale: int) -> Encoding:
    """A number in a JSON string, or a JSON number read exactly."""

    def one(value: str | float | Decimal) -> Decimal:
        if isinstance(value, float):
            refuse(f"{value} was read as a binary fraction")
        # Python also accepts 1_000, Arabic digits and surrounding spaces.
        is_number = not isinstance(value, str) or _NUMBER.fullmatch(value) is not None
        try:
            number = Decimal(value) if is_number else _NOT_A_NUMBER
        except InvalidOperation:
            number = _NOT_A_NUMBER
        if not number.is_finite():
            refuse(f"{shown(value)} is no number that {T.DecimalType(precision, scale).simpleString()} holds")
        return _fitting(number, precision, scale)

    dtype = T.DecimalType(precision, scale)
    arrow = pa.decimal128(precision, scale)
    # Arrow's JSON reader (26) takes as many digits as the precision, and multiplies without a check for overflow.
    wire = arrow if precision + scale <= M.WIDEST else None
    many = wire and partial(M.decimals, precision=precision, scale=scale)
    return scalar(dtype, arrow, one, str, int, Decimal, wire=wire, many=many)


def decimal_from_struct(precision: int, scale: int) -> Encoding:
    """Debezium's VariableScaleDecimal {scale, value}; refused where the column has fewer digits."""
    raw = binary()

    def one(value: dict[str, Any]) -> Decimal:
        return _fitting(_variable_scale(value, raw), precision, scale)

    dtype = T.DecimalType(precision, scale)
    return scalar(dtype, pa.decimal128(precision, scale), one, dict, wire=_VARIABLE_SCALE)


def text_from_variable_scale() -> Encoding:
    """Debezium's VariableScaleDecimal as the text of the number, of any size."""
    raw = binary()
    return scalar(
        T.StringType(), pa.string(), lambda v: format(_variable_scale(v, raw), "f"), dict, wire=_VARIABLE_SCALE
    )


_VARIABLE_SCALE = pa.struct([("scale", pa.int32()), ("value", pa.string())])
_MOST_DIGITS = 131_072
"""Digits of PostgreSQL's numeric before the point, more than after it: a scale of 10^18 would take as much memory."""


def _variable_scale(value: dict[str, Any], raw: Encoding) -> Decimal:
    scale, text = value.get("scale"), value.get("value")
    if type(scale) is not int or type(text) is not str:
        refuse(f"{shown(value)} is not a scale and a value")
    if not -_MOST_DIGITS <= scale <= _MOST_DIGITS:
        refuse(f"{shown(value)} has a scale that no number of PostgreSQL has")
    return _unscaled(raw.one(text), scale)


def _unscaled(raw: bytes, scale: int) -> Decimal:
    if not raw:
        refuse("a decimal without a byte")
    number = int.from_bytes(raw, "big", signed=True)
    return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale))


def _fitting(number: Decimal, precision: int, scale: int) -> Decimal:
    """The number in that scale; refused where digits would be lost."""
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        refuse(f"{number} is not a number")
    shift = exponent + scale
    if not shift and len(digits) <= precision:
        return number
    if shift < 0 and any(digits[shift:]):
        refuse(f"{number} has more than {scale} digits after the point")
    digits = digits[:shift] if shift < 0 else digits
    if not any(digits):
        return Decimal((sign, (0,), -scale))
    leading_zeros = next(i for i, digit in enumerate(digits) if digit)
    if len(digits) + max(shift, 0) > precision + leading_zeros:
        refuse(f"{number} does not fit {T.DecimalType(precision, scale).simpleString()}")
    return Decimal((sign, digits + (0,) * max(shift, 0), -scale))


# -- several values ----------------------------------------------------------------------------


def array_encoding(items: Encoding) -> Encoding:
    """A JSON array."""

    def one(values: list[Any]) -> list[Any]:
        return [_optional(items, value, "an element") for value in values]

    dtype = T.ArrayType(items.dtype, containsNull=True)
    return scalar(dtype, pa.list_(items.arrow), one, list, wire=_nested_wire([items], pa.list_))


def map_encoding(values: Encoding) -> Encoding:
    """A JSON object as a map with string keys."""

    def one(pairs: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(key, _optional(values, value, f"key {key!r}")) for key, value in pairs.items()]

    dtype = T.MapType(T.StringType(), values.dtype, valueContainsNull=True)
    return scalar(dtype, pa.map_(pa.string(), values.arrow), one, dict)


def struct_encoding(fields: dict[str, Encoding]) -> Encoding:
    """A JSON object with these fields and no others."""

    def one(value: dict[str, Any]) -> dict[str, Any]:
        known = folded(value, fields.keys())
        more = known.keys() - fields.keys()
        if more:
            refuse(f"field(s) {sorted(more)!r} are not declared")
        return {name: _optional(inner, known.get(name), f"field {name!r}") for name, inner in fields.items()}

    dtype = T.StructType([T.StructField(name, inner.dtype) for name, inner in fields.items()])
    arrow = pa.struct([pa.field(name, inner.arrow) for name, inner in fields.items()])
    wire = _nested_wire(fields.values(), lambda *inner: pa.struct(list(zip(fields, inner, strict=True))))
    return scalar(dtype, arrow, one, dict, wire=wire)


def folded(fields: Mapping[str, Any], names: Set[str]) -> Mapping[str, Any]:
    """The fields of an object by the names of a schema, which may differ in case; refused where two have one name."""
    if fields.keys() <= names:
        return fields
    named: dict[str, Any] = {}
    by_fold = {name.lower(): name for name in names}
    for name, value in fields.items():
        known = name if name in names else by_fold.get(name.lower(), name)
        if known in named:
            refuse(f"field {known!r} appears twice, in different case")
        named[known] = value
    return named


def _nested_wire(inner: Iterable[Encoding], outer: Callable[..., pa.DataType]) -> pa.DataType | None:
    """The wire type of a nested value; None with doubles, which may have been integers."""
    wires = [encoding.wire for encoding in inner]
    return None if None in wires or pa.float64() in wires else outer(*wires)


def _optional(encoding: Encoding, value: Any, where: str) -> Any:
    if value is None:
        if not encoding.is_optional:
            refuse(f"{where} is missing")
        return None
    if type(value) not in encoding.json_types:
        refuse(f"{where}: {shown(value)} is not a valid {encoding.dtype.simpleString()}")
    return encoding.one(value)


# -- construction ------------------------------------------------------------------------------


def _as_written(dtype: T.DataType, arrow: pa.DataType, kind: type) -> Encoding:
    return scalar(dtype, arrow, lambda value: value, kind, is_as_written=True, wire=arrow, many=M.as_they_are)


def scalar(
    dtype: T.DataType,
    arrow: pa.DataType,
    one: Callable[[Any], Any],
    *kinds: type,
    is_as_written: bool = False,
    wire: pa.DataType | None = None,
    many: M.Many | None = None,
) -> Encoding:
    """An `Encoding` whose `json_types` are `kinds`, and whose `many` by default calls `one`."""
    return Encoding(
        dtype=dtype,
        arrow=arrow,
        json_types=frozenset(kinds),
        one=one,
        is_as_written=is_as_written,
        wire=wire,
        many=many or (None if wire is None else partial(M.one_by_one, one=one, dtype=arrow)),
    )


def json_text(value: Any) -> str:
    """The text of a JSON value, with all digits of numbers."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{json_text(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(json_text, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def shown(value: Any) -> str:
    """A JSON value for an error's text, at most 60 characters."""
    text = repr(value) if isinstance(value, str) else json_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004


def refuse(msg: str) -> NoReturn:
    """Raise `UndecodableError`."""
    raise UndecodableError(msg)
