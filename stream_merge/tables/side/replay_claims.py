"""Claims of quarantined records by a replay, so that a killed one neither merges them twice nor loses them.

Two tables take part, and no commit spans both. A replay first claims its records: it marks them as replayed, at a time
that is its own and is in the transaction id of that commit. It then merges under an identity with that time, and last
records its end in the quarantine. One that was killed in between has left a claim without an end, and the target's
transaction ids say which it is. After its merge, the rest of a repeated batch is to be done (`Unfinished`). Before it,
its id is taken in the target by a commit that changes nothing (the fence), so that a merge that is still on its way
commits nothing and fails as overtaken; then its records are open again. A merge that lands right before the fence is
not overtaken: the target's history tells.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.errors import CommitStateUnknownError, MergeFailedError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import RetryPolicy
from stream_merge.model.snapshot import newest_first
from stream_merge.model.table_ref import TableRef, canonical_folder
from stream_merge.spark import columns
from stream_merge.spark.confs import committed_as, holding
from stream_merge.tables import backoff, spark_table

log = logging.getLogger(__name__)

_IDENTITY = "quarantine-replay"
_BATCH, _FENCE, _LANDED = 0, 1, 2
"""Versions of a replay's transaction id in the target: of its merge, of the commit that fences it off, and of the one
that records that the merge had landed before that."""
UNFINISHED = (
    "a replay ended behind its merge, before it looked for deletes that another query had remembered meanwhile;"
    " 'stream-merge quarantine replay' looks for them"
)
_CLOCKS_DIFFER_MILLIS = 86_400_000
"""The most by which clocks of two writers may differ."""


class _Fate(Enum):
    """Fate of a replay's merge."""

    OPEN = auto()
    """It has not landed, and still may."""
    LANDED = auto()
    LANDED_BEFORE_FENCE = auto()
    """Only the history shows it: its id in the target is that of the fence."""
    OVERTAKEN = auto()
    """It will never land."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A replay that was killed, or failed, after its merge.

    Its records go to the sink once more: the target holds them, and the rest of the batch is done.
    """

    at: int
    """When it claimed its records, in microseconds."""

    @property
    def app_id(self) -> str:
        """The application id of its merge, which is batch 0."""
        return _replay_id(self.at)

    @property
    def moment(self) -> Column:
        """`replayed_at` of its records."""
        return _moment(self.at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Claims of the replays of one query, of which one runs at a time."""

    session: SparkSession
    table: TableRef
    """The quarantine, which must exist."""
    target: TableRef
    owner: str
    """Checkpoint of the query: two queries may fill one table, each with its own replays."""

    def settle(self) -> Unfinished | None:
        """Re-open the records of a replay killed before the target held them; return one that was killed after."""
        claimed = self._claimed()
        if claimed is None:
            return None
        fate = self._fate(claimed)
        if fate is _Fate.OPEN:
            self._take_id(claimed, _FENCE)
            fate = self._fate(claimed)
        if fate is _Fate.LANDED_BEFORE_FENCE:  # to be known when the history is tidied away
            self._take_id(claimed, _LANDED)
        if fate in (_Fate.LANDED, _Fate.LANDED_BEFORE_FENCE):
            return Unfinished(at=claimed)
        self._end(claimed, opens=True)
        tell(log.warning, "quarantine_replay_settled", table=self.table, target=self.target)
        return None

    @contextmanager
    def finishing(self, left: Unfinished) -> Iterator[None]:
        """The block finishes a replay."""
        try:
            yield
        except Exception:
            tell(log.warning, "quarantine_replay_unfinished", table=self.table, target=self.target, remedy=UNFINISHED)
            raise
        self._end(left.at, opens=False)

    @contextmanager
    def taken(self, places: DataFrame) -> Iterator[str]:
        """Claim records for the block, which merges them under the `app_id` that it gets, as batch 0.

        They are marked once it is left. Where it raises they are open again, unless the target holds them: then the
        replay is `unfinished`. Where nobody can say whether it does, or will, the next `settle` finds out. `places` are
        columns of the quarantine that identify records, each once; the time of a record is one of them: it tells a
        topic from a re-created one of its name.
        """
        at = self._claim(places)
        try:
            yield _replay_id(at)
        except CommitStateUnknownError:
            raise  # the commit may be on its way; and behind an interrupt Spark's goes on
        except Exception:
            try:
                if self._recorded() == at:
                    self.settle()
            except Exception:
                tell(log.warning, "quarantine_replay_open", table=self.table, target=self.target, exc_info=True)
            raise
        is_overtaken = False
        try:
            is_overtaken = self._fate(at) is _Fate.OVERTAKEN
            if not is_overtaken:
                self._end(at, opens=False)
        except Exception:  # the rows are merged, and the records marked; the next replay finishes this one
            tell(log.warning, "quarantine_replay_open", table=self.table, target=self.target, exc_info=True)
        if is_overtaken:
            raise self._taken_by_another()

    def _claimed(self) -> int | None:
        """Time of the last claim in microseconds, if it has not ended."""
        recorded = self._recorded()
        return None if recorded is None or recorded % 2 else recorded

    def _recorded(self) -> int | None:
        quarantine = spark_table.find(self.session, self.table)
        return None if quarantine is None else quarantine.transaction(self._app_id)

    @property
    def _app_id(self) -> str:
        """Application id of commits to the quarantine: an even version claims, the odd one after it ends the claim."""
        return f"{_IDENTITY}/{canonical_folder(self.owner)}"

    def _fate(self, at: int) -> _Fate:
        """The fate of a replay's merge, by its id in the target; after a fence, by the history."""
        target = spark_table.find(self.session, self.target)
        recorded = None if target is None else target.transaction(_target_id(at))
        if target is None or recorded is None:
            return _Fate.OPEN
        if recorded in (_BATCH, _LANDED):
            return _Fate.LANDED
        for commit in newest_first(target.version, partial(spark_table.history, self.session, self.target)):
            ours = commit.ours or {}
            if (ours.get("identity"), ours.get("role")) == (_replay_id(at), "target"):
                return _Fate.LANDED_BEFORE_FENCE
            if commit.timestamp_ms is not None and commit.timestamp_ms < at // 1000 - _CLOCKS_DIFFER_MILLIS:
                break
        return _Fate.OVERTAKEN

    def _take_id(self, at: int, version: int) -> None:
        """Give the id of a replay in the target a version: its merge conflicts if it has not landed by then."""
        if spark_table.find(self.session, self.target) is None:
            return

        def nothing() -> None:
            if version == _LANDED or self._fate(at) is _Fate.OPEN:
                stored = spark_table.delta_table(self.session, self.target).alias("t")
                stored.merge(self.session.range(0).alias("s"), F.lit(False)).whenMatchedDelete().execute()

        self._commit(self.target, _target_id(at), version, nothing)

    def _claim(self, places: DataFrame) -> int:
        """Mark these records, which must be open, in one commit; what is appended meanwhile stays open."""
        before = self._recorded()
        if before is not None and before % 2 == 0:
            raise self._taken_by_another()
        at = max(time.time_ns() // 2000 * 2, 0 if before is None else before + 1)
        same_place = columns.all_of(F.col(f"t.{name}").eqNullSafe(F.col(f"s.{name}")) for name in places.columns)

        def mark() -> None:
            if self._recorded() != before:
                raise self._taken_by_another()
            stored = spark_table.delta_table(self.session, self.table).alias("t")
            marked = stored.merge(places.alias("s"), same_place & F.col("t.replayed_at").isNull())
            marked.whenMatchedUpdate(set={"replayed_at": _moment(at)}).execute()

        self._commit(self.table, self._app_id, at, mark)
        if self._recorded() != at:
            raise self._taken_by_another()
        marked = spark_table.rows(self.session, self.table).where(F.col("replayed_at") == _moment(at)).alias("t")
        if not places.alias("s").join(marked, same_place, "left_anti").isEmpty():
            self._end(at, opens=True)
            raise self._taken_by_another()
        return at

    def _taken_by_another(self) -> MergeFailedError:
        msg = (
            f"[COMMIT_CONFLICT] another replay has taken records of {self.table!r} for {self.target!r}; nothing was"
            " merged, run this one again when that one has ended"
        )
        return MergeFailedError(msg, target=self.target)

    def _end(self, at: int, *, opens: bool) -> None:
        """Record the end of a replay, and open its records again."""
        concerned = F.col("t.replayed_at") == _moment(at) if opens else F.lit(False)

        def say() -> None:
            stored = spark_table.delta_table(self.session, self.table).alias("t")
            opened = stored.merge(self.session.range(1).alias("s"), concerned)
            opened.whenMatchedUpdate(set={"replayed_at": F.lit(None).cast("timestamp")}).execute()

        self._commit(self.table, self._app_id, at + 1, say)

    def _commit(self, table: TableRef, app_id: str, version: int, command: Callable[[], None]) -> None:
        def command_as() -> None:
            with holding(self.session, committed_as(app_id, version, None)):
                command()

        backoff.commit(command_as, RetryPolicy(), target=table)


def _replay_id(at: int) -> str:
    return f"replay/{at}"


def _target_id(at: int) -> str:
    return names.transaction_app_id(_replay_id(at), "target")


def _moment(micros: int) -> Column:
    return F.timestamp_micros(F.lit(micros))


def query_claims(session: SparkSession, table: TableRef, target: TableRef, *, owner: str) -> Claims | None:
    """The claims of a query's replays, by its checkpoint; None where there is no quarantine."""
    if spark_table.find(session, table) is None:
        return None
    return Claims(session=session, table=table, target=target, owner=owner)
