"""Which columns the rows of a query have, and which schemas of events fit into them."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import types as T

from stream_merge import columns, names
from stream_merge.errors import ConfigError
from stream_merge.job.settings import QuerySettings
from stream_merge.sources.decoding import Decoder
from stream_merge.sources.formats.base import Format
from stream_merge.sources.formats.connect_json import DECLARED
from stream_merge.sources.formats.encodings import Encoding
from stream_merge.sources.formats.strict_json import UndecodableError


class RowSchema:
    """The columns of a query's rows: those that its events have, in the target's types.

    Columns of the target that no event has are left alone.

    Args:
        target: name of the table, for errors.
        keys: key columns.
        format: how events are written.
        may_grow: whether a new column may be added to an existing target.
    """

    def __init__(self, *, target: str, keys: tuple[str, ...], format: Format, may_grow: bool) -> None:
        self._target = target
        self._keys = keys
        self._format = format
        self._may_grow = may_grow
        self._stored: dict[str, T.DataType] | None = None
        """Types by name in small letters, as Spark looks names up; None where there is no target yet."""
        self.columns = T.StructType([])
        self.known: frozenset[str] = frozenset()
        self.broken: dict[str, str] = {}

    @classmethod
    def of_query(cls, settings: QuerySettings) -> RowSchema:
        """As a job file says."""
        return cls(
            target=settings.target,
            keys=settings.event_keys,
            format=settings.format(),
            may_grow=settings.schema_evolution,
        )

    def start_from(self, stored: T.StructType | None) -> None:
        """Take the target's types as they are now; None where there is no target yet."""
        if stored is not None:
            own = [field for field in stored.fields if not names.is_reserved(field.name)]
            self._stored = {field.name.lower(): columns.nullable(field.dataType) for field in own}

    def admit_declared(self) -> None:
        """Let in the columns that the job declares, where it does; they count from the first event on."""
        if getattr(self._format, "declared", None) is not None:
            self.admit(DECLARED)

    def decoder(self, max_value_bytes: int) -> Decoder:
        """A decoder for the schemas that have been let in so far."""
        return Decoder(
            format=self._format,
            columns=self.columns,
            keys=self._keys,
            known=self.known,
            broken=self.broken,
            max_value_bytes=max_value_bytes,
        )

    def admit(self, schema_id: str) -> None:
        """Let events of another schema in; one that nothing can be stored in is the fault of its events.

        Raises:
            ConfigError: the target cannot hold a column exactly, lacks one that may not be added, or a key is missing.
        """
        try:
            encodings = self._format.encodings(schema_id)
        except UndecodableError as err:
            self.broken[schema_id] = str(err)
            return
        self._refuse_without_keys(encodings)
        stored = self._stored or {}
        have = {name: stored[name.lower()] for name in encodings if name.lower() in stored}
        have |= {field.name: field.dataType for field in self.columns.fields}
        new = [name for name in encodings if name not in have]
        if new and self._stored is not None and not self._may_grow:
            msg = f"events for {self._target!r} have column(s) {new!r} that it lacks; add them, or set schema_evolution"
            raise ConfigError(msg, target=self._target)
        for name, encoding in encodings.items():
            if name in have and _cannot_hold(name, encoding.dtype, have[name]):
                msg = (
                    f"column {name!r} of {self._target!r} is {have[name].simpleString()}, events now bring"
                    f" {encoding.dtype.simpleString()}, which it cannot hold exactly; change the column's type, or"
                    " point the job at a new table"
                )
                raise ConfigError(msg, target=self._target)
        grown = [
            T.StructField(name, have.get(name, columns.nullable(encoding.dtype)))
            for name, encoding in encodings.items()
            if name not in self.columns.names
        ]
        self.columns = T.StructType([*self.columns.fields, *grown])
        self.known |= {schema_id}

    def _refuse_without_keys(self, encodings: Mapping[str, Encoding]) -> None:
        missing = [key for key in self._keys if key not in encodings]
        if missing:
            have = list(encodings)
            msg = f"events for {self._target!r} have no column(s) {missing!r}, which are keys; they have {have!r}"
            raise ConfigError(msg, target=self._target)


def _cannot_hold(name: str, found: T.DataType, stored: T.DataType) -> bool:
    """Whether values of one type lose something in the other; nested types must be the same."""
    if isinstance(stored, T.StructType | T.ArrayType | T.MapType):
        return columns.nullable(found) != stored
    return columns.refusal(name, found, stored) is not None
