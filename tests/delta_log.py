"""An independent reader of Delta's log: whether every commit keeps the protocol, and which rows a table has.

Written from the text of Delta's PROTOCOL.md alone; it shares no code with the package, nor with Spark or delta-rs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from delta_log_files import (
    Action,
    Snapshot,
    action_of,
    checkpoints,
    commits_of,
    expect,
    lines_of,
    located,
    opened,
    read_vector,
    snapshot_at,
    snapshot_of,
    stats_of,
    vector_file,
    vector_id,
)
from delta_log_values import check_stats, counted, live_rows, rows_of
from pyroaring import BitMap64

__all__ = ["Checked", "check_table", "live_rows"]

_KINDS = frozenset({"insert", "delete", "update_preimage", "update_postimage"})
_METRICS = {
    "numTargetRowsInserted": "insert",
    "numTargetRowsUpdated": "update_postimage",
    "numTargetRowsDeleted": "delete",
}
_KEPT = ("size", "partitionValues", "tags", "clusteringProvider", "baseRowId", "defaultRowCommitVersion")
"""What an `add` that puts another vector on a file repeats from the former one, beside its statistics."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was checked: commits after `first` (a checkpoint, or -1) up to `version`, and what the table has then."""

    first: int
    version: int
    files: dict[str, Action]
    """The `add` of each live file by its path."""
    rows: int
    """Live rows, by `numRecords` and vectors."""
    changes: dict[int, Counter[str]]
    """Rows of the change files by `_change_type`, for each version that has such files."""


def check_table(root: Path, *, vacuumed: bool = False, txns_may_decrease: bool = False) -> Checked:
    """Replay the log from version 0, or from the oldest checkpoint if early commits are gone.

    Args:
        root: folder of the table.
        vacuumed: files that are not live any more, change files and old vectors may be missing; then the rows of
            change files are not compared with those of data files, only counted where they are there.
        txns_may_decrease: a `txn` may set an application back.

    Raises:
        AssertionError: at the first violation of the protocol, with the version.
    """
    first, commits = commits_of(root)
    checker = _Checker(root, vacuumed, txns_may_decrease, snapshot_at(root, first))
    for version, text in commits.items():
        try:
            checker.check(version, [action_of(line) for line in lines_of(text)])
        except AssertionError as err:
            msg = f"version {version} of {root}: {err}"
            raise AssertionError(msg) from err
    live = checker.table.live
    for path, add in live.items():
        expect(located(root, path).exists(), f"live file {path!r} is missing")
        expect(checker.vector(add) is not None, f"the vector of live file {path!r} is missing")
    rows = sum(checker.rows(add) for add in live.values())
    return Checked(first=first, version=max([first, *commits]), files=live, rows=rows, changes=checker.changes)


class _Checker:
    """Compares each commit with the table before it."""

    def __init__(self, root: Path, vacuumed: bool, txns_may_decrease: bool, table: Snapshot) -> None:
        self.table = table
        self.changes: dict[int, Counter[str]] = {}
        self._root, self._vacuumed, self._txns_may_decrease = root, vacuumed, txns_may_decrease
        self._vectors: dict[str, BitMap64] = {}
        self._counts: dict[str, int] = {}
        self._checkpoints = checkpoints(root)
        self._time = -1

    def check(self, version: int, actions: list[tuple[str, Action]]) -> None:
        """Compare a commit with the table before it, then apply it."""
        kinds = [kind for kind, _ in actions]
        alone = kinds[:1] == ["commitInfo"] and kinds.count("commitInfo") == 1
        expect(alone, "commitInfo is not first, or is there twice")
        info = actions[0][1]
        of = {kind: [action for k, action in actions if k == kind] for kind in ("add", "remove", "cdc", "txn")}
        adds, removes = _by_path(of["add"], "add"), _by_path(of["remove"], "remove")
        restores = info.get("operation") == "RESTORE"
        after = Snapshot(metadata=self.table.metadata, protocol=self.table.protocol)
        after.apply([pair for pair in actions if pair[0] in ("metaData", "protocol")])
        self._check_info(info, after)
        self._check_txns(of["txn"])
        for path, remove in removes.items():
            self._check_remove(path, remove)
        for path, add in adds.items():
            self._check_add(path, add, removed=path in removes, restores=restores, after=after)
        gone, new = self._moved(adds, removes)
        if of["cdc"]:
            self._check_changes(version, of["cdc"], gone, new, info)
            if not self._vacuumed:
                self._check_changed_rows(adds, removes, of["cdc"], after)
        elif not any(action["dataChange"] for action in (*of["add"], *of["remove"])):
            expect(gone == new, f"it rearranges {gone} rows (dataChange is false), but adds {new}")
        self.table.apply(actions)
        for name, files in self._checkpoints.get(version, {}).items():
            self._check_checkpoint(name, snapshot_of(files))

    def _check_info(self, info: Action, after: Snapshot) -> None:
        metrics = info.get("operationMetrics") or {}
        if not info.get("engineInfo", "").startswith("delta-rs"):  # it writes numbers
            wrong = [name for name, value in metrics.items() if not isinstance(value, str)]
            expect(not wrong, f"operationMetrics {wrong!r} are no strings")
        if after.configuration.get("delta.enableInCommitTimestamps") == "true":
            time = info.get("inCommitTimestamp", -1)
            expect(time > self._time, f"inCommitTimestamp {time} does not follow {self._time}")
            self._time = time

    def _check_txns(self, txns: list[Action]) -> None:
        apps = [txn["appId"] for txn in txns]
        expect(len(set(apps)) == len(apps), f"several txn for one of {apps!r}")
        for txn in txns:
            app, former = txn["appId"], self.table.txns.get(txn["appId"], -1)
            ok = self._txns_may_decrease or txn["version"] >= former
            expect(ok, f"txn of {app!r} goes back from {former} to {txn['version']}")

    def _check_remove(self, path: str, remove: Action) -> None:
        add = self.table.live.get(path)
        if add is None:
            msg = f"it removes {path!r}, which is not live"
            raise AssertionError(msg)
        ids = vector_id(remove), vector_id(add)
        expect(ids[0] == ids[1], f"it removes {path!r} with vector {ids[0]}, but the live file has {ids[1]}")
        expect(remove.get("deletionVector") in (None, add.get("deletionVector")), f"another descriptor of {path!r}")
        for what in ("size", "partitionValues"):
            expect(remove.get(what) in (None, add[what]), f"it removes {path!r} with another {what}")

    def _check_add(self, path: str, add: Action, *, removed: bool, restores: bool, after: Snapshot) -> None:
        former, own_id = self.table.live.get(path), vector_id(add)
        if former is not None and not removed:  # allowed for the very same logical file: another statistic, another tag
            expect(own_id == vector_id(former) and not add["dataChange"], f"it adds {path!r}, which is live already")
        elif not restores:
            expect((path, own_id) not in self.table.known, f"it adds {path!r} with vector {own_id} a second time")
            known = former is None and path in {p for p, _ in self.table.known}
            expect(not known, f"it adds {path!r}, which an earlier commit removed")
        if not self._present(path, add["size"]):
            return
        stats, records = stats_of(add), self._records(path)
        expect(stats.get("numRecords", records) == records, f"numRecords of {path!r} is not {records}: {stats}")
        if own_id is not None:
            self._check_vector(path, add, former, restores, after)
        if former is not None and removed and not restores:
            self._check_re_added(path, former, add)
        if former is None or _but_for_bounds(stats_of(former)) != _but_for_bounds(stats):
            check_stats(path, stats, opened(self._root, path).read())

    def _check_vector(self, path: str, add: Action, former: Action | None, restores: bool, after: Snapshot) -> None:
        features = [after.protocol.get(which) or [] for which in ("readerFeatures", "writerFeatures")]
        expect(all("deletionVectors" in names for names in features), "a vector without the table feature")
        wanted = after.configuration.get("delta.enableDeletionVectors") == "true"
        is_new = not restores and (path, vector_id(add)) not in self.table.known
        expect(wanted or not is_new, "a new vector, although delta.enableDeletionVectors is not true")
        stats, records = stats_of(add), self._records(path)
        expect("numRecords" in stats, f"{path!r} has a vector, but no numRecords")
        tight = stats.get("tightBounds", True) and set(stats) & {"minValues", "maxValues", "nullCount"}
        expect(not tight, f"{path!r} has a vector, but claims tight bounds")
        if (vector := self.vector(add)) is None:
            return
        expect(len(vector) <= records and (not vector or vector.max() < records), f"vector beyond the end of {path!r}")
        if former is not None and not restores and (before := self.vector(former)) is not None:
            kept = before.issubset(vector) if add["dataChange"] else before == vector
            expect(kept, f"the vector of {path!r} brings rows back: {list(before - vector)[:10]}")

    def _check_re_added(self, path: str, former: Action, add: Action) -> None:
        old, new = _but_for_bounds(stats_of(former)), _but_for_bounds(stats_of(add))
        old.setdefault("numRecords", new.get("numRecords"))
        expect(old == new, f"statistics of {path!r} changed from {old} to {new}")
        for what in _KEPT:
            expect((former.get(what) or None) == (add.get(what) or None), f"{what} of {path!r} changed")
        expect(not (former.get("deletionVector") and not add.get("deletionVector")), f"{path!r} lost its vector")

    def _moved(self, adds: dict[str, Action], removes: dict[str, Action]) -> tuple[int, int]:
        """How many live rows the commit takes away and brings; a file that it adds again counts by the difference."""
        before = {path: self.rows(self.table.live[path]) for path in (*removes, *adds) if path in self.table.live}
        after = {path: self.rows(add) for path, add in adds.items()}
        gone = {path: rows - after.get(path, 0) for path, rows in before.items()}
        new = sum(rows for path, rows in after.items() if path not in before)
        return sum(rows for rows in gone.values() if rows > 0), new - sum(rows for rows in gone.values() if rows < 0)

    def _check_changes(self, version: int, files: list[Action], gone: int, new: int, info: Action) -> None:
        found: Counter[str] = Counter()
        for path, cdc in _by_path(files, "cdc").items():
            expect(not cdc["dataChange"], f"change file {path!r} has dataChange")
            if not self._present(path, cdc["size"]):
                return
            found.update(self._kinds(path).to_pylist())
        expect(set(found) <= _KINDS, f"change files hold other kinds of changes: {dict(found)}")
        self.changes[version] = found
        metrics = info.get("operationMetrics") or {}
        copied = gone - found["delete"] - found["update_preimage"]
        balance = f"{gone} rows gone and {new} new, but the change files say {dict(found)}"
        expect(found["update_preimage"] == found["update_postimage"], f"pre-images are not as many: {balance}")
        expect(0 <= copied == new - found["insert"] - found["update_postimage"], balance)
        expect(int(metrics.get("numTargetRowsCopied", copied)) == copied, f"{balance}, and {metrics}")
        wrong = [name for name, kind in _METRICS.items() if int(metrics.get(name, found[kind])) != found[kind]]
        expect(not wrong, f"{wrong} differ: {metrics} and {dict(found)}")

    def _check_changed_rows(
        self, adds: dict[str, Action], removes: dict[str, Action], files: list[Action], after: Snapshot
    ) -> None:
        """The changes are the rows that go and come, and what goes and comes beside them is the same: copied rows."""
        gone, new = Counter[str](), Counter[str]()
        for path in {*adds, *removes}:
            was, now = self._positions(self.table.live.get(path)), self._positions(adds.get(path))
            file = adds.get(path) or self.table.live[path]
            for into, positions in ((gone, was - now), (new, now - was)):
                if positions:
                    into.update(counted(rows_of(self._root, after, file, positions)))
        told = {kind: Counter[str]() for kind in _KINDS}
        for file in files:
            rows, kinds = rows_of(self._root, after, file), self._kinds(file["path"])
            for kind, into in told.items():
                into.update(counted(rows.filter(pc.equal(kinds, kind))))
        out, back = told["delete"] + told["update_preimage"], told["insert"] + told["update_postimage"]
        for what, there, named in (("gone", gone, out), ("new", new, back)):
            expect(named <= there, f"change files say {what}, but the data files do not: {[*(named - there)][:3]}")
        lost, found = (gone - out) - (new - back), (new - back) - (gone - out)
        expect(not lost and not found, f"rows changed without a word: {[*lost][:3]} {[*found][:3]}")

    def _positions(self, add: Action | None) -> BitMap64:
        """The live rows of a file; none of none."""
        left = BitMap64()
        if add is not None:
            left.add_range(0, self._records(add["path"]))
            left -= self.vector(add) or BitMap64()
        return left

    def _kinds(self, path: str) -> pa.ChunkedArray:
        return opened(self._root, path).read(["_change_type"])["_change_type"].cast(pa.string())

    def _check_checkpoint(self, name: str, loaded: Snapshot) -> None:
        files = [{path: (vector_id(a), stats_of(a)) for path, a in t.live.items()} for t in (loaded, self.table)]
        expect(files[0] == files[1], f"checkpoint {name} has other files, vectors or statistics than the log")
        expect(loaded.txns == self.table.txns, f"checkpoint {name} has other txns: {loaded.txns}")

    def _present(self, path: str, size: int) -> bool:
        at = located(self._root, path)
        if not at.exists():
            expect(self._vacuumed, f"file {path!r} is missing")
            return False
        expect(at.stat().st_size == size, f"file {path!r} has {at.stat().st_size} bytes, the log says {size}")
        return True

    def _records(self, path: str) -> int:
        if path not in self._counts:
            self._counts[path] = opened(self._root, path).metadata.num_rows
        return self._counts[path]

    def vector(self, action: Action) -> BitMap64 | None:
        """The vector of a file, empty if it has none; None if it was vacuumed."""
        descriptor = action.get("deletionVector")
        if descriptor is None:
            return BitMap64()
        name = str(sorted(descriptor.items()))
        if name not in self._vectors:
            at = vector_file(self._root, descriptor)
            if self._vacuumed and at is not None and not at.exists():
                return None
            self._vectors[name] = read_vector(self._root, descriptor)
        return self._vectors[name]

    def rows(self, add: Action) -> int:
        """The live rows of a file by the log; of an old file without statistics by its footer."""
        dead = (add.get("deletionVector") or {}).get("cardinality", 0)
        records = stats_of(add).get("numRecords")
        return int((self._records(add["path"]) if records is None else records) - dead)


def _by_path(actions: list[Action], kind: str) -> dict[str, Action]:
    twice = [path for path, times in Counter(action["path"] for action in actions).items() if times > 1]
    expect(not twice, f"several {kind} actions for {twice!r}")
    return {action["path"]: action for action in actions}


def _but_for_bounds(stats: Action) -> Action:
    return {name: value for name, value in stats.items() if name != "tightBounds"}
