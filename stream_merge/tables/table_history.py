"""A table's newest commits for `stream-merge report`: from the log and the quarantine, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from stream_merge.errors import ConfigError
from stream_merge.model.results import FATES
from stream_merge.model.snapshot import CommitRecord
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.explain import find, opened
from stream_merge.tables.log.handle import LogHandle, record
from stream_merge.tables.log.live_files import LiveFiles, RemoteLog

_AT_ONCE = 16
"""Parallel requests."""
_READ = tuple(b'{"%s"' % action for action in (b"commitInfo", b"add", b"remove"))
"""Lines of a commit that are parsed."""


class Files(NamedTuple):
    """Data files of a version, or how they differ from those of the version before."""

    files: int = 0
    bytes: int = 0
    vectors: int = 0
    """Files with a deletion vector."""
    deleted_rows: int = 0
    """Rows that deletion vectors mark as deleted."""

    def minus(self, other: Files) -> Files:
        """The difference, field by field."""
        return Files(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    @classmethod
    def described(cls, actions: Sequence[Mapping[str, Any]]) -> Files:
        """Sum over the bodies of `add` or `remove` actions."""
        vectors = [action["deletionVector"] for action in actions if action.get("deletionVector") is not None]
        sizes = sum(int(action.get("size") or 0) for action in actions)
        return cls(len(actions), sizes, len(vectors), sum(int(vector["cardinality"]) for vector in vectors))


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One version of a table."""

    record: CommitRecord
    operation: str
    """As Delta names it, such as `MERGE` or `OPTIMIZE`."""
    changed: Files
    """Added minus removed."""
    after: Files
    """Data files of this version."""

    @property
    def at(self) -> datetime | None:
        """Time of the commit, UTC."""
        stamp = self.record.timestamp_ms
        return None if stamp is None else datetime.fromtimestamp(stamp / 1000, UTC)

    @property
    def is_batch(self) -> bool:
        """Whether a sink merged a batch by it."""
        return self._ours.get("role") == "target"

    @property
    def batch_id(self) -> int | None:
        """Batch id; None if it merged none."""
        return self._ours.get("batch_id")

    @property
    def engine(self) -> str:
        """Engine of the batch; empty if it merged none."""
        return str(self._ours.get("engine", ""))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the batch by phase up to its commit; without them those of the merge alone."""
        seconds = {str(phase): float(spent) for phase, spent in (self._ours.get("seconds") or {}).items()}
        merge = self.record.metrics.get("executionTimeMs", 0) / 1000
        return {**seconds, "merge": seconds.get("merge", 0.0) + merge}

    @property
    def seconds(self) -> float:
        """Seconds of the batch up to its commit."""
        return sum(self.phases.values())

    @property
    def fates(self) -> dict[str, int]:
        """Events of the batch by fate, without a later re-check; older commits show changed rows alone."""
        metrics, events = self.record.metrics, self._ours.get("events")
        known = {
            "inserted": metrics.get("numTargetRowsInserted", 0),
            **{
                fate: metrics.get(f"numTargetRows{what}", 0) - metrics.get(f"numTargetRowsNotMatchedBySource{what}", 0)
                for fate, what in (("updated", "Updated"), ("deleted", "Deleted"))
            },
        }
        if events is not None:
            known |= {fate: int(events[fate]) for fate in ("quarantined", "collapsed", "stale")}
            known["unaffected"] = max(0, int(events["received"]) - sum(known.values()))
        return {fate: known.get(fate, 0) for fate in FATES}

    @property
    def retries(self) -> int:
        """Attempts before the one that won."""
        return max(0, int(self._ours.get("attempt") or 1) - 1)

    @property
    def conflicts(self) -> dict[str, int]:
        """Commits that the batch lost to other writers, by Delta's class."""
        return dict(self._ours.get("conflicts") or {})

    @property
    def _ours(self) -> Mapping[str, Any]:
        return self.record.ours or {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """Events that one call put into the quarantine for one reason."""

    at: datetime
    reason: str
    events: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TableHistory:
    """A table and its newest commits."""

    target: str
    version: int
    files: Files
    sizes: tuple[int, ...]
    """Bytes of each data file."""
    commits: tuple[Commit, ...]
    """Oldest first."""
    quarantined: tuple[Quarantined, ...]
    """Since the oldest of the commits, oldest first."""

    @property
    def batches(self) -> list[Commit]:
        """Commits by which a sink merged a batch, oldest first."""
        return [commit for commit in self.commits if commit.is_batch]


def table_history(target: str, *, last: int = 1000, storage_options: Mapping[str, str] | None = None) -> TableHistory:
    """Read a table's newest commits.

    Cost: a request for each commit, many at once; the newest checkpoint; the quarantine.
    """
    table = opened(target, storage_options)
    live = list(LiveFiles(RemoteLog(table)).at(table.version).values())
    files = Files.described(live)
    commits = _commits(table, files, last)
    return TableHistory(
        target=target,
        version=table.version,
        files=files,
        sizes=tuple(int(add["size"]) for add in live),
        commits=commits,
        quarantined=tuple(_quarantined(target, storage_options, commits)),
    )


def _commits(table: LogHandle, after: Files, last: int) -> tuple[Commit, ...]:
    """The newest commits, oldest first; each version's files follow from those of the version after it."""
    newest: list[Commit] = []
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        versions = range(table.version, max(-1, table.version - last), -1)
        commits = threads.map(lambda version: _commit(table, version), versions)
        for commit in commits:
            if commit is None:  # the log is tidied up to here
                threads.shutdown(cancel_futures=True)
                break
            newest.append(replace(commit, after=after))
            after = after.minus(commit.changed)
    return tuple(reversed(newest))


def _commit(table: LogHandle, version: int) -> Commit | None:
    try:
        text = table.commit(version)
    except FileNotFoundError:
        return None
    actions = [json.loads(line) for line in text.splitlines() if line.startswith(_READ)]
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    added, removed = (Files.described([a[kind] for a in actions if kind in a]) for kind in ("add", "remove"))
    return Commit(
        record=record({**info, "version": version}),
        operation=str(info.get("operation", "")),
        changed=added.minus(removed),
        after=Files(),
    )


def _quarantined(
    target: str, storage_options: Mapping[str, str] | None, commits: Sequence[Commit]
) -> Iterator[Quarantined]:
    beside = find(TableRef(target).quarantine, storage_options)
    if beside is None or not commits:
        return
    oldest = commits[0]  # events of the batch that makes the table are in quarantine before
    since = None if oldest.record.version == 0 else oldest.at
    try:
        rows = beside.query(
            "SELECT reason, recorded_at, count(*) AS events"
            " FROM (SELECT unnest(reasons) AS reason, recorded_at FROM log)"
            " GROUP BY reason, recorded_at ORDER BY recorded_at, reason"
        )
    except Exception as err:
        msg = f"[NEEDS_SPARK] the quarantine of {target!r} cannot be read without Spark: {err}; read it in Spark"
        raise ConfigError(msg, target=target) from err
    for row in rows.to_pylist():
        if since is None or row["recorded_at"] >= since:
            yield Quarantined(at=row["recorded_at"], reason=row["reason"], events=row["events"])
