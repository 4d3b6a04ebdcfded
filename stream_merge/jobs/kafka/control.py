"""What can be asked of a running job, from anywhere on its machine: by files beside its checkpoint folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stream_merge.errors import ConfigError, HeldError
from stream_merge.jobs.kafka.replay import Replayed, Request
from stream_merge.jobs.kafka.settings import JobSettings, QuerySettings
from stream_merge.model.locations import beside_folder
from stream_merge.model.logs import tell
from stream_merge.tables import locks

log = logging.getLogger(__name__)

_left: set[Path] = set()
"""Requests that cannot be read and must not be removed: said once."""


@contextmanager
def held(query: QuerySettings) -> Iterator[bool]:
    """Whether this process may run the query: on a disk one at a time may, until it ends, however it ends."""
    path = beside_folder(query.checkpoint, "lock")
    if path is None:
        yield True
        return
    with locks.locked(path, f"query {query.name!r}") as holder:
        yield holder is None


def taken(queries: Iterable[QuerySettings]) -> dict[str, Exception]:
    """Queries that another process runs, or whose table it has for itself, with the error; nothing is locked."""
    errors: dict[str, Exception] = {}
    for query in queries:
        if is_running(query):
            errors[query.name] = refusal(query)
            continue
        try:
            locks.expect_no_other(query.target)
        except HeldError as err:
            errors[query.name] = err
    return errors


def refusal(query: QuerySettings) -> HeldError:
    """The error for a query that `held` does not let this process run."""
    msg = (
        f"[CHECKPOINT_LOCKED] query {query.name!r} is already running in another process, which has locked its"
        f" checkpoint {query.checkpoint!r}; stop that process first ('stream-merge stop')"
    )
    return HeldError(msg, target=query.target)


# -- stopping ---------------------------------------------------------------------------------


def stop_request(query: QuerySettings) -> Path | None:
    """The file whose presence stops a query; None where its checkpoint is not on a disk."""
    return beside_folder(query.checkpoint, "stop")


def is_running(query: QuerySettings) -> bool:
    """Whether a process holds the query; where there is no lock of it, none has ever run there."""
    path = beside_folder(query.checkpoint, "lock")
    return path is not None and locks.lock_holder(path) is not None


def request_stop(settings: JobSettings) -> list[tuple[str, Path]]:
    """Ask the running queries of a job to stop; each by the file whose path is returned with its name.

    Raises:
        ConfigError: checkpoints are not on this disk, or nothing is running.
    """
    requests = [(query.name, stop_request(query)) for query in settings.queries]
    remote = [name for name, path in requests if path is None]
    if remote:
        msg = f"[CHECKPOINT_NOT_LOCAL] the checkpoints of {remote!r} are not on this disk; send SIGTERM to the job"
        raise ConfigError(msg)
    running = {query.name for query in settings.queries if is_running(query)}
    if not running:
        msg = "[JOB_NOT_RUNNING] no process runs this job, so there is nothing to stop"
        raise ConfigError(msg)
    asked = [(name, path) for name, path in requests if path is not None and name in running]
    for _, path in asked:
        path.touch()
    return asked


# -- replaying --------------------------------------------------------------------------------


def expect_askable(queries: Iterable[QuerySettings]) -> None:
    """Stop before a replay of queries of which nothing here says whether a process runs them.

    Raises:
        ConfigError: a checkpoint is not on this disk.
    """
    remote = [query.name for query in queries if beside_folder(query.checkpoint, "lock") is None]
    if remote:
        msg = (
            f"[CHECKPOINT_NOT_LOCAL] the checkpoints of {remote!r} are not on this disk, so a running job cannot be"
            " detected; stop the job by SIGTERM, then replay with --alone"
        )
        raise ConfigError(msg)


def ask_for_replay(query: QuerySettings, request: Request) -> None:
    """Leave a request for the job that runs the query, which `held` has told of."""
    _write(beside_folder(query.checkpoint, "replay"), request.to_json())


def replay_request(query: QuerySettings) -> Request | None:
    """What somebody wants replayed; stays there until it is answered.

    One that cannot be read, as of another version, of another user, or after a crash of the machine, is removed where
    that is allowed: whoever waits for it asks again (`replay_is_asked`).
    """
    path = beside_folder(query.checkpoint, "replay")
    text = _read(path)
    found = None if text is None else Request.from_json(text)
    if path is not None and text is not None and found is None and path not in _left:
        tell(log.warning, "replay_request_unreadable", query=query.name, path=str(path))
        try:
            path.unlink(missing_ok=True)
        except OSError:
            _left.add(path)
    return found


def replay_is_asked(query: QuerySettings, request: Request) -> bool:
    """Whether a request still waits for its answer: another command's may have taken its place."""
    found = _asked(query)
    return found is not None and found.id == request.id


def answer_replay(query: QuerySettings, answer: Replayed) -> None:
    """Say what became of a request, which is then done with; one that has come since is left to be answered."""
    _write(beside_folder(query.checkpoint, "replayed"), answer.to_json())
    path, waiting = beside_folder(query.checkpoint, "replay"), _asked(query)
    if path is not None and (waiting is None or waiting.id == answer.id):
        path.unlink(missing_ok=True)


def replay_answer(query: QuerySettings, request: Request) -> Replayed | None:
    """The answer to a request, once it is there."""
    text = _read(beside_folder(query.checkpoint, "replayed"))
    answer = None if text is None else Replayed.from_json(text)
    return answer if answer is not None and answer.id == request.id else None


def _asked(query: QuerySettings) -> Request | None:
    """What the file of a request says; None where there is none, or nobody can read it."""
    text = _read(beside_folder(query.checkpoint, "replay"))
    return None if text is None else Request.from_json(text)


def _read(path: Path | None) -> str | None:
    """None where there is no file; nothing of one that cannot be read."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path | None, text: str) -> None:
    """Whole or not at all."""
    if path is None:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
