"""Whose batch this is: the streaming query that delivers it, and what its batch ids belong to."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.spark.streaming import streaming_query

DIRECT = "direct"
"""Label of calls outside a streaming query."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who calls the sink."""

    query: str
    """Label: query name, else query id, else "direct"."""
    identity: str | None
    """What batch ids belong to; None writes no transaction id."""
    checkpoint: str | None = None
    """Folder of the streaming query's checkpoint; None outside of one."""
    query_id: str | None = None
    """Of the streaming query; None outside of one."""
    batch_id: int | None = None
    """Of the batch that the query runs; None where nobody says."""
    run_id: str | None = None
    """Of the query's start; None outside of one."""

    def app_id(self, role: names.Role, *, about: str | None = None) -> str | None:
        """Application id of one commit, or None."""
        if self.identity is None:
            return None
        return names.transaction_app_id(self.identity, role, about=about)


def caller(batch_df: DataFrame, spec: MergeSpec, label: str = DIRECT) -> Caller:
    """Find out which streaming query delivers the batch to a sink; `label` stands for it where none does."""
    return caller_of(batch_df, app_id=spec.app_id, name=spec.name, label=label)


def caller_of(batch_df: DataFrame, *, app_id: str | None, name: str | None, label: str = DIRECT) -> Caller:
    """As `caller`, for whatever writes under that `app_id` and `name`."""
    query = streaming_query(batch_df)
    if query is None:
        return Caller(query=label, identity=names.identity(query_id=None, app_id=app_id, name=name))
    identity = names.identity(query_id=query.id, app_id=app_id, name=name)
    return Caller(
        query=query.name or query.id,
        identity=identity,
        checkpoint=query.checkpoint,
        query_id=query.id,
        batch_id=query.batch_id,
        run_id=query.run_id,
    )
