"""What is left to do when a batch is merged: its events are in the target, whatever becomes of it."""

from __future__ import annotations

from dataclasses import replace

from stream_merge.merge.call import BatchCall
from stream_merge.merge.states import Done
from stream_merge.model.results import Tidied
from stream_merge.tables.maintenance import worse


def note_query(call: BatchCall) -> None:
    """Tell the checkpoint that the query's batches are given to this sink, also where none had events for it."""
    if call.delivery is not None:
        call.delivery.note(None)


def note_target(call: BatchCall, done: Done) -> None:
    """Tell the checkpoint that the query has merged into this very table, and the next call what is in its log."""
    if done.target is not None:
        tokens = call.tags.tokens
        call.last_commit.note(done.target, done.versions, call.delivery, batch_id=call.batch_id, tokens=tokens)
    if call.delivery is not None and done.target is not None and done.version is not None:
        call.delivery.note(done.target)


def run_maintenance(call: BatchCall, done: Done) -> Done:
    """Compact the files that the engine's merges leave, and maintain the target, if it is due."""
    if call.maintenance is None and done.tidy is None:
        return done
    call.resources.close()  # other sinks may need the memory of this batch meanwhile
    with call.clock.phase("maintenance"):
        tidied = Tidied() if done.tidy is None else done.tidy()
        runs = [tidied.maintenance]
        if call.maintenance is not None:
            runs.append(call.maintenance.after_call(call.session, changed=done.merged.report.version is not None))
    done_runs = [run for run in runs if run is not None]
    return replace(done, maintenance=worse(done_runs) if done_runs else None, read_debt=tidied.debt)
