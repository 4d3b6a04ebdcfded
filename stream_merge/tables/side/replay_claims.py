"""Claims of quarantined records by a replay, so that a killed one neither merges them twice nor loses them.

Two tables take part, and no commit spans both. A replay first claims its records: it marks them as replayed, at a time
that is its own and is in the transaction id of that commit. It then merges them under an identity with that time, and
last records the end of the claim in the quarantine. One that was killed in between has left a claim without an end: the
next replay gives the claimed records to the sink again, under the same identity, which merges a batch once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.errors import CommitStateUnknownError, MergeFailedError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import RetryPolicy
from stream_merge.model.table_ref import TableRef, canonical_folder
from stream_merge.spark import columns
from stream_merge.spark.confs import committed_as, holding
from stream_merge.tables import backoff, spark_table

log = logging.getLogger(__name__)

_IDENTITY = "quarantine-replay"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The records that one replay has marked as its own."""

    at: int
    """When it claimed them, in microseconds; even."""

    @property
    def app_id(self) -> str:
        """The application id of its merge, which is batch 0."""
        return f"replay/{self.at}"

    @property
    def moment(self) -> Column:
        """`replayed_at` of its records."""
        return F.timestamp_micros(F.lit(self.at))


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Claims of the replays of one query, of which one runs at a time."""

    session: SparkSession
    table: TableRef
    """The quarantine, which must exist."""
    target: TableRef
    owner: str
    """Checkpoint of the query: two queries may fill one table, each with its own replays."""

    def open_claim(self) -> Claim | None:
        """The claim of a replay that was killed: its records are to be merged under it."""
        recorded = self._recorded()
        return None if recorded is None or recorded % 2 else Claim(at=recorded)

    def claim(self, places: DataFrame) -> Claim:
        """Mark these records, which must be open, in one commit; what is appended meanwhile stays open.

        `places` are columns of the quarantine that identify records, each once; the time of a record is one of them: it
        tells a topic from a re-created one of its name.
        """
        before = self._recorded()
        if before is not None and before % 2 == 0:
            raise self._taken_by_another()
        claim = Claim(at=max(time.time_ns() // 2000 * 2, 0 if before is None else before + 1))
        same_place = _same_place(places)

        def mark() -> None:
            if self._recorded() != before:
                raise self._taken_by_another()
            stored = spark_table.delta_table(self.session, self.table).alias("t")
            marked = stored.merge(places.alias("s"), same_place & F.col("t.replayed_at").isNull())
            marked.whenMatchedUpdate(set={"replayed_at": claim.moment}).execute()

        self._commit(claim.at, mark)
        if self._recorded() != claim.at:
            raise self._taken_by_another()
        marked = spark_table.rows(self.session, self.table).where(F.col("replayed_at") == claim.moment).alias("t")
        if not places.alias("s").join(marked, same_place, "left_anti").isEmpty():
            self.end(claim, merged=places.limit(0))
            raise self._taken_by_another()
        return claim

    def end(self, claim: Claim, *, merged: DataFrame | None = None) -> None:
        """Record the end of a claim; where `merged` is given, its records at other places are open again."""

        def say() -> None:
            stored = spark_table.delta_table(self.session, self.table).alias("t")
            if merged is None:
                nothing = self.session.range(0).alias("s")
                stored.merge(nothing, F.lit(False)).whenMatchedDelete().execute()
                return
            others = stored.merge(merged.alias("s"), _same_place(merged)).whenNotMatchedBySourceUpdate(
                F.col("t.replayed_at") == claim.moment, {"replayed_at": F.lit(None).cast("timestamp")}
            )
            others.execute()

        self._commit(claim.at + 1, say)

    @contextmanager
    def merging(self, claim: Claim) -> Iterator[None]:
        """The block merges the records of a claim. Where it raises they are open again, unless the target holds them.

        Where nobody can say whether it does, or will, the claim stays open.
        """
        try:
            yield
        except CommitStateUnknownError:
            raise  # the commit may be on its way; and behind an interrupt Spark's goes on
        except Exception:
            try:
                if not self.has_landed(claim):
                    self.end(claim, merged=spark_table.rows(self.session, self.table).select("topic").limit(0))
            except Exception:
                tell(log.warning, "quarantine_replay_open", table=self.table, target=self.target, exc_info=True)
            raise

    def has_landed(self, claim: Claim) -> bool:
        """Whether the target holds the records of a claim."""
        target = spark_table.find(self.session, self.target)
        return target is not None and target.transaction(names.transaction_app_id(claim.app_id, "target")) is not None

    def _recorded(self) -> int | None:
        """Version of the query's transaction id in the quarantine: even where a claim is open, odd behind its end."""
        quarantine = spark_table.find(self.session, self.table)
        return None if quarantine is None else quarantine.transaction(self._app_id)

    @property
    def _app_id(self) -> str:
        return f"{_IDENTITY}/{canonical_folder(self.owner)}"

    def _taken_by_another(self) -> MergeFailedError:
        msg = (
            f"[COMMIT_CONFLICT] another replay has taken records of {self.table!r} for {self.target!r}; nothing was"
            " merged, run this one again when that one has ended"
        )
        return MergeFailedError(msg, target=self.target)

    def _commit(self, version: int, command: Callable[[], None]) -> None:
        def command_as() -> None:
            with holding(self.session, committed_as(self._app_id, version, None)):
                command()

        backoff.commit(command_as, RetryPolicy(), target=self.table)


def query_claims(session: SparkSession, table: TableRef, target: TableRef, *, owner: str) -> Claims | None:
    """The claims of a query's replays, by its checkpoint; None where there is no quarantine."""
    if spark_table.find(session, table) is None:
        return None
    return Claims(session=session, table=table, target=target, owner=owner)


def _same_place(places: DataFrame) -> Column:
    return columns.all_of(F.col(f"t.{name}").eqNullSafe(F.col(f"s.{name}")) for name in places.columns)
