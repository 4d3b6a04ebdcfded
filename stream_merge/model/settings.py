"""The settings of a sink: frozen, checked as far as possible without Spark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol

from pyspark.sql import Column

from stream_merge.errors import ConfigError
from stream_merge.model import locations, names
from stream_merge.model.table_ref import TableRef

Engine = Literal["auto", "spark", "driver"]
OnInvalid = Literal["quarantine", "fail"]
SchemaEvolution = bool | Literal["widen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Create:
    """A target that the sink creates from the first batch."""

    partition_by: str | Sequence[str] = ()
    """Partition columns."""
    cluster_by: str | Sequence[str] = ()
    """Liquid clustering columns."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Table properties."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstones:
    """How deletes are remembered."""

    retention_seconds: float | None = None
    """None keeps remembered deletes forever: forgetting one lets an older upsert revive its key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """What the driver may do, and how it reaches the tables."""

    memory_bytes: int | None = None
    """Most memory that a merge there may need; None: chosen from what is free."""
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    """How it reaches an object store; never logged, never in a repr. None: on S3 and Azure by Spark's settings."""
    single_writer: bool = False
    """Promise that nobody else writes to the target; without it an object store is left to Spark, unless commits
    exclude each other there (on S3 by `streammerge.ConditionalPutLogStore`)."""


RENAMED: Mapping[str, str] = {
    "create_target": "create=False",
    "partition_by": "create=Create(partition_by=…)",
    "cluster_by": "create=Create(cluster_by=…)",
    "table_properties": "create=Create(properties=…)",
    "tombstone_retention_seconds": "tombstones=Tombstones(retention_seconds=…)",
    "single_writer": "driver=Driver(single_writer=…)",
    "storage_options": "driver=Driver(storage_options=…)",
    "native_memory_bytes": "driver=Driver(memory_bytes=…)",
}
"""Former arguments of `MergeSink` -> the present ones."""


SMALL_BYTES = 32 << 20
"""Smaller files are compacted; each byte of a partition is rewritten until its file reaches this size."""
_REMOVED = {
    "zorder_by": "create the table with cluster_by, or run OPTIMIZE … ZORDER BY yourself",
    "vacuum_after": "set vacuum, and the table property delta.deletedFileRetentionDuration",
    "budget_seconds": "raise every to compact less often",
    "budget": "raise every to compact less often",
    "force": "shorten the table property delta.deletedFileRetentionDuration instead",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Maintenance:
    """Compacts and vacuums the target at the end of a call, after the target's commit. It never fails a batch."""

    optimize: bool = True
    """OPTIMIZE small files, purge removed rows where they are many, and cluster new files of a clustered table."""
    vacuum: bool = False
    """VACUUM the target and its side tables, at most once a day: delete files that the table has not needed for its own
    `delta.deletedFileRetentionDuration`."""
    every: int = 100
    """After how many calls that changed a row."""

    def __new__(cls, **settings: object) -> Maintenance:  # noqa: D102 - the dataclass has the signature
        if problems := removed_settings(settings):
            raise ConfigError(problems)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        problems = list(_maintenance_problems(self))
        if problems:
            raise ConfigError(problems)


def removed_settings(names: Iterable[str]) -> list[str]:
    """What replaces each of these settings of earlier versions."""
    return [f"[UNKNOWN_SETTING] {name} is not a setting; {_REMOVED[name]}" for name in names if name in _REMOVED]


def _maintenance_problems(wanted: Any) -> Iterable[str]:
    for name in ("optimize", "vacuum"):
        if not isinstance(getattr(wanted, name), bool):
            yield f"[INVALID_SETTING] {name}={getattr(wanted, name)!r} must be True or False"
    if not isinstance(wanted.every, int) or isinstance(wanted.every, bool) or wanted.every < 1:
        yield f"[INVALID_SETTING] every={wanted.every!r} must be a whole number of calls, 1 or more"
    if not wanted.optimize and not wanted.vacuum:
        yield "[CONFLICTING_SETTINGS] optimize and vacuum are both off, so nothing is left to do; remove maintenance"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When a merge that lost an optimistic commit is tried again."""

    attempts: int = 6
    """Total tries, the first one included."""
    budget_seconds: float = 120.0
    """No try starts later than this after the first one; keep it below what a late batch may cost you."""
    backoff_initial_seconds: float = 0.2
    """Wait before the second try; doubles from try to try. A conflicting commit is usually over by then."""
    backoff_max_seconds: float = 15.0
    """Longest wait between two tries, jitter not included."""
    backoff_jitter_seconds: float = 1.0
    """Up to this much is added at random to each wait, so that two writers do not meet again."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not isinstance(self.attempts, int) or isinstance(self.attempts, bool) or self.attempts < 1:
            problems.append(f"[INVALID_SETTING] attempts={self.attempts!r} must be a whole number, 1 or more")
        for name in ("budget_seconds", "backoff_initial_seconds", "backoff_max_seconds", "backoff_jitter_seconds"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0:
                problems.append(f"[INVALID_SETTING] {name}={value!r} must be a finite number of seconds, 0 or more")
        if problems:
            raise ConfigError(problems)


class ShapeSettings(Protocol):
    """The part of `shapes.base.Shape` that settings use."""

    name: ClassVar[str]
    remembers_deletes: ClassVar[bool]
    keeps_sequence: ClassVar[bool]
    needs_whole_events: ClassVar[bool]
    is_whole: ClassVar[bool]
    only_inserts: bool
    concerns_missing: bool
    kept_beside: Mapping[str, str]

    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """The settings that cannot work with this shape."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeSpec:
    """Everything a `MergeSink` was configured with, normalised: lists are tuples, names are literal.

    Strings in `keys`, `sequence_by` and the column lists are literal top-level column names;
    nested fields can only be reached through a Column.
    """

    target: TableRef
    """Catalog name, or a path / URI when it has a slash or a scheme."""
    keys: tuple[str, ...]
    """Top-level columns that together identify a row."""
    sequence_by: tuple[str, ...] | Column
    """What orders the versions of a row: column names compared left to right, or one expression; empty where the
    shape needs none."""
    apply_as_deletes: str | Column | None = None
    """TRUE makes an event a delete, FALSE and NULL an upsert. None: there are no deletes."""
    column_list: tuple[str, ...] | None = None
    """Columns stored in the target; None stores all."""
    except_column_list: tuple[str, ...] | None = None
    """Columns not stored in the target."""
    on_invalid: OnInvalid = "quarantine"
    """What happens to events that break the contract; "fail" raises before anything is written."""
    quarantine_target: TableRef | None = None
    """None: the sibling `__stream_merge_quarantine_<table>`."""
    tombstones: bool = True
    """Remember deletes, so that a late upsert cannot revive a key. Switch off only for sources ordered per key."""
    tombstone_retention_seconds: float | None = None
    """See `Tombstones.retention_seconds`."""
    create_target: bool = True
    """Create the target from the first batch when it is missing."""
    partition_by: tuple[str, ...] = ()
    """See `Create`."""
    cluster_by: tuple[str, ...] = ()
    """See `Create`."""
    table_properties: Mapping[str, str] = field(default_factory=dict)
    """See `Create.properties`."""
    change_data_feed: bool = True
    """Make sure that `delta.enableChangeDataFeed` is on, also on an existing target."""
    schema_evolution: SchemaEvolution = False
    """True adds new columns and nested fields, never changes a type; "widen" also lets types grow, as far as Delta's
    type widening goes. False: an unknown source column is an error."""
    engine: Engine = "auto"
    """Who runs the merge; "auto" chooses for each batch."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When a lost optimistic commit is tried again."""
    app_id: str | None = None
    """First part of the idempotency identity; outside a streaming query the whole of it."""
    name: str | None = None
    """Bounded label for metrics and logs; part of the identity only because it was passed. None: from the target."""
    single_writer: bool = False
    """See `Driver`."""
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    """See `Driver`; never logged."""
    driver_memory_bytes: int | None = None
    """See `Driver.memory_bytes`."""
    maintenance: Maintenance | None = None
    """Maintenance of the target's files; None: never."""
    target_filter: str | None = None
    """SQL over the row `t`: the only part of the target that can have a batch's keys; None: all of it."""
    shape: ShapeSettings | None = None
    """What a batch means for the table; None: its changes."""
    source_columns: frozenset[str] = frozenset()
    """Those of `names.SOURCE_COLUMNS` that the source has; from other sources they are refused."""
    position_components: int | None = None
    """How many leading components of the sequence are the event's position in the source's log; the others tell
    deliveries apart. An event that repeats a row in every column and in these is not a change. None: all are."""
    skip_unchanged: bool = False
    """Whether an event that repeats a row in every column is not a change even with a newer sequence."""

    def __post_init__(self) -> None:
        for name in ("target", "quarantine_target"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, TableRef(text))
        problems = _problems(self)
        if problems:
            raise ConfigError(problems, target=self.target)

    @property
    def keeps_sequence(self) -> bool:
        """Whether the sequence is stored with the row."""
        return self.shape is None or self.shape.keeps_sequence

    @property
    def only_inserts(self) -> bool:
        """Whether no row is ever changed or removed."""
        return self.shape is not None and self.shape.only_inserts

    @property
    def concerns_missing(self) -> bool:
        """Whether rows whose key no event of a batch has are concerned."""
        return self.shape is not None and self.shape.concerns_missing

    @property
    def is_whole(self) -> bool:
        """Whether a batch is a full copy of the table."""
        return self.shape is not None and self.shape.is_whole

    @property
    def label(self) -> str:
        """The `target` label of metrics and logs."""
        return self.name if self.name is not None else self.target.last

    @property
    def tombstone_target(self) -> TableRef:
        """The table of remembered deletes."""
        return self.target.tombstones

    @property
    def quarantine_table(self) -> TableRef:
        """The table of events that break the contract."""
        return self.quarantine_target or self.target.quarantine


def _problems(spec: MergeSpec) -> list[str]:
    return [
        *_column_problems(spec),
        *_selection_problems(spec),
        *(() if spec.shape is None else spec.shape.problems(spec)),
        *_value_problems(spec),
        *_type_problems(spec),
        *_location_problems(spec),
        *_filter_problems(spec),
        *_list_problems("partition_by", spec.partition_by, may_be_empty=True),
        *_list_problems("cluster_by", spec.cluster_by, may_be_empty=True),
    ]


def _column_problems(spec: MergeSpec) -> Iterable[str]:
    yield from _list_problems("keys", spec.keys, may_be_empty=False)
    if not isinstance(spec.sequence_by, Column):
        yield from _list_problems("sequence_by", spec.sequence_by, may_be_empty=spec.shape is not None)
        for name in (name for name in spec.sequence_by if name in spec.keys):
            yield f"[CONFLICTING_SETTINGS] sequence_by={name!r} is also a key; a key cannot order its own versions"
    if isinstance(spec.apply_as_deletes, str) and not spec.apply_as_deletes.strip():
        yield "[INVALID_SETTING] apply_as_deletes is an empty string; use None when there are no deletes"


def _selection_problems(spec: MergeSpec) -> Iterable[str]:
    if spec.column_list is not None and spec.except_column_list is not None:
        yield "[CONFLICTING_SETTINGS] column_list and except_column_list are both given; keep one of them"
    if spec.column_list is not None:
        yield from _list_problems("column_list", spec.column_list, may_be_empty=False)
        # The session decides whether case matters; here only what no session could match is refused.
        listed = {name.lower() for name in spec.column_list if isinstance(name, str)}
        missing = [key for key in spec.keys if isinstance(key, str) and key.lower() not in listed]
        if missing:
            yield f"[CONFLICTING_SETTINGS] column_list lacks key(s) {missing!r}; add them"
    if spec.except_column_list is not None:
        yield from _list_problems("except_column_list", spec.except_column_list, may_be_empty=True)
        dropped = [key for key in spec.keys if key in spec.except_column_list]
        if dropped:
            yield f"[CONFLICTING_SETTINGS] except_column_list names key(s) {dropped!r}; remove them from it"


_CHOICES = {
    "on_invalid": ("must be one of 'quarantine', 'fail'", ("quarantine", "fail")),
    "engine": ("must be one of 'auto', 'spark', 'driver'", ("auto", "spark", "driver")),
    "schema_evolution": ("must be False, True or 'widen'", (False, True, "widen")),
}


def _value_problems(spec: MergeSpec) -> Iterable[str]:
    if not isinstance(spec.target, str) or not spec.target.strip():
        yield "[MISSING_SETTING] target is empty; set a catalog name, a path or a URI"
    for setting, (what, allowed) in _CHOICES.items():
        if getattr(spec, setting) not in allowed:
            yield f"[INVALID_SETTING] {setting}={getattr(spec, setting)!r} {what}"
    seconds: object = spec.tombstone_retention_seconds
    if seconds is not None and not _is_positive(seconds, below=_MOST_SECONDS):
        yield (
            f"[INVALID_SETTING] retention_seconds={seconds!r} must be a positive number up to"
            f" {_MOST_SECONDS:,}, or None to keep deletes forever"
        )
    memory: object = spec.driver_memory_bytes
    if memory is not None and not _is_positive(memory):
        yield f"[INVALID_SETTING] memory_bytes={memory!r} must be a positive number of bytes"
    if spec.partition_by and spec.cluster_by:
        yield "[CONFLICTING_SETTINGS] partition_by and cluster_by are both given; Delta allows one of them"
    for setting in ("app_id", "name", "quarantine_target"):
        text: object = getattr(spec, setting)
        if text is not None and not (isinstance(text, str) and text.strip()):
            yield f"[INVALID_SETTING] {setting}={text!r} must be a non-empty string, or None"
    yield from _text_problems("properties", spec.table_properties)
    if spec.storage_options is not None:
        yield from _text_problems("storage_options", spec.storage_options)


def _type_problems(spec: MergeSpec) -> Iterable[str]:
    for setting in ("tombstones", "create_target", "change_data_feed", "single_writer"):
        if not isinstance(getattr(spec, setting), bool):
            yield f"[INVALID_SETTING] {setting}={getattr(spec, setting)!r} must be True or False"
    deletes: object = spec.apply_as_deletes
    if not isinstance(deletes, str | Column | None):
        yield f"[INVALID_SETTING] apply_as_deletes={deletes!r} must be SQL text or a Column"
    for setting, kind in (("retry", RetryPolicy), ("maintenance", Maintenance)):
        value: object = getattr(spec, setting)
        if not isinstance(value, kind) and (value is not None or setting == "retry"):
            yield f"[INVALID_SETTING] {setting}={value!r} must be a {kind.__name__}, or None"


_MOST_SECONDS = 10**11
"""Some 3,000 years: Spark's timestamps end soon after."""


def _is_positive(value: object, *, below: float = 1e18) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return False
    number: Any = value
    return not (isinstance(value, Decimal) and value.is_nan()) and bool(0 < number < below)


def _text_problems(setting: str, given: object) -> Iterable[str]:
    """Why this is not a mapping of text to text; its values may be secrets, and are not shown."""
    if not isinstance(given, Mapping):
        yield f"[INVALID_SETTING] {setting} must be a dict of str to str, got {type(given).__name__}"
        return
    wrong = [name for name, value in given.items() if not (isinstance(name, str) and isinstance(value, str))]
    if wrong:
        yield f"[INVALID_SETTING] {setting} has non-strings at {wrong!r}; quote names and values, as in 'true' and '7'"


def _location_problems(spec: MergeSpec) -> Iterable[str]:
    """A bucket root as target, and side tables that are another of the sink's tables."""
    if not isinstance(spec.target, str) or not spec.target.strip():
        return
    if spec.target.is_root and (spec.tombstones or (spec.on_invalid == "quarantine" and not spec.quarantine_target)):
        yield (
            f"[TARGET_IS_BUCKET_ROOT] target={spec.target!r} is a bucket root; side tables are created next to the"
            " target, so use a path inside the bucket"
        )
    yield from _length_problems(spec)
    if not isinstance(spec.quarantine_target, str):
        return
    for whose, other in (("the target", spec.target), ("the tombstone table", spec.tombstone_target)):
        if spec.quarantine_target.canonical == other.canonical:
            yield f"[CONFLICTING_SETTINGS] quarantine_target={spec.quarantine_target!r} is {whose}; use another table"


def _length_problems(spec: MergeSpec) -> Iterable[str]:
    """A local folder name too long for the side tables, which repeat it behind a prefix."""
    wanted = [spec.target]
    wanted += [spec.tombstone_target] if spec.tombstones else []
    wanted += [spec.quarantine_table] if spec.on_invalid == "quarantine" and not spec.quarantine_target else []
    folders = [table.last for table in wanted if locations.local_path(table) is not None]
    longest = max((len(folder.encode()) for folder in folders), default=0)
    if longest > _LONGEST_FOLDER:
        own, most = len(folders[0].encode()), _LONGEST_FOLDER - (longest - len(folders[0].encode()))
        yield (
            f"[TARGET_NAME_TOO_LONG] target={spec.target!r} has a folder name of {own} bytes; side tables add a prefix"
            f" to it, so use at most {most} bytes"
        )


_LONGEST_FOLDER = 255
"""Bytes of one name on the file systems of Linux and macOS."""


def _filter_problems(spec: MergeSpec) -> Iterable[str]:
    written: object = spec.target_filter
    if written is None:
        return
    if not isinstance(written, str) or not written.strip():
        example = "t.day >= '2024-06-01'"
        yield f'[INVALID_SETTING] target_filter={written!r} must be SQL text over t, such as "{example}"'
        return
    if spec.engine == "driver":
        yield "[CONFLICTING_SETTINGS] target_filter is SQL, which engine='driver' does not execute; remove one of them"
    if spec.is_whole:
        yield (
            "[CONFLICTING_SETTINGS] target_filter does not apply to snapshots; for a part of the table use"
            " shape=Snapshot(within=…)"
        )


def _list_problems(setting: str, values: tuple[str, ...], *, may_be_empty: bool) -> Iterable[str]:
    if not values and not may_be_empty:
        yield f"[MISSING_SETTING] {setting} is empty; name at least one column"
    wrong = [value for value in values if not isinstance(value, str) or not value]
    if wrong:
        yield f"[INVALID_SETTING] {setting} holds {wrong!r}; every entry must be a column name"
        return
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        yield f"[INVALID_SETTING] {setting} names {twice!r} more than once; name each column once"
    reserved = sorted(value for value in values if names.is_reserved(value))
    if reserved:
        prefix = names.RESERVED_PREFIX
        yield f"[RESERVED_COLUMN_NAME] {setting} names {reserved!r}; the prefix {prefix!r} is reserved"
