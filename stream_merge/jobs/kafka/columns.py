"""Which columns the rows of a query have, and which schemas of events fit into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from pyspark.sql import types as T

from stream_merge.errors import ConfigError
from stream_merge.jobs.kafka.column_defaults import ColumnDefault
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.model import names
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import widening
from stream_merge.sources.decode import null_values
from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes.base import Format, Kind
from stream_merge.sources.wire.connect_json import DECLARED
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.strict_json import NotRegisteredError, UndecodableError
from stream_merge.spark import columns


class RowSchema:
    """The columns of a query's rows: those that its events have, in the target's types.

    Columns of the target that no event has are left alone. A column that the target does not have yet gets the widest
    of the types that are known for it.

    Args:
        target: name of the table, for errors.
        keys: key columns.
        format: how events are written.
        may_grow: whether a new column may be added to an existing target.
        widens: whether the type of a column of an existing target may be changed to a wider one.
        wanted: column -> type that the job file wants numbers to be stored as, at least.
        max_value_bytes: of a record that is decoded.
    """

    def __init__(
        self,
        *,
        target: TableRef,
        keys: tuple[str, ...],
        format: Format,
        may_grow: bool,
        widens: bool,
        wanted: Mapping[str, T.DataType],
        max_value_bytes: int,
    ) -> None:
        self._target = target
        self._keys = keys
        self._format = format
        self._may_grow = may_grow
        self._widens = widens
        self._wanted = wanted
        self._max_value_bytes = max_value_bytes
        self._stored: dict[str, T.DataType] | None = None
        """Types by name in small letters, as Spark looks names up; None where there is no target yet."""
        self._newest: Callable[[], Records] | None = None
        self.columns = T.StructType([])
        self.known: frozenset[str] = frozenset()
        self.broken: dict[str, str] = {}
        self._not_registered: set[str] = set()
        """Those of `broken` that the registry did not have."""
        self.defaults: dict[str, ColumnDefault] = {}
        """Defaults of columns that were met since the last look at the target, or that it lacked then."""

    @classmethod
    def of_query(cls, settings: QuerySettings) -> RowSchema:
        """As a job file says."""
        return cls(
            target=settings.target,
            keys=settings.event_keys,
            format=settings.format(),
            may_grow=bool(settings.schema_evolution),
            widens=settings.schema_evolution == "widen",
            wanted=settings.value_format.wanted(),
            max_value_bytes=settings.limits.max_value_bytes,
        )

    def start_from(self, stored: T.StructType | None) -> None:
        """Take the target's types as they are now; None where there is no target yet."""
        if stored is not None:
            own = [field for field in stored.fields if not names.is_reserved(field.name)]
            self._stored = {field.name.lower(): columns.nullable(field.dataType) for field in own}
            self.defaults = {name: d for name, d in self.defaults.items() if name.lower() not in self._stored}

    def look_ahead_in(self, newest: Callable[[], Records]) -> None:
        """Where to see, before a column is made, which type it has by now in the newest records."""
        self._newest = newest

    def admit_declared(self) -> None:
        """Let in the columns that the job declares, where it does; they count from the first event on."""
        if self._format.is_declared:
            self.admit(DECLARED)

    def decoder(self) -> Decoder:
        """A decoder for the schemas that have been let in so far."""
        return Decoder(
            format=self._format,
            columns=self.columns,
            keys=self._keys,
            known=self.known,
            broken=self.broken,
            max_value_bytes=self._max_value_bytes,
            may_be_framed=True,
        )

    @property
    def changed(self) -> dict[str, tuple[str, str]]:
        """Columns of the target that are to be widened: their types now and then."""
        stored = self._stored or {}
        now = {field.name: (stored.get(field.name.lower()), field.dataType) for field in self.columns.fields}
        return {
            name: (before.simpleString(), after.simpleString())
            for name, (before, after) in now.items()
            if before is not None and before != after
        }

    def admit_noted(self, notes: Iterable[str | None]) -> None:
        """As `admit`, of the schemas that a decoder has found; one of keys alone only while no row's is known."""
        of_rows, of_keys = null_values.schemas(notes)
        learned = [self._learned(schema_id) for schema_id in of_keys]
        self.admit(*of_rows)
        if not self.known:
            self.admit(*(schema_id for schema_id in learned if schema_id is not None))

    def _learned(self, schema_id: str) -> str | None:
        try:
            return self._format.key.learn(schema_id)
        except UndecodableError as err:
            self._break(schema_id, err)
            return None

    def _break(self, schema_id: str, err: UndecodableError) -> None:
        self.broken[schema_id] = str(err)
        if isinstance(err, NotRegisteredError):
            self._not_registered.add(schema_id)

    def forget_not_registered(self) -> None:
        """Ask the registry again for schemas that it did not have: records of the next batch may have them."""
        self.broken = {
            schema_id: why for schema_id, why in self.broken.items() if schema_id not in self._not_registered
        }
        self._not_registered.clear()

    def registered(self, records: Records) -> tuple[list[str], str | None] | None:
        """Kinds of records in Avro by their schemas alone, which are admitted, and why one of them cannot be read.

        Returns: None for records that are read without a registry.
        """
        kinds, problem = [], None
        for value in records.values.to_pylist():
            schema_ids = self._format.registered([value])
            if schema_ids is None:
                return None
            self.admit(*(schema_ids - self.known - self.broken.keys()))
            broken = [self.broken[schema_id] for schema_id in schema_ids if schema_id in self.broken]
            if value is not None and not schema_ids:
                broken.append("the record does not start with byte 0 and the id of a schema")
            problem = problem or next(iter(broken), None)
            kinds.append(str(Kind.UNDECODABLE if broken else Kind.UPSERT if schema_ids else Kind.NULL_VALUE))
        return kinds, problem

    def admit(self, *schema_ids: str) -> None:
        """Let events of other schemas in; one that nothing can be stored in is the fault of its events.

        Cost: where a column is new to the target, one look at the newest records of the topic.

        Raises:
            ConfigError: the target cannot hold a column exactly, lacks one that may not be added, or a key is missing;
                or `types` of the job file wants a type in which events cannot be stored.
            kafka.errors.KafkaError: the broker cannot be reached, or refuses.
        """
        found: dict[str, Mapping[str, Encoding]] = {}
        for schema_id in schema_ids:
            try:
                found[schema_id] = self._format.encodings(schema_id)
            except UndecodableError as err:
                self._break(schema_id, err)
                continue
            self._refuse_without_keys(found[schema_id])
        stored, ours = self._stored or {}, {field.name: field.dataType for field in self.columns.fields}
        brought = [(name, encoding.dtype) for encodings in found.values() for name, encoding in encodings.items()]
        self._refuse_unfit_wishes(brought)
        have = {name: stored[name.lower()] for name, _ in brought if name.lower() in stored} | ours
        new = list(dict.fromkeys(name for name, _ in brought if name not in have))
        if new and self._stored is not None and not self._may_grow:
            msg = (
                f"[COLUMN_NOT_IN_TARGET] events for {self._target!r} have column(s) {new!r} that the table lacks; add"
                " them, or set schema_evolution"
            )
            raise ConfigError(msg, target=self._target)
        have |= self._types_of_new(set(new), brought, ahead=bool(found.keys() - {DECLARED}))
        for name, dtype in brought:
            if _cannot_hold(name, dtype, have[name]):
                have[name] = self._wider(name, dtype, have[name])
        self.columns = T.StructType(
            [T.StructField(name, have[name]) for name in dict.fromkeys([*ours, *dict(brought)])]
        )
        self.known |= found.keys()
        for encodings in found.values():
            self._note_defaults({name: one for name, one in encodings.items() if name not in ours})

    def _note_defaults(self, new: Mapping[str, Encoding]) -> None:
        for name, encoding in new.items():
            if encoding.default is None:
                continue
            adds = None if self._stored is None else name.lower() not in self._stored
            default = ColumnDefault.from_encoding(encoding, self.columns[name].dataType, adds_column=adds)
            known = self.defaults.setdefault(name, default)
            if known.value != default.value:  # it was changed since, and which one came first is not known
                self.defaults[name] = replace(default, shown=f"{known.shown} or {default.shown}", value=None)

    def _types_of_new(
        self, new: set[str], brought: list[tuple[str, T.DataType]], *, ahead: bool
    ) -> dict[str, T.DataType]:
        """For each new column the widest of the types that these events, the newest ones and the job file give it."""
        found: dict[str, T.DataType] = {}
        for name, dtype in [*brought, *(self._ahead() if new and ahead else ()), *self._wanted.items()]:
            if name in new and name not in found:
                found[name] = columns.nullable(dtype)
            elif name in new:
                # A type that none holds beside the others is told when events bring it.
                found[name] = columns.nullable(widening.widest(dtype, found[name]) or found[name])
        return found

    def _ahead(self) -> Iterator[tuple[str, T.DataType]]:
        """Columns and types of the newest records."""
        for schema_id in () if self._newest is None else sorted(self._schemas(self._newest())):
            try:
                encodings = self._format.encodings(schema_id)
            except UndecodableError:
                continue
            yield from ((name, encoding.dtype) for name, encoding in encodings.items())

    def _wider(self, name: str, brought: T.DataType, held: T.DataType) -> T.DataType:
        """Another type for a column that cannot hold what events bring."""
        stored = (self._stored or {}).get(name.lower())
        found = widening.widest(brought, held) if stored is None else widening.alterable(brought, held)
        if found is not None and not _cannot_hold(name, brought, found) and (stored is None or self._widens):
            return found
        now, then = brought.simpleString(), held.simpleString()
        anew = "point the job at a new table and a new checkpoint"
        # A numeric without digits comes as text; 'types' has text and decimals of it stored alike.
        as_text, as_number = f"'types: {{{name}: string}}'", f"'types: {{{name}: \"decimal(38,10)\"}}'"
        both_ways = {type(brought), type(held)} == {T.DecimalType, T.StringType}
        if stored is None:
            remedy = "no type holds both: set 'start' to a time after the change"
            remedy = f"set {as_text} or {as_number}, which hold both" if both_ways else remedy
        elif found is None and both_ways:
            remedy = f"set {as_number} and 'schema_evolution: widen', or {as_text} and {anew}"
            remedy = f"set {as_text}, which holds both" if isinstance(held, T.StringType) else remedy
        elif found is None:
            remedy = f"change the column's type, or {anew}"
        else:
            changes = list(widening.changes(stored, found, name))
            commands = "; ".join(widening.statements(self._target, changes, {}))
            remedy = f"set 'schema_evolution: widen', widen it in Spark ({commands}), or {anew}"
        msg = f"[COLUMN_TYPE_CHANGED] column {name!r} of {self._target!r} is {then}, new events have {now}; {remedy}"
        raise ConfigError(msg, target=self._target)

    def _schemas(self, records: Records) -> set[str]:
        """The schemas that records are written in, without those that are let in already."""
        registered = self._format.registered(records.values.to_pylist())
        if registered is not None:
            return registered - self.known
        found = self.decoder().decode(records, set()).to_pylist()
        return set(null_values.schemas(row["note"] for row in found if row["kind"] == Kind.OTHER_SCHEMA)[0])

    def _refuse_unfit_wishes(self, brought: list[tuple[str, T.DataType]]) -> None:
        for name, dtype in brought:
            wish = self._wanted.get(name)
            if wish is not None and widening.widest(wish, dtype) is None:
                msg = (
                    f"[INVALID_SETTING] types: {name!r} is {wish.simpleString()!r}, but events for {self._target!r}"
                    f" have {dtype.simpleString()}; use a wider number type, 'string' for a decimal, or remove it"
                )
                raise ConfigError(msg, target=self._target)

    def _refuse_without_keys(self, encodings: Mapping[str, Encoding]) -> None:
        missing = [key for key in self._keys if key not in encodings]
        if missing:
            have = list(encodings)
            msg = (
                f"[COLUMN_NOT_FOUND] events for {self._target!r} lack key column(s) {missing!r}; they have {have!r};"
                " correct 'keys'"
            )
            raise ConfigError(msg, target=self._target)


def _cannot_hold(name: str, found: T.DataType, stored: T.DataType) -> bool:
    """Whether values of one type lose something in the other; structs must be the same."""
    if _has_struct(found) or _has_struct(stored):
        return columns.nullable(found) != stored
    return columns.refusal(name, found, stored) is not None


def _has_struct(dtype: T.DataType) -> bool:
    if isinstance(dtype, T.ArrayType):
        return _has_struct(dtype.elementType)
    if isinstance(dtype, T.MapType):
        return _has_struct(dtype.keyType) or _has_struct(dtype.valueType)
    return isinstance(dtype, T.StructType)
