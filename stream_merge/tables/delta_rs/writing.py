"""How delta-rs is told to write and to commit (1.6): its transaction, its files, and nothing behind the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from deltalake import ColumnProperties, CommitProperties, PostCommitHookProperties, Transaction, WriterProperties
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StructType

from stream_merge.model import names
from stream_merge.model.snapshot import name_in_files

NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Checkpoints are written after the commit, where their failure cannot pass for the commit's."""

_FLOATS = (FloatType, DoubleType)
_NESTED = (StructType, ArrayType, MapType)
_NO_BOUNDS, _BOUNDS = (ColumnProperties(statistics_enabled=level) for level in ("NONE", "PAGE"))


class Parquet(TypedDict, total=False):
    """How a write makes its files, where that is not delta-rs' own way."""

    writer_properties: WriterProperties


def parquet(schema: StructType, properties: Mapping[str, str]) -> Parquet:
    """What delta-rs does not do by itself: rows per row group as the table's properties say, and no bounds of floats.

    delta-rs (1.6) leaves NaN out of the bounds that it writes, into files and log. Spark takes NaN for the greatest
    value, and a query for great ones would pass over files that hold it.

    Args:
        schema: of the table.
        properties: of it.
    """
    limit = properties.get(names.ROW_GROUP_PROPERTY, "")
    rows = int(limit) if limit.isdecimal() else None
    floats = [name_in_files(field) for field in schema.fields if isinstance(field.dataType, _FLOATS)]
    inside = any(_holds_floats(field.dataType) for field in schema.fields if name_in_files(field) not in floats)
    if rows is None and not floats and not inside:
        return {}
    default, by_name = None, dict.fromkeys(floats, _NO_BOUNDS)
    if inside:  # columns inside of others have no name here, so those outside are named
        plain = [field for field in schema.fields if not isinstance(field.dataType, (*_FLOATS, *_NESTED))]
        default, by_name = _NO_BOUNDS, {name_in_files(field): _BOUNDS for field in plain}
    return {
        "writer_properties": WriterProperties(
            max_row_group_size=rows,
            compression="SNAPPY",  # properties without a compression would mean none (delta-rs 1.6)
            default_column_properties=default,
            column_properties=by_name,
        )
    }


def _holds_floats(dtype: DataType) -> bool:
    """Whether a struct has floats; of arrays and maps no bounds are used."""
    if isinstance(dtype, StructType):
        return any(isinstance(field.dataType, _FLOATS) or _holds_floats(field.dataType) for field in dtype.fields)
    return False


def commit_properties(transaction: tuple[str, int] | None, user_metadata: str | None) -> CommitProperties:
    """Of one commit: its transaction id, and what it says of itself."""
    return CommitProperties(
        custom_metadata=None if user_metadata is None else {"userMetadata": user_metadata},
        # delta-rs would commit on top of a newer version that it deems harmless, whose transaction ids nobody has read.
        max_commit_retries=0,
        app_transactions=None if transaction is None else [Transaction(*transaction)],
    )
