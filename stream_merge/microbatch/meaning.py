"""What a batch must not hold, given what its shape makes of it: said before anything is written."""

from __future__ import annotations

from collections import Counter

from stream_merge.errors import ContractError
from stream_merge.model.results import UNDECODABLE
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import shape_of
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout


def refuse(batch: Batch, layout: Layout, spec: MergeSpec, *, undecodable: int, batch_id: int) -> None:
    """Stop for events of which the shape would make something wrong.

    Args:
        batch: evaluated.
        layout: how its columns map onto the target.
        spec: what the sink was told.
        undecodable: events that are not in the batch, since nobody could read them.
        batch_id: of the micro-batch.

    Raises:
        ContractError: there are some.
    """
    where = f"batch {batch_id} for {spec.target!r}"
    received = batch.received + undecodable
    msg = None
    if batch.tied_keys:
        keys = " and ".join(batch.tied_keys)
        msg = (
            f"{where} has several different events of a key, such as {keys}, and nothing says which of them counts;"
            " give sequence_by, or leave one event of each key in the stream"
        )
    elif spec.concerns_missing and batch.quarantined + undecodable:
        msg = (
            f"{batch.quarantined + undecodable} of {received} events of {where} break the contract, and without them"
            " their rows would count as missing in the source; repair the events, or take the clauses"
            " when_not_matched_by_source out"
        )
    elif layout.whole is not None and batch.delete_events and not _heeds_deletes(spec):
        mark = f"s.{spec.apply_as_deletes}"
        msg = (
            f"{batch.delete_events} of {received} events of {where} are deletes, and a clause would write them as rows;"
            f" give each insert the condition NOT {mark}, and put a matched clause with {mark} before the updates"
        )
    if msg is not None:
        reasons = Counter(batch.reasons)
        if undecodable:
            reasons[UNDECODABLE] += undecodable
        raise ContractError(msg, reasons=reasons, target=spec.target, batch_id=batch_id)


def _heeds_deletes(spec: MergeSpec) -> bool:
    """Whether the user's clauses write nothing that the source marks as a delete."""
    marked = spec.apply_as_deletes
    return isinstance(marked, str) and shape_of(spec).heeds(marked)
