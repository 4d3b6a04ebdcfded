"""What every merger in the driver does alike: it reads the target's log, and its change feed, through delta-rs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from stream_merge.model.results import Upkeep
from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs import data_files
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.tombstones.delta_rs import NativeHits


class NoLongerEligibleError(RuntimeError):
    """Another writer has changed the table so that it must not be merged into in the driver; nothing was written."""


class DriverMerger:
    """A merger's target.

    Args:
        target: the table.
        layout: how the batch's columns map onto it.
    """

    def __init__(self, *, target: NativeTable, layout: Layout) -> None:
        self._table = target
        self._layout = layout

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        self._table.refresh()
        return self._table.snapshot()

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        return self._table.commits(newer_than, up_to)

    def counted_as(self, late: NativeHits, version: int) -> Mapping[str, int]:
        """How many of the refused keys a version's change feed shows as inserted and as updated."""
        keys = list(self._layout.keys)
        if self._table.snapshot().maps_columns:
            return {}  # delta-rs 1.6 cannot read their feed; the ledger then takes repaired events from the unaffected
        if data_files.adds_escaped(self._table.commit(version)):
            return {}  # nor does it find change files under paths with escapes
        changed = self._table.changes(version).select([*keys, "_change_type"])
        refused = late.refused_entries().select(keys)
        schema = pa.schema([*refused.schema, pa.field("_change_type", pa.string())])
        touched = changed.cast(schema).join(refused, keys, join_type="left semi")
        kinds = touched["_change_type"].to_pylist()
        return {"inserted": kinds.count("insert"), "updated": kinds.count("update_postimage")}

    def tidy(self) -> Upkeep | None:
        """Nothing: files are as large as they were."""
        return None
