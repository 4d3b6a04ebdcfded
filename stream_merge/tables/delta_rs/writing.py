"""How delta-rs is told to write and to commit (1.6): its transaction, its files, and nothing behind the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from deltalake import CommitProperties, PostCommitHookProperties, Transaction, WriterProperties

from stream_merge.model import names

NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Checkpoints are written after the commit, where their failure cannot pass for the commit's."""


class Parquet(TypedDict, total=False):
    """How a write makes its files, where that is not delta-rs' own way."""

    writer_properties: WriterProperties


def parquet(properties: Mapping[str, str]) -> Parquet:
    """Rows per row group as the table's properties say, which delta-rs does not look at; else its defaults."""
    limit = properties.get(names.ROW_GROUP_PROPERTY, "")
    if not limit.isdecimal():
        return {}
    # Properties without a compression would mean none (delta-rs 1.6).
    return {"writer_properties": WriterProperties(max_row_group_size=int(limit), compression="SNAPPY")}


def commit_properties(transaction: tuple[str, int] | None, user_metadata: str | None) -> CommitProperties:
    """Of one commit: its transaction id, and what it says of itself."""
    return CommitProperties(
        custom_metadata=None if user_metadata is None else {"userMetadata": user_metadata},
        # delta-rs would commit on top of a newer version that it deems harmless, whose transaction ids nobody has read.
        max_commit_retries=0,
        app_transactions=None if transaction is None else [Transaction(*transaction)],
    )
