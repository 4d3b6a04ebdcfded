"""Refuses batches that must not be merged, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from stream_merge.errors import ContractError
from stream_merge.merge.call import BatchCall, Prepared
from stream_merge.merge.event_fates import all_reasons
from stream_merge.model import names
from stream_merge.model.results import UNDECODABLE
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.source_batch import MostUndecodable
from stream_merge.shapes import shape_of
from stream_merge.shapes.batch import Batch
from stream_merge.spark import columns


def refuse(call: BatchCall, batch: Batch, prepared: Prepared) -> None:
    """Stop for events that break the contract under on_invalid="fail", or that the shape cannot merge correctly."""
    spec, layout, batch_id, undecodable = call.spec, prepared.layout, call.batch_id, call.intake.undecodable_events
    where = f"batch {batch_id} for {spec.target!r}"
    received = batch.received + undecodable
    if batch.delete_events and spec.only_inserts and layout.whole is None:
        unwanted = (
            f"[UNHANDLED_DELETES] {batch.delete_events} of {batch.received} events of {where} are deletes, and its"
            " shape deletes nothing; filter them out, or merge the source as changes into another table"
        )
        raise ContractError(unwanted, reasons={}, target=spec.target, batch_id=batch_id)
    msg = None
    if spec.is_whole:
        msg = _refused_whole(batch, spec, where=f"snapshot {batch_id} for {spec.target!r}", undecodable=undecodable)
    elif batch.tied_keys:
        keys = " and ".join(batch.tied_keys)
        msg = (
            f"[DUPLICATE_KEYS] {where} has several different events of a key, such as {keys}; set sequence_by, or keep"
            " one event of each key in the stream"
        )
    elif spec.concerns_missing and batch.quarantined + undecodable:
        msg = (
            f"[INVALID_EVENTS] {batch.quarantined + undecodable} of {received} events of {where} break the contract, so"
            " their rows would count as missing; repair the events, or remove the clauses when_not_matched_by_source"
        )
    elif layout.whole is not None and batch.delete_events and not _handles_deletes(call, prepared):
        mark = f"s.{spec.apply_as_deletes}"
        msg = (
            f"[UNHANDLED_DELETES] {batch.delete_events} of {received} events of {where} are deletes, which a clause"
            f" would write as rows; add NOT {mark} to each insert, and a matched clause with {mark} before the updates"
        )
    if msg is not None:
        reasons = all_reasons(batch, undecodable)
        raise ContractError(msg, reasons=reasons, target=spec.target, batch_id=batch_id)
    if batch.quarantined and spec.on_invalid == "fail":
        msg = (
            f"[INVALID_EVENTS] {batch.quarantined} of {batch.received} events of {where} break the contract"
            f" ({_listed(batch.reasons)}); fix the source, or set on_invalid='quarantine'"
        )
        raise ContractError(msg, reasons=batch.reasons, target=spec.target, batch_id=batch_id)
    if call.intake.most_undecodable is not None:
        _refuse_undecodable(batch, spec, call.intake.most_undecodable, batch_id=batch_id)


def _refuse_undecodable(batch: Batch, spec: MergeSpec, most: MostUndecodable, *, batch_id: int) -> None:
    """Stop for too many undecodable records; only then one of them is read."""
    undecodable = batch.reasons.get(UNDECODABLE, 0)
    if not most.is_exceeded(undecodable, batch.received):
        return
    invalid, corrupt = batch.rows.invalid(), columns.column(names.CORRUPT_COLUMN)
    place = columns.column(names.ORIGIN_COLUMN)
    row = invalid.where(corrupt.isNotNull()).select(place["topic"], place["offset"], corrupt).first()
    line = "" if row is None or row[1] is None else f", line {row[1]}"
    example = "" if row is None else f"; {row[0]}{line}: {row[2]}"
    raise most.error(undecodable, batch.received, target=spec.target, batch_id=batch_id, example=example)


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {n}" for reason, n in reasons.items())


def expect_newest(target: TableSnapshot, spec: MergeSpec, *, app_id: str | None, batch_id: int) -> None:
    """Stop for a full copy of the table that is older than the last one merged."""
    recorded = None if app_id is None else target.transaction(app_id)
    if recorded is not None and recorded > batch_id:
        msg = (
            f"[FULL_COPY_OUT_OF_ORDER] snapshot {batch_id} for {spec.target!r} is older than {recorded}, the last one"
            " merged; merge snapshots in ascending order of their versions"
        )
        raise ContractError(msg, reasons={}, target=spec.target, batch_id=batch_id)


def _refused_whole(batch: Batch, spec: MergeSpec, *, where: str, undecodable: int) -> str | None:
    """Why a full copy of the table must not be merged, by itself."""
    shape, broken = shape_of(spec), batch.quarantined + undecodable
    received = batch.received + undecodable
    if broken:
        reasons = _listed(all_reasons(batch, undecodable))
        return (
            f"[INVALID_EVENTS] {broken} of {received} rows of {where} break the contract ({reasons}), so their keys"
            " would count as missing; repair the snapshot"
        )
    if batch.tied_keys:
        keys = " and ".join(batch.tied_keys)
        return (
            f"[DUPLICATE_KEYS] {where} has {batch.collapsed} row(s) more than keys, such as {keys}; repair the"
            " snapshot, or choose other keys"
        )
    if received < shape.min_rows:
        return (
            f"[TOO_FEW_ROWS] {where} has {received} row(s), fewer than min_rows={shape.min_rows}; repair the snapshot,"
            " or lower min_rows"
        )
    outside = 0
    if shape.within is not None and batch.upserts:
        inside = F.coalesce(F.expr(shape.within), F.lit(False))
        outside = batch.rows.latest().alias("t").where(~inside).count()
    if outside:
        return (
            f"[ROWS_OUTSIDE_WITHIN] {outside} of {received} rows of {where} are outside of within={shape.within!r};"
            " remove them from the snapshot, or widen the condition"
        )
    return None


def _handles_deletes(call: BatchCall, prepared: Prepared) -> bool:
    """Whether the user's clauses write nothing that the source marks as a delete."""
    mark, layout = call.spec.apply_as_deletes, prepared.layout
    schema = StructType(list(layout.target_fields)) if prepared.target is None else prepared.target.schema
    return isinstance(mark, str) and shape_of(call.spec).handles_marked_events(call.session, mark, layout, schema)
