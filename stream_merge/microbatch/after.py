"""What is left to do when a batch is merged: its events are in the target, whatever becomes of it."""

from __future__ import annotations

from dataclasses import replace

from stream_merge.microbatch.call import BatchCall
from stream_merge.microbatch.values import Done
from stream_merge.model.results import Tidied
from stream_merge.tables.upkeep import both


def note_query(call: BatchCall) -> None:
    """Tell the checkpoint that the query's batches are given to this sink, also where none had events for it."""
    if call.delivery is not None:
        call.delivery.note(None)


def note_target(call: BatchCall, done: Done) -> None:
    """Tell the checkpoint that the query has merged into this very table, and the next call what is in its log."""
    if done.target is not None:
        tokens = call.marks.tokens
        call.last_commit.note(done.target, done.versions, call.delivery, batch_id=call.batch_id, tokens=tokens)
    if call.delivery is not None and done.target is not None and done.version is not None:
        call.delivery.note(done.target)


def keep_up(call: BatchCall, done: Done) -> Done:
    """See to the target's files: what the engine leaves, and a round of upkeep, if one is due."""
    if call.upkeep is None and done.tidy is None:
        return done
    call.resources.close()  # other sinks may need the memory of this batch meanwhile
    with call.clock.phase("upkeep"):
        tidied = Tidied() if done.tidy is None else done.tidy()
        rounds = [tidied.upkeep]
        if call.upkeep is not None:
            changed, query_id = done.merged.report.version is not None, call.caller.query_id
            rounds.append(call.upkeep.round(call.session, changed=changed, query_id=query_id))
    had = [one for one in rounds if one is not None]
    return replace(done, upkeep=both(*had) if len(had) > 1 else next(iter(had), None), read_debt=tidied.debt)
