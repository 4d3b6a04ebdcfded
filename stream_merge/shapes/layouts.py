"""The layout of a batch: source, settings and target matched, or every problem at once."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import StructField, StructType

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.finder import Finder
from stream_merge.shapes.layout import EventColumn, Layout, StoredColumn, WholeEvents, texts_in_partitions
from stream_merge.spark import columns
from stream_merge.spark.versions import KEEPS_NULL_STRUCTS


class Layouts:
    """The layouts of one sink: while no schema changes, batches share one and what was built for it."""

    def __init__(self, spec: MergeSpec) -> None:
        self._spec = spec
        self._cached: list[tuple[StructType, StructType | None, Sequence[str], bool, Layout]] = []

    def plan(self, source: DataFrame, snapshot: TableSnapshot | None) -> Layout:
        """The layout of a batch for its target (None: there is none), cached while nothing changes."""
        case_sensitive = columns.is_case_sensitive(source.sparkSession)
        target = None if snapshot is None else snapshot.schema
        partition_columns = self._spec.partition_by if snapshot is None else snapshot.partition_columns
        schemas = (source.schema, target, partition_columns, case_sensitive)
        for *planned, layout in self._cached:
            if tuple(planned) == schemas:
                return layout
        layout = plan_layout(source, self._spec, target, partition_columns)
        self._cached = [*self._cached[-1:], (*schemas, layout)]
        return layout


def plan_layout(
    source: DataFrame, spec: MergeSpec, target: StructType | None, partition_columns: Sequence[str] = ()
) -> Layout:
    """Match the source with the settings and, where it exists, with the target; reads schemas only.

    Raises:
        ConfigError: with every problem, before anything is written.
    """
    case_sensitive = columns.is_case_sensitive(source.sparkSession)
    finder = Finder(source, spec, case_sensitive)
    problems = finder.problems
    finder.check_names()
    selected = finder.selection(() if target is None else target.names)
    stored = [finder.stored(field, target) for field in selected]
    keys = finder.keys(stored)
    sequence = finder.sequence(stored, target)
    deletes = finder.deletes()
    new = _evolution(finder, selected, target)
    beside = finder.beside(stored, target)
    _refuse_strangers(finder, selected, target)
    if problems:
        raise ConfigError(problems, target=spec.target)
    sequence_fields, sequence_columns, sequence_source, definition = sequence
    return Layout(
        stored=tuple(stored),
        keys=tuple(keys),
        texts_in_partitions=texts_in_partitions(stored, keys, partition_columns, case_sensitive=case_sensitive),
        sequence_fields=tuple(sequence_fields),
        sequence_columns=sequence_columns,
        sequence_source=tuple(sequence_source),
        deletes=deletes,
        new_columns=new,
        type_changes=tuple(finder.type_changes),
        definition=definition,
        case_sensitive=case_sensitive,
        whole=_whole_events(finder, stored),
        concerns_missing=spec.concerns_missing,
        # A user's struct that lacks fields, which are then NULL, must fit every batch, not only the first one.
        evolves=bool(new) or bool(spec.schema_evolution and spec.shape and spec.shape.needs_whole_events),
        is_whole=spec.is_whole,
        beside=beside,
    )


def _whole_events(finder: Finder, stored: list[StoredColumn]) -> WholeEvents | None:
    """How all of the source's columns travel; None where the stored ones suffice."""
    spec = finder.spec
    if spec.shape is None or not spec.shape.needs_whole_events:
        return None
    same = {c.source_name: c.name for c in stored if c.is_stored_as_it_is and not columns.is_padded(c.field)}
    stored_as = {
        c.name: c.source_name if c.source_name in same else names.STORED_COLUMN.format(i) for i, c in enumerate(stored)
    }
    every = tuple(
        EventColumn(name=f.name, travels_as=same.get(f.name, names.SOURCE_COLUMN.format(i)), dtype=f.dataType)
        for i, f in enumerate(finder.fields)
    )
    is_ordered = isinstance(spec.sequence_by, Column) or bool(spec.sequence_by)
    return WholeEvents(columns=every, stored_as=stored_as, is_ordered=is_ordered)


def _refuse_strangers(finder: Finder, selected: list[StructField], target: StructType | None) -> None:
    """Refuse columns that are not stored and have the name of a target's column of another type.

    With schema evolution Delta unifies the types of equally named columns, where a clause assigns the target's,
    whatever it assigns (ResolveDeltaMergeInto, 4.4).
    """
    spec = finder.spec
    if target is None or not spec.schema_evolution or spec.shape is None or not spec.shape.needs_whole_events:
        return
    for source in finder.fields:
        name = columns.resolve(source.name, target.names, case_sensitive=finder.case_sensitive)
        if source in selected or name is None:
            continue
        theirs = target[name].dataType
        if columns.nullable(source.dataType) != columns.nullable(theirs):
            finder.problems.append(
                f"[TYPE_MISMATCH] the source's column {source.name!r} ({source.dataType.simpleString()}) is not stored,"
                f" but the target has {name!r} ({theirs.simpleString()}); rename it in the stream, or set"
                " schema_evolution=False"
            )


def _evolution(finder: Finder, selected: list[StructField], target: StructType | None) -> tuple[str, ...]:
    if target is None:
        return ()
    new = columns.new_fields(StructType(selected), target, case_sensitive=finder.case_sensitive)
    lacking = finder.refuse_without(new, selected, target)
    new = [name for name in new if name not in lacking]
    if new and not finder.spec.schema_evolution:
        finder.problems.append(
            f"[COLUMN_NOT_IN_TARGET] the source has column(s) {new!r} that the target lacks; set schema_evolution=True"
            " to add them, or leave them out with except_column_list"
        )
    nested = [name for name in new if name not in {field.name for field in selected}]
    if nested and finder.spec.schema_evolution and not KEEPS_NULL_STRUCTS:
        finder.problems.append(
            f"[COLUMN_NOT_IN_TARGET] the target's structs lack field(s) {nested!r}, which a merge cannot add on Spark"
            " 3.5; add them with ALTER TABLE … ADD COLUMNS"
        )
    return tuple(new)
