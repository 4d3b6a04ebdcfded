"""What the settings name, looked up in the source and in the target's schema; every problem on the way is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, ByteType, DataType, NullType, StructField, StructType

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import required, widening
from stream_merge.shapes.base import without_sequence
from stream_merge.shapes.layout import StoredColumn
from stream_merge.shapes.widening import TypeChange
from stream_merge.spark import columns
from stream_merge.spark.errors import reason


class Finder:
    """Collects every problem while it looks names up in the source."""

    def __init__(self, source: DataFrame, spec: MergeSpec, case_sensitive: bool) -> None:
        self.source = source
        self.spec = spec
        self.case_sensitive = case_sensitive
        self.problems: list[str] = []
        self.type_changes: list[TypeChange] = []
        self.fields = [f for f in source.schema.fields if not _is_of_source(f, spec)]
        self.names = [f.name for f in self.fields]
        sequence = () if isinstance(spec.sequence_by, Column) or not spec.keeps_sequence else spec.sequence_by
        resolve = partial(columns.resolve, case_sensitive=case_sensitive)
        self._roles = [{resolve(name, self.names) for name in wanted} for wanted in (spec.keys, sequence)]
        """The source's names of the keys, and of the sequence."""
        self._compared = set[str | None]().union(*self._roles)

    def find(self, name: str, setting: str) -> StructField | None:
        """The source's field of that name; None and a problem when there is none."""
        found = columns.resolve(name, self.names, case_sensitive=self.case_sensitive)
        if found is None:
            self.problems.append(
                f"[COLUMN_NOT_FOUND] {setting} names column {name!r}, which the source does not have; its columns are"
                f" {self.names!r}"
            )
            return None
        return next(f for f in self.fields if f.name == found)

    def check_names(self) -> None:
        """Refuse reserved, clashing and doubled column names."""
        reserved = [name for name in self.names if names.is_reserved(name)]
        if reserved:
            self.problems.append(
                f"[RESERVED_COLUMN_NAME] the source has column(s) {reserved!r}; the prefix {names.RESERVED_PREFIX!r} is"
                " reserved, rename them in the stream"
            )
        seen = [name if self.case_sensitive else name.lower() for name in self.names]
        twice = sorted({name for name, key in zip(self.names, seen, strict=True) if seen.count(key) > 1})
        if twice:
            self.problems.append(
                f"[INVALID_COLUMN_NAME] the source has column(s) {twice!r} more than once; rename them in the stream"
            )

    def selection(self, target_names: Sequence[str]) -> list[StructField]:
        """The source's fields that the target stores, in the source's order."""
        spec = self.spec
        if spec.column_list is not None:
            wanted = [f for name in spec.column_list if (f := self.find(name, "column_list"))]
            selected = [f for f in self.fields if f in wanted]
        elif spec.except_column_list is not None:
            dropped = [f for name in spec.except_column_list if (f := self.find(name, "except_column_list"))]
            selected = [f for f in self.fields if f not in dropped]
        else:
            selected = list(self.fields)
        travelling = self.fields if spec.shape is not None and spec.shape.needs_whole_events else selected
        own = {*(f.name for f in travelling), *target_names}
        taken = sorted(name for name in own if name.lower() in names.MERGE_COLUMNS)
        if taken:
            self.problems.append(
                f"[RESERVED_COLUMN_NAME] column(s) {taken!r} have names that Delta's MERGE uses itself; rename them, or"
                " leave them out with except_column_list"
            )
        kept = [name for name in target_names if name not in {f.name for f in selected}]
        spelled = [name.lower() for name in (*(f.name for f in selected), *kept)]
        alike = [f.name for f in selected if spelled.count(f.name.lower()) > 1]
        if alike and self.case_sensitive:
            self.problems.append(
                f"[INVALID_COLUMN_NAME] column(s) {alike!r} differ from others of source or target only in case, which"
                " Delta does not allow; rename them, or leave them out with except_column_list"
            )
        backticked = [f.name for f in selected if "`" in f.name]
        if backticked and spec.change_data_feed:
            # MERGE writes the feed through unquoted names (Delta 4.4): inserts pass, the first update fails.
            self.problems.append(
                f"[INVALID_COLUMN_NAME] the change data feed cannot write column(s) {backticked!r} with a backtick;"
                " rename them, leave them out with except_column_list, or set change_data_feed=False"
            )
        return selected

    def stored(self, field: StructField, target: StructType | None) -> StoredColumn:
        """Where a selected field is stored, and whether the target can hold it."""
        twins = columns.twins(field.name, field.dataType)
        if twins:
            self.problems.append(
                f"[INVALID_COLUMN_NAME] field(s) {twins!r} differ from fields next to them only in case, which Delta"
                " does not allow; rename them"
            )
        known = target.names if target is not None else []
        name = columns.resolve(field.name, known, case_sensitive=self.case_sensitive)
        if target is None or name is None or isinstance(field.dataType, NullType):
            self._refuse_unstorable(field.name, field.dataType, None)
            kept = StructField(field.name, columns.nullable(field.dataType), True)
            return StoredColumn(name=field.name, source_name=field.name, source_type=field.dataType, field=kept)
        theirs = target[name]
        may_lack = field.name not in self._compared
        held = self._held(field.name, field.dataType, theirs.dataType, name, may_lack=may_lack)
        dtype = columns.merged(field.dataType, held)
        self._refuse_unstorable(name, dtype, theirs.dataType)
        kept = StructField(name, dtype, theirs.nullable, theirs.metadata)
        return StoredColumn(name=name, source_name=field.name, source_type=field.dataType, field=kept)

    def _refuse_unstorable(self, name: str, dtype: DataType, before: DataType | None) -> None:
        """Refuse a column or a new field of a type that Delta does not store; what the target has already stays."""
        present = {} if before is None else columns.unstorable(name, before)
        self.problems.extend(
            f"[UNSUPPORTED_TYPE] column {path!r} is {what}, which Delta does not store; cast it in the stream to a type"
            " such as string, or leave it out"
            for path, what in columns.unstorable(name, dtype).items()
            if path not in present
        )

    def _held(self, what: str, source: DataType, stored: DataType, *path: str, may_lack: bool = False) -> DataType:
        """The stored type, widened where it is to be; a problem where it cannot hold the source's values."""
        problem = columns.refusal(what, source, stored, may_lack=may_lack)
        if problem is None:
            return stored
        wanted = widening.alterable(source, stored)
        if wanted is None or columns.refusal(what, source, wanted, may_lack=may_lack) is not None:
            self.problems.append(problem)
            return stored
        changes = list(widening.changes(stored, wanted, *path))
        if self.spec.schema_evolution == "widen":
            self.type_changes += changes
            return wanted
        listed, commands = ", ".join(map(str, changes)), "; ".join(widening.statements(self.spec.target, changes, {}))
        self.problems.append(
            f"[TYPE_TOO_NARROW] column {what!r} of the target is too narrow ({listed}); cast it in the stream, set"
            f" schema_evolution='widen', or run {commands} (delta-rs and polars then cannot read the table)"
        )
        return stored

    def refuse_without(self, new: list[str], selected: list[StructField], target: StructType) -> set[str]:
        """What of keys and sequence the target lacks, each with a problem: a merge compares rows by them."""
        resolve, spec = partial(columns.resolve, case_sensitive=self.case_sensitive), self.spec
        keys, ordering = ([f for f in selected if f.name in own] for own in self._roles)
        stored = [f.name for f in selected]
        unknown = [name for name in target.names if resolve(name, stored) is None and not names.is_reserved(name)]
        found = required.lacking(spec.target, keys, ordering, new, unknown)
        self.problems.extend(dict.fromkeys(found.values()))
        return set(found)

    def keys(self, stored: list[StoredColumn]) -> list[str]:
        """The key columns in the target's spelling."""
        by_source = {c.source_name: c for c in stored}
        found: list[str] = []
        for key in self.spec.keys:
            field = self.find(key, "keys")
            if field is None:
                continue
            if field.name not in by_source:
                self.problems.append(f"[CONFLICTING_SETTINGS] key {key!r} is not stored; do not leave it out")
                continue
            if not columns.has_order(field.dataType):
                self.problems.append(
                    f"[UNSUPPORTED_TYPE] key {key!r} is {field.dataType.simpleString()}, which cannot be compared; use"
                    " another key"
                )
                continue
            self._refuse_padding_inside(f"key {key!r}", by_source[field.name])
            found.append(by_source[field.name].name)
        return found

    def _refuse_padding_inside(self, what: str, column: StoredColumn) -> None:
        """Delta pads a char(n) wherever it stands in a column; what events have is not, and equals no stored value."""
        if columns.pads_inside(column.field):
            self.problems.append(
                f"[UNSUPPORTED_TYPE] {what} holds char(n) inside of {column.dtype.simpleString()}, which Delta pads"
                " with blanks, so that events do not match rows; make it string in the target"
            )

    def sequence(
        self, stored: list[StoredColumn], target: StructType | None
    ) -> tuple[list[StructField], tuple[str, ...] | None, list[Column], str]:
        """Components, where they are stored, how they are read, and the definition to record."""
        by_source = {c.source_name: c for c in stored}
        if not isinstance(self.spec.sequence_by, Column) and not self.spec.sequence_by:
            # All events of a key are of one sequence: which one counts is left to `latest_per_key_spark`.
            return [StructField("c1", ByteType())], (), [F.lit(0).cast(ByteType())], without_sequence(self.spec)
        if isinstance(self.spec.sequence_by, Column):
            text = str(self.spec.sequence_by).removeprefix("Column<'").removesuffix("'>")
            parts = self._expression_parts(self.spec.sequence_by, text)
            stored_columns: tuple[str, ...] | None = None
            definition: dict[str, object] = {"expression": text}
        else:
            fields = [f for name in self.spec.sequence_by if (f := self.find(name, "sequence_by"))]
            parts = [(f.name, columns.column(f.name), f.dataType) for f in fields]
            keys = [columns.resolve(key, self.names, case_sensitive=self.case_sensitive) for key in self.spec.keys]
            self.problems.extend(
                f"[CONFLICTING_SETTINGS] sequence_by={f.name!r} is also a key; a key cannot order its own versions"
                for f in fields
                if f.name in keys
            )
            kept = [by_source.get(f.name) for f in fields]
            stored_columns = tuple(c.name for c in kept if c is not None) if all(kept) else None
            definition = {"columns": [f.name for f in fields]}
        if not self.spec.keeps_sequence:  # it only orders the events of a batch, in the source's own types
            stored_columns, by_source = (), {}
        recorded = _recorded_sequence(target) if stored_columns is None else None
        components: list[StructField] = []
        sources: list[Column] = []
        for i, (name, value, dtype) in enumerate(parts):
            if not columns.has_order(dtype):
                self.problems.append(
                    f"[UNSUPPORTED_TYPE] sequence_by uses {name!r} of type {dtype.simpleString()}, which has no order;"
                    " use numbers, timestamps, text or a struct of them"
                )
                continue
            kept_in = by_source.get(name) if stored_columns else None
            if kept_in is not None:
                self._refuse_padding_inside(f"sequence_by={name!r}", kept_in)
                target_type = kept_in.dtype
            elif recorded is not None and i < len(recorded.fields):
                component = recorded.fields[i]
                place = (names.SEQUENCE_COLUMN, component.name)
                target_type = self._held(f"sequence component {i + 1} ({name})", dtype, component.dataType, *place)
                if columns.refusal(name, dtype, target_type) is not None:
                    continue
            else:
                target_type = columns.nullable(dtype)
                if stored_columns is None:
                    self._refuse_unstorable(name, dtype, None)
            components.append(StructField(f"c{i + 1}", target_type))
            read = columns.conform(value, dtype, target_type)
            sources.append(read if kept_in is None else columns.as_stored_text(read, kept_in.field))
        if recorded is not None and len(recorded.fields) != len(parts):
            self.problems.append(
                f"[DEFINITION_CHANGED] sequence_by has {len(parts)} component(s), the stored sequence has"
                f" {len(recorded.fields)}; use the recorded definition, or rebuild the table"
            )
        keeps = self.spec.keeps_sequence
        recorded_as = json.dumps(definition, sort_keys=True) if keeps else without_sequence(self.spec)
        return components, stored_columns, sources, recorded_as

    def _expression_parts(self, value: Column, text: str) -> list[tuple[str, Column, DataType]]:
        dtype = self._type_of(value, f"sequence_by={text!r}")
        if dtype is None:
            return []
        if isinstance(dtype, StructType):
            return [(f.name, value.getField(f.name), f.dataType) for f in dtype.fields]
        return [(text, value, dtype)]

    def deletes(self) -> Column | None:
        """The delete condition over the source."""
        condition = self.spec.apply_as_deletes
        if condition is None:
            return None
        what = f"apply_as_deletes={str(condition)!r}"
        try:  # Spark 3.5 parses it here, Spark 4 where it is used
            value = F.expr(condition) if isinstance(condition, str) else condition
        except AnalysisException as err:
            self._refuse(what, err)
            return None
        dtype = self._type_of(value, what)
        if dtype is not None and not isinstance(dtype, BooleanType):
            self.problems.append(f"[INVALID_EXPRESSION] {what} must be boolean, not {dtype.simpleString()}")
        return value

    def _type_of(self, value: Column, what: str) -> DataType | None:
        try:
            return self.source.select(value.alias("value")).schema["value"].dataType
        except AnalysisException as err:
            self._refuse(what, err)
            return None

    def _refuse(self, what: str, err: Exception) -> None:
        self.problems.append(
            f"[INVALID_EXPRESSION] {what} does not fit the source: {reason(err).rstrip(';')}; its columns are"
            f" {self.names!r}"
        )


def _is_of_source(field: StructField, spec: MergeSpec) -> bool:
    """Whether it is a column that only a source of this package may carry, and this one is such a source."""
    is_marked = names.SOURCE_METADATA in field.metadata
    return field.name in spec.source_columns or (field.name in names.SOURCE_COLUMNS and is_marked)


def _recorded_sequence(target: StructType | None) -> StructType | None:
    if target is None or names.SEQUENCE_COLUMN not in target.names:
        return None
    dtype = target[names.SEQUENCE_COLUMN].dataType
    return dtype if isinstance(dtype, StructType) else None
