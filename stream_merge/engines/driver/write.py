"""Writes the files and actions of one attempt: changed rows leave their files, new versions go into new ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from stream_merge.engines.base import CommitTag
from stream_merge.engines.driver.decide import Decision
from stream_merge.model.results import Mode
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.tables.files import commit, partitions, vectors
from stream_merge.tables.files.data_file import (
    CHANGE_TYPE,
    OTHERS_PREFIX,
    OWN_PREFIX,
    write_change_file,
    write_data_file,
)
from stream_merge.tables.files.find import Candidate, live_rows
from stream_merge.tables.files.table import DeadRows, TableFiles, rows_by_file
from stream_merge.tables.log.live_files import decoded

_SMALL_BYTES = 8 << 20
"""Encoded bytes below which the rest of a file is written together with the new rows of its partition."""
_MOST_BYTES = 128 << 20
"""Bytes in memory of a new file's rows: Spark's `parquet.block.size`."""
_AT_ONCE = 2
"""Files rewritten in parallel."""

_Partition = tuple[tuple[str, str | None], ...]
_Losing = tuple[Candidate, BitMap64]
"""A file, and the positions of all its rows that are deleted once the attempt is committed."""


def rewritten_bytes(table: TableFiles, touched: Iterable[Candidate]) -> int:
    """Upper bound of the bytes of rows in memory at once while files are rewritten."""
    sizes = [one.encoded_bytes for one in touched]
    small = sum(size for size in sizes if size < _SMALL_BYTES)
    large = sorted(min(table.expansion * size, _MOST_BYTES) for size in sizes if size >= _SMALL_BYTES)
    return int(max(min(table.expansion * small, _MOST_BYTES), sum(large[-_AT_ONCE:])))


class Attempt:
    """The files and actions of one attempt to commit."""

    def __init__(self, table: TableFiles, snapshot: TableSnapshot, decision: Decision, now_ms: int) -> None:
        self._table = table
        self._root = table.folder.root
        self._snapshot = snapshot
        self._decision = decision
        self._now_ms = now_ms
        self._removes: list[Mapping[str, Any]] = []
        self._adds: list[Mapping[str, Any]] = []
        self._changes: list[Mapping[str, Any]] = []
        self.files: list[str] = []
        """What was written, by decoded paths: to be discarded if the commit is lost."""

    def write(self, mode: Mode, dead: DeadRows) -> dict[str, int]:
        """Write all files, and return metrics by Delta's names.

        "mark" adds a deletion vector to the files that lose rows; "rewrite" writes these files again.
        """
        losing = [
            (dead.touched[number], dead.positions(number) | BitMap64(positions))
            for number, positions, _ in rows_by_file(self._decision.gone)
        ]
        self._removes += [commit.removed(one.add, self._now_ms) for one, _ in losing]
        shrunk = [(one, gone) for one, gone in losing if len(gone) < one.footer.rows]
        marked = [one for one, _ in shrunk] if mode == "mark" else []
        new = self._append({}) if mode == "mark" else self._rewrite(shrunk)
        if mode == "mark":
            self._mark(shrunk)
        self._table.folder.send(self.files)
        self._adds += new
        had_vector = [one.add.get("deletionVector") is not None for one in marked]
        emptied = [one for one, _ in losing if one not in marked]
        return {
            "numTargetRowsCopied": sum(one.footer.rows - len(gone) for one, gone in shrunk if not marked),
            "numTargetFilesAdded": len(new),
            "numTargetBytesAdded": sum(int(add["size"]) for add in new),
            "numTargetFilesRemoved": len(emptied),
            "numTargetBytesRemoved": sum(int(one.add["size"]) for one in emptied),
            "numTargetDeletionVectorsAdded": had_vector.count(False),
            "numTargetDeletionVectorsUpdated": had_vector.count(True),
            "numTargetDeletionVectorsRemoved": sum(one.add.get("deletionVector") is not None for one in emptied),
            "numTargetChangeFilesAdded": len(self._changes),
            "numTargetChangeFileBytes": sum(int(body["size"]) for body in self._changes),
        }

    def commit(self, tag: CommitTag, metrics: Mapping[str, int]) -> commit.Commit:
        """The commit, for the version after the one that was read."""
        before = self._snapshot.version
        return commit.Commit(
            version=before + 1,
            now_ms=self._now_ms,
            user_metadata=tag.user_metadata,
            metrics=_as_history(metrics),
            transaction=None if tag.app_id is None else (tag.app_id, tag.batch_id),
            parameters={"predicate": "[]", "matchedPredicates": "[]", "notMatchedPredicates": "[]"},
            removes=self._removes,
            adds=self._adds,
            changes=self._changes,
            in_commit_timestamp=commit.timestamp_after(self._snapshot, self._table.folder.log, self._now_ms),
        )

    def _mark(self, shrunk: Sequence[_Losing]) -> None:
        """Add the files again with a larger deletion vector."""
        described = vectors.write(self._root, {one.path: gone for one, gone in shrunk})
        self.files += vectors.vector_files({"deletionVector": vector} for vector in described.values())
        for one, _ in shrunk:
            vector = described[one.path]
            self._adds.append(commit.added_again(one.add, vector, one.footer.rows))

    def _rewrite(self, shrunk: Sequence[_Losing]) -> list[Mapping[str, Any]]:
        """Rewrite the files without the rows that change, small ones together with the new rows of their partition."""
        small: dict[_Partition, list[_Losing]] = defaultdict(list)
        large: list[_Losing] = []
        for one, gone in shrunk:
            if one.encoded_bytes < _SMALL_BYTES:
                small[tuple(one.partition.items())].append((one, gone))
            else:
                large.append((one, gone))
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            rewritten = list(threads.map(self._rewritten, large))
        return [*(add for adds in rewritten for add in adds), *self._append(small)]

    def _rewritten(self, losing: _Losing) -> list[Mapping[str, Any]]:
        # Their rows may be in an order that someone gave them: compaction leaves them alone.
        partition = losing[0].partition
        return [self._written(rows, partition, OTHERS_PREFIX) for rows in _in_parts(self._left(losing))]

    def _left(self, losing: _Losing) -> Iterator[pa.Table]:
        """The rows that a file keeps, without its partition columns."""
        one, gone = losing
        total = 0
        for part in live_rows(self._root, one, gone, self._snapshot.schema):
            total += part.nbytes
            yield part.drop_columns(list(self._snapshot.partition_columns))
        self._table.expands(one, total)

    def _append(self, small: Mapping[_Partition, Sequence[_Losing]]) -> list[Mapping[str, Any]]:
        """Write new rows and the rest of small files, and the change feed where the table has one."""
        decision, schema, columns = self._decision, self._snapshot.schema, self._snapshot.partition_columns
        tables: dict[_Partition, list[Iterable[pa.Table]]] = defaultdict(list)
        for partition, files in small.items():
            tables[partition] += [self._left(losing) for losing in files]
        fresh = pa.concat_tables([decision.after, decision.inserted])
        for values, part in partitions.split(fresh, schema, columns):
            tables[tuple(values.items())].append([part])
        new = [
            self._written(rows, dict(partition), OWN_PREFIX)
            for partition, parts in tables.items()
            for rows in _in_parts(rows for part in parts for rows in part)
        ]
        if self._snapshot.has_feed:
            for values, part in partitions.split(_feed(decision), schema, columns):
                change = write_change_file(
                    self._root, part, schema, partition=values, properties=self._snapshot.properties
                )
                self.files.append(decoded(change["path"]))
                self._changes.append(change)
        return new

    def _written(self, rows: pa.Table, partition: Mapping[str, str | None], prefix: str) -> Mapping[str, Any]:
        add = write_data_file(
            self._root,
            rows,
            self._snapshot.schema,
            partition=partition,
            properties=self._snapshot.properties,
            now_ms=self._now_ms,
            prefix=prefix,
        )
        self.files.append(decoded(add["path"]))
        return add


def _in_parts(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The rows of tables in parts of about `_MOST_BYTES`; no part is empty."""
    part: list[pa.Table] = []
    total = 0
    for rows in tables:
        part.append(rows)
        total += rows.nbytes
        if total >= _MOST_BYTES:
            yield pa.concat_tables(part)
            part, total = [], 0
    if any(rows.num_rows for rows in part):
        yield pa.concat_tables(part)


def _feed(decision: Decision) -> pa.Table:
    """The change feed of a merge."""
    return pa.concat_tables(
        [
            rows.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(kind), rows.num_rows))
            for rows, kind in (
                (decision.before, "update_preimage"),
                (decision.after, "update_postimage"),
                (decision.deleted, "delete"),
                (decision.inserted, "insert"),
            )
        ]
    )


def _as_history(metrics: Mapping[str, int]) -> dict[str, int]:
    """The metrics of a commit as Delta's MERGE (4.4) writes them into the log: see `metrics_of_history`."""
    written = {name: value for name, value in metrics.items() if name != "operationNumSourceRows"}
    updated = written.get("numTargetDeletionVectorsUpdated", 0)
    for name in ("numTargetDeletionVectorsAdded", "numTargetDeletionVectorsRemoved"):
        written[name] = written.get(name, 0) + updated
    written["numSourceRows"] = metrics["operationNumSourceRows"]
    written["numOutputRows"] = sum(written[f"numTargetRows{kind}"] for kind in ("Inserted", "Updated", "Copied"))
    return written
