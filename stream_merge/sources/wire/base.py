"""What every wire format does: bytes to a payload and the schema of the row in it, one by one or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from stream_merge.sources.wire import json_table
from stream_merge.sources.wire.encodings import Encoding

RowOf = Callable[[Mapping[str, Any]], "Mapping[str, Any] | None"]
"""The schema of the row inside of a record's schema, as its envelope knows; None for records that hold no row."""


class Payloads(NamedTuple):
    """Payloads in one schema."""

    indexes: pa.Int64Array
    """Which of the given records they are, ascending."""
    texts: pa.BinaryArray
    schema_id: str

    def read(self, schema: pa.Schema) -> Iterator[tuple[Payloads, pa.StructArray]]:
        """Those that `json_table` can read, each part with its rows."""
        for first, rows in json_table.read_parts(self.texts, schema):
            indexes, texts = (values.slice(first, len(rows)) for values in (self.indexes, self.texts))
            yield Payloads(indexes, texts, self.schema_id), rows


class Wire(Protocol):
    """How bytes hold what an envelope looks into; sent to the workers."""

    @property
    def is_declared(self) -> bool:
        """As `Format.is_declared`."""
        ...

    def parse(self, value: bytes) -> tuple[Mapping[str, Any], str | None]:
        """The payload of a record, and the id of the schema of its row; None where there is none.

        Raises:
            UndecodableError: it is not written like that.
        """
        ...

    def named(self, fields: Mapping[str, Any], schema_id: str | None) -> Mapping[str, Any]:
        """The fields of a row by the names of its schema.

        Raises:
            UndecodableError: two fields have one name.
        """
        ...

    def payloads(self, values: pa.BinaryArray) -> Iterator[Payloads]:
        """The payloads of records, by the schema of their row; without those that `parse` has yet to tell.

        Args:
            values: none of them NULL.
        """
        ...

    def row_type(self, schema_id: str) -> pa.StructType | None:
        """A row as Arrow reads it; None where it cannot read one of the columns."""
        ...

    def shape(self, schema_id: str, texts: pa.BinaryArray, *, without: frozenset[str]) -> pa.StructType:
        """What payloads hold beside their rows, as far as it has been seen.

        Args:
            schema_id: of the rows.
            texts: payloads; some of them are looked at.
            without: fields that are or hold the row.
        """
        ...

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """As `Format.encodings`."""
        ...
