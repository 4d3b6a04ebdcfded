"""`Finder`: resolves the settings against the source and the target's schema, and collects every problem."""

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
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import widening
from stream_merge.shapes.base import without_sequence
from stream_merge.shapes.layout import StoredColumn
from stream_merge.shapes.widening import TypeChange
from stream_merge.spark import columns
from stream_merge.spark.errors import reason


class Finder:
    """Resolves names in the source, and collects every problem."""

    def __init__(self, source: DataFrame, spec: MergeSpec, case_sensitive: bool) -> None:
        self.source = source
        self.spec = spec
        self.case_sensitive = case_sensitive
        self.problems: list[str] = []
        self.type_changes: list[TypeChange] = []
        self.fields = [f for f in source.schema.fields if not _is_source_column(f, spec)]
        self.names = [f.name for f in self.fields]
        sequence = () if isinstance(spec.sequence_by, Column) or not spec.keeps_sequence else spec.sequence_by
        resolve = partial(columns.resolve, case_sensitive=case_sensitive)
        self._roles = [{resolve(name, self.names) for name in wanted} for wanted in (spec.keys, sequence)]
        """The source's names of the keys, and of the sequence."""
        self._compared = set[str | None]().union(*self._roles)

    def find(self, name: str, setting: str) -> StructField | None:
        """The source's field of a name; None and a problem if there is none."""
        resolved = columns.resolve(name, self.names, case_sensitive=self.case_sensitive)
        if resolved is None:
            self.problems.append(
                f"[COLUMN_NOT_FOUND] {setting} names column {name!r}, which the source does not have; its columns are"
                f" {self.names!r}"
            )
            return None
        return next(f for f in self.fields if f.name == resolved)

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
        others = [name for name in target_names if name not in {f.name for f in selected}]
        spelled = [name.lower() for name in (*(f.name for f in selected), *others)]
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
        """How a selected field is stored; a problem where the target cannot hold it."""
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
            own = StructField(field.name, columns.nullable(field.dataType), True)
            return StoredColumn(name=field.name, source_name=field.name, source_type=field.dataType, field=own)
        theirs = target[name]
        may_lack = field.name not in self._compared
        fitting = self._fitting(field.name, field.dataType, theirs.dataType, name, may_lack=may_lack)
        dtype = columns.merged(field.dataType, fitting)
        self._refuse_unstorable(name, dtype, theirs.dataType)
        own = StructField(name, dtype, theirs.nullable, theirs.metadata)
        return StoredColumn(name=name, source_name=field.name, source_type=field.dataType, field=own)

    def _refuse_unstorable(self, name: str, dtype: DataType, before: DataType | None) -> None:
        """Refuse a column or a new field of a type that Delta does not store."""
        present = {} if before is None else columns.unstorable(name, before)
        self.problems.extend(
            f"[UNSUPPORTED_TYPE] column {path!r} is {what}, which Delta does not store; cast it in the stream to a type"
            " such as string, or leave it out"
            for path, what in columns.unstorable(name, dtype).items()
            if path not in present
        )

    def _fitting(self, what: str, source: DataType, stored: DataType, *path: str, may_lack: bool = False) -> DataType:
        """The stored type, widened as far as settings allow; a problem where it cannot hold the source's values."""
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
        """New columns and fields of keys and sequence, each a problem: the merge compares rows by them."""
        resolve, table = partial(columns.resolve, case_sensitive=self.case_sensitive), self.spec.target
        stored = [f.name for f in selected]
        unknown = [name for name in target.names if resolve(name, stored) is None and not names.is_reserved(name)]
        perhaps = f"perhaps it was renamed to one of {unknown!r}" if unknown else "it was dropped"
        lacking: dict[str, str] = {}
        for role, what in zip(self._roles, ("a key", "the sequence (sequence_by)"), strict=True):
            for field in (f for f in selected if f.name in role):
                column = names.quote(field.name)
                if field.name in new:
                    renamed = f"ALTER TABLE {table.sql} RENAME COLUMN … TO {column}"
                    added = f"ALTER TABLE {table.sql} ADD COLUMN {column} {field.dataType.simpleString()}"
                    or_add = f", or, if all its rows may count as the oldest, add it: {added}"
                    lacking[field.name] = (
                        f"[COLUMN_DROPPED] target {table!r} has no column {field.name!r}, which is {what}; {perhaps};"
                        f" rename it back ({renamed}){'' if what == 'a key' else or_add}"
                    )
                elif isinstance(field.dataType, StructType):
                    inside = [path for path in new if path.startswith(f"{field.name}.")]
                    problem = (
                        f"[COLUMN_NOT_IN_TARGET] column {field.name!r} of target {table!r}, which is {what}, lacks"
                        f" field(s) {inside!r}; add each of them first: ALTER TABLE {table.sql} ADD COLUMN …"
                    )
                    lacking |= dict.fromkeys(inside, problem)
        self.problems.extend(dict.fromkeys(lacking.values()))
        return set(lacking)

    def beside(self, stored: list[StoredColumn], target: StructType | None) -> tuple[StructField, ...]:
        """The columns that the shape needs beside the source's, as the target has them or is created with them."""
        spec, resolve = self.spec, partial(columns.resolve, case_sensitive=self.case_sensitive)
        wanted = {} if spec.shape is None else spec.shape.kept_beside
        if not wanted:
            return ()
        rows = StructType([StructField(c.name, c.dtype) for c in stored] if target is None else list(target.fields))
        frame = self.source.sparkSession.createDataFrame([], rows).alias("t")
        alter = f"ALTER TABLE {spec.target.sql}"
        fields: list[StructField] = []
        for name, written in wanted.items():
            if resolve(name, [c.name for c in stored]) is not None:
                self.problems.append(
                    f"[CONFLICTING_SETTINGS] missing sets column {name!r}, which the source has, too; choose another"
                    " name, or leave the column out with except_column_list"
                )
                continue
            known = None if target is None else resolve(name, target.names)
            if target is not None and known is not None:
                fields.append(target[known])
                if not target[known].nullable:
                    statement = f"{alter} ALTER COLUMN {names.quote(known)} DROP NOT NULL"
                    self.problems.append(
                        f"[COLUMN_NOT_WRITABLE] missing sets column {known!r}, which is NOT NULL in {spec.target!r};"
                        f" run {statement}"
                    )
                continue
            try:
                dtype = frame.select(F.expr(written).alias("value")).schema["value"].dataType
            except AnalysisException as err:
                self.problems.append(
                    f"[INVALID_EXPRESSION] missing sets {name!r} to {written!r}, which does not fit:"
                    f" {reason(err).rstrip(';.')}; t has {rows.names!r}"
                )
                continue
            if columns.unstorable(name, dtype):
                self.problems.append(
                    f"[UNSUPPORTED_TYPE] missing sets {name!r} to {written!r}, which is {dtype.simpleString()}; Delta"
                    " does not store it, cast it"
                )
                continue
            fields.append(StructField(name, columns.nullable(dtype)))
            if target is not None and not spec.schema_evolution:
                statement = f"{alter} ADD COLUMN {names.quote(name)} {dtype.simpleString()}"
                self.problems.append(
                    f"[COLUMN_NOT_IN_TARGET] missing sets column {name!r}, which {spec.target!r} lacks; set"
                    f" schema_evolution=True to add it, or run {statement}"
                )
        return tuple(fields)

    def keys(self, stored: list[StoredColumn]) -> list[str]:
        """The key columns in the target's spelling."""
        by_source = {c.source_name: c for c in stored}
        keys: list[str] = []
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
            keys.append(by_source[field.name].name)
        return keys

    def _refuse_padding_inside(self, what: str, column: StoredColumn) -> None:
        """Refuse char(n) inside of a column: Delta pads it, so events equal no stored value."""
        if columns.pads_inside(column.field):
            self.problems.append(
                f"[UNSUPPORTED_TYPE] {what} holds char(n) inside of {column.dtype.simpleString()}, which Delta pads"
                " with blanks, so that events do not match rows; make it string in the target"
            )

    def sequence(
        self, stored: list[StoredColumn], target: StructType | None
    ) -> tuple[list[StructField], tuple[str, ...] | None, list[Column], str]:
        """Components, the columns that store them, their expressions over the source, and the definition to record."""
        by_source = {c.source_name: c for c in stored}
        if not isinstance(self.spec.sequence_by, Column) and not self.spec.sequence_by:
            # All events of a key have one sequence; `latest_per_key` decides which one counts.
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
            own = [by_source.get(f.name) for f in fields]
            stored_columns = tuple(c.name for c in own if c is not None) if all(own) else None
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
            column = by_source.get(name) if stored_columns else None
            if column is not None:
                self._refuse_padding_inside(f"sequence_by={name!r}", column)
                target_type = column.dtype
            elif recorded is not None and i < len(recorded.fields):
                component = recorded.fields[i]
                path = (names.SEQUENCE_COLUMN, component.name)
                target_type = self._fitting(f"sequence component {i + 1} ({name})", dtype, component.dataType, *path)
                if columns.refusal(name, dtype, target_type) is not None:
                    continue
            else:
                target_type = columns.nullable(dtype)
                if stored_columns is None:
                    self._refuse_unstorable(name, dtype, None)
            components.append(StructField(f"c{i + 1}", target_type))
            read = columns.conform(value, dtype, target_type)
            sources.append(read if column is None else columns.as_stored_text(read, column.field))
        if recorded is not None and len(recorded.fields) != len(parts):
            self.problems.append(
                f"[DEFINITION_CHANGED] sequence_by has {len(parts)} component(s), the stored sequence has"
                f" {len(recorded.fields)}; use the recorded definition, or rebuild the table"
            )
        keeps = self.spec.keeps_sequence
        recorded_as = json.dumps(definition, sort_keys=True) if keeps else without_sequence(self.spec)
        return components, stored_columns, sources, recorded_as

    def _expression_parts(self, value: Column, text: str) -> list[tuple[str, Column, DataType]]:
        dtype = self._expression_type(value, f"sequence_by={text!r}")
        if isinstance(dtype, StructType):
            return [(f.name, value.getField(f.name), f.dataType) for f in dtype.fields]
        return [] if dtype is None else [(text, value, dtype)]

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
        dtype = self._expression_type(value, what)
        if dtype is not None and not isinstance(dtype, BooleanType):
            self.problems.append(f"[INVALID_EXPRESSION] {what} must be boolean, not {dtype.simpleString()}")
        return value

    def _expression_type(self, value: Column, what: str) -> DataType | None:
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


def _is_source_column(field: StructField, spec: MergeSpec) -> bool:
    """Whether it is a column that only a source of this package may have, and this one is such a source."""
    is_marked = names.SOURCE_METADATA in field.metadata
    return field.name in spec.source_columns or (field.name in names.SOURCE_COLUMNS and is_marked)


def _recorded_sequence(target: StructType | None) -> StructType | None:
    if target is None or names.SEQUENCE_COLUMN not in target.names:
        return None
    dtype = target[names.SEQUENCE_COLUMN].dataType
    return dtype if isinstance(dtype, StructType) else None


def lacks_reserved(target: TableRef) -> str:
    """The sentence for a target whose sequence was stored in the reserved column, which is gone."""
    renamed = f"ALTER TABLE {target.sql} RENAME COLUMN … TO {names.quote(names.SEQUENCE_COLUMN)}"
    unset = f"ALTER TABLE {target.sql} UNSET TBLPROPERTIES ({names.sql_string(names.SEQUENCE_PROPERTY)})"
    return (
        f"[COLUMN_DROPPED] target {target!r} has no column {names.SEQUENCE_COLUMN!r}, and sequence_by is not stored;"
        f" rename it back ({renamed}), store sequence_by again or, if all rows may count as the oldest: {unset}"
    )
