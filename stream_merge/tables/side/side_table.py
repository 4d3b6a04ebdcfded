"""A side table, written by Spark or in the driver: once per batch, again when another writer won."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import MergeFailedError
from stream_merge.model.snapshot import FINGERPRINT, History, TableSnapshot, is_applied, recorded_fingerprint
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.errors import reason
from stream_merge.tables import backoff, spark_table
from stream_merge.tables.files.rows import append
from stream_merge.tables.log.handle import LogHandle

Runner = Callable[[Callable[[int], None]], None]
"""Runs an attempt under the sink's retry policy."""
Judge = Callable[[int, int, Callable[[], str | None]], None]
"""Stops where a table has recorded another batch: gets the recorded id, the batch's, and the recorded fingerprint."""
Accept = Callable[[TableSnapshot], TableSnapshot | None]
"""The snapshot, or None for another table of this name."""
Rows = TypeVar("Rows", DataFrame, pa.Table)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCommit:
    """How a side table is written: once per batch, retried when another writer won."""

    app_id: str | None
    """Application id of the commit's role; None writes no transaction id."""
    batch_id: int
    run: Runner
    fingerprint: str | None = None
    """`Checkpoint.fingerprint` of the batch; None: a repeated one is recognised by its id alone."""
    user: str | None = None
    """The user's own value of `userMetadata`, kept beside the sink's."""
    judge: Judge | None = None
    """None: a batch whose id, or a later one, is recorded is skipped."""

    @property
    def metadata(self) -> str | None:
        """JSON for the commit's `userMetadata`, by which the batch is recognised."""
        if self.app_id is None:
            return self.user
        fingerprint = {} if self.fingerprint is None else {FINGERPRINT: self.fingerprint}
        ours = {"app_id": self.app_id, "batch_id": self.batch_id, **fingerprint}
        return json.dumps({"stream_merge": ours, "user": self.user})

    def expect_own(self, snapshot: TableSnapshot, history: History) -> None:
        """Stop where another batch is recorded under this batch's id, or a later one."""
        recorded = None if self.app_id is None or self.judge is None else snapshot.transaction(self.app_id)
        if recorded is not None and self.judge is not None:
            self.judge(recorded, self.batch_id, lambda: self.recorded_fingerprint(snapshot.version, history))

    def recorded_fingerprint(self, version: int, history: History) -> str | None:
        """Fingerprint that the table has recorded under this id."""
        return recorded_fingerprint(version, history, app_id=self.app_id, batch_id=self.batch_id)


class SideTable(ABC, Generic[Rows]):
    """One side table, by one back end; `accept` says which table it is."""

    def __init__(self, name: TableRef, accept: Accept = lambda snapshot: snapshot) -> None:
        self.name = name
        self._accept = accept

    @abstractmethod
    def snapshot(self, *, newest: bool = True) -> TableSnapshot | None:
        """The table, or None while there is none; not `newest`: the version that this batch has read last."""

    @abstractmethod
    def _append(self, rows: Rows, commit: SideCommit) -> None:
        """One attempt. Raises what its library raises."""

    @abstractmethod
    def _is_recorded(self, commit: SideCommit, *, is_retry: bool) -> bool:
        """Whether the table is known to hold the batch; stops where it holds another one under its id."""

    def append_once(self, rows: Rows, commit: SideCommit) -> None:
        """Append rows in one commit; idempotent under an application id."""

        def attempt(number: int) -> None:
            if self._is_recorded(commit, is_retry=number > 1):
                return
            try:
                self._append(rows, commit)
            except Exception as err:
                lost = backoff.conflict(err, target=self.name, batch_id=commit.batch_id)
                if lost is None:
                    msg = f"[WRITE_FAILED] writing to {self.name!r} for batch {commit.batch_id} failed: {reason(err)}"
                    raise MergeFailedError(msg, target=self.name, batch_id=commit.batch_id) from err
                kind = backoff.CONFLICT_KINDS[lost.conflict]
                if kind is backoff.ConflictKind.LOOK_UP_FIRST and commit.app_id is not None:
                    # A blind append reads nothing, so only its own transaction id can be the one recorded:
                    # a twin of this call wrote the same rows, or the answer to this very commit was lost.
                    return
                raise lost from err

        commit.run(attempt)


class SparkSideTable(SideTable[DataFrame]):
    """A side table by Spark; an append is one Spark job per attempt."""

    def __init__(self, session: SparkSession, name: TableRef, accept: Accept = lambda snapshot: snapshot) -> None:
        super().__init__(name, accept)
        self._session = session

    def snapshot(self, *, newest: bool = True) -> TableSnapshot | None:  # noqa: D102 - Spark keeps none
        snapshot = spark_table.find(self._session, self.name)
        return None if snapshot is None else self._accept(snapshot)

    def _is_recorded(self, commit: SideCommit, *, is_retry: bool) -> bool:
        """False: Delta drops what its `txnVersion` shows as written."""
        snapshot = None if commit.judge is None else spark_table.find(self._session, self.name)
        if snapshot is not None:
            commit.expect_own(snapshot, partial(spark_table.history, self._session, self.name))
        return False

    def _append(self, rows: DataFrame, commit: SideCommit) -> None:
        writer = rows.write.format("delta").mode("append")
        if commit.metadata is not None:
            writer = writer.option("userMetadata", commit.metadata)
        if commit.app_id is not None:
            writer = writer.option("txnAppId", commit.app_id).option("txnVersion", str(commit.batch_id))
        if self.name.path is not None:
            writer.save(self.name.plain)
        else:
            writer.saveAsTable(self.name)


class DriverSideTable(SideTable[pa.Table]):
    """A side table by the driver: each attempt is based on one version, and any commit in between makes it lose.

    `newest` gives the handle up to date, `cached` the one that this batch has read last; None where there is none.
    """

    def __init__(
        self,
        name: TableRef,
        newest: Callable[[], LogHandle | None],
        cached: Callable[[], LogHandle | None],
        accept: Accept = lambda snapshot: snapshot,
    ) -> None:
        super().__init__(name, accept)
        self._newest = newest
        self._cached = cached

    def table(self, *, newest: bool = True) -> LogHandle | None:
        """The table, or None while there is none."""
        cached = None if newest else self._cached()
        handle = self._newest() if cached is None else cached
        return None if handle is None or self._accept(handle.snapshot()) is None else handle

    def snapshot(self, *, newest: bool = True) -> TableSnapshot | None:  # noqa: D102
        handle = self.table(newest=newest)
        return None if handle is None else handle.snapshot()

    def expected(self, *, newest: bool = False) -> LogHandle:
        """The handle of a table that must be there."""
        handle = self.table(newest=newest)
        if handle is None:
            msg = f"[TABLE_NOT_FOUND] {self.name!r} disappeared during a batch; restart the query"
            raise MergeFailedError(msg, target=self.name)
        return handle

    def _is_recorded(self, commit: SideCommit, *, is_retry: bool) -> bool:
        handle = self.expected(newest=is_retry)
        if not is_retry:
            handle.refresh_if_free()
        snapshot = handle.snapshot()
        commit.expect_own(snapshot, handle.commits)
        return is_applied(snapshot.transaction, commit.app_id, commit.batch_id)

    def _append(self, rows: pa.Table, commit: SideCommit) -> None:
        transaction = None if commit.app_id is None else (commit.app_id, commit.batch_id)
        append(self.expected(), rows, transaction=transaction, user_metadata=commit.metadata)
