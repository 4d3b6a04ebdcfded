"""What a handle keeps in memory of its table, from version to version as long as only this handle commits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from stream_merge.model.logs import tell

log = logging.getLogger(__name__)

MOST_KEPT_ROWS = 100_000
"""Tables of up to so many rows may be kept in memory: reading many small files costs more."""
_MOST_CHUNKS = 64


class KeptRows:
    """All rows of a small table.

    Args:
        location: of the table, for messages.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._rows: tuple[int, pa.Table] | None = None

    def of(self, version: int, read: Callable[[], pa.Table]) -> pa.Table:
        """Those of a version, read where another one's are kept."""
        if self._rows is None or self._rows[0] != version:
            self._rows = (version, read())
        return self._rows[1]

    def append(self, before: int, version: int, appended: pa.Table) -> None:
        """Add what was appended to the rows of the version before, or forget these."""
        kept, self._rows = self._rows, None
        if kept is None or kept[0] != before or version != before + 1 or kept[1].num_rows > MOST_KEPT_ROWS:
            return
        try:
            rows = pa.concat_tables([kept[1], appended.select(kept[1].column_names).cast(kept[1].schema)])
            self._rows = (version, rows.combine_chunks() if rows[0].num_chunks > _MOST_CHUNKS else rows)
        except (pa.ArrowException, KeyError):
            # The append has landed; the rows are read again when they are wanted.
            tell(log.warning, "rows_not_kept", table=self._location, exc_info=True)


class KeptTransactions:
    """The batch ids by application id, as far as somebody has asked for them."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._known: dict[str, int | None] = {}

    def of(self, version: int, app_id: str, read: Callable[[str], int | None]) -> int | None:
        """What a version records, read where it is not known."""
        if self._version != version:
            self._version, self._known = version, {}
        if app_id not in self._known:
            self._known[app_id] = read(app_id)
        return self._known[app_id]

    def add(self, before: Before, version: int, transaction: tuple[str, int] | None) -> None:
        """Note what the commit of this handle records that has made a version."""
        if (self._version, before.version + 1) == (before.version, version):
            self._version = version
            self._known |= {} if transaction is None else dict([transaction])


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """What a handle knows before a commit of its own."""

    version: int
    live: pa.ChunkedArray
    """Paths of the data files."""
