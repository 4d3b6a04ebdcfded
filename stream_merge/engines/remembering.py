"""The half of an engine that remembers deletes, by delta-rs: the same whoever merges the target."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.model import names
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.tables.side_commits import SideCommit
from stream_merge.tables.tombstones.delta_rs import NativeHits, NativeTombstones


class RemembersNatively:
    """Works on the tombstones of one batch.

    Args:
        tombstones: the target's remembered deletes; None when they are switched off.
        events: one row per key, with at least keys, sequence and whether it is a delete.
        bounds: least and greatest keys.
    """

    def __init__(self, tombstones: NativeTombstones | None, events: pa.Table, bounds: KeyBounds) -> None:
        self._log = tombstones
        self._events = events
        self._bounds = bounds

    def log_version(self) -> int | None:
        """Newest version of the tombstone log; None while there is none for this target."""
        return self._tombstones.version()

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes to the tombstone log."""
        self._tombstones.remember(self._events.filter(self._events[names.DELETE_COLUMN]), commit)

    def no_hits(self) -> NativeHits:
        """Nothing found."""
        return NativeHits()

    def find_hits(self) -> NativeHits:
        """Find the tombstones of the batch's keys."""
        return self._tombstones.hits(self._events, self._bounds)

    def find_late_hits(self, seen: NativeHits) -> NativeHits:
        """Find the tombstones of the upserts that were merged."""
        live = self._live(seen)
        return self._tombstones.hits(live.filter(pc.invert(live[names.DELETE_COLUMN])), self._bounds)

    def forget(self, hits: NativeHits, commit: SideCommit) -> None:
        """Mark the tombstones of revived keys as overtaken."""
        self._tombstones.forget(hits, commit)

    def tidy(self) -> None:
        """Tidy the tombstone log when it has many files."""
        self._tombstones.tidy()

    def _live(self, hits: NativeHits) -> pa.Table:
        """The events that no tombstone refuses."""
        if not hits.refused:
            return self._events
        return self._events.filter(pa.array(hits.kept(self._events.num_rows)))

    @property
    def _tombstones(self) -> NativeTombstones:
        if self._log is None:
            msg = "tombstones are switched off"
            raise AssertionError(msg)
        return self._log
