"""`stream-merge demo`: deliver a made-up change stream, merge it, and say whether the table is what it should be."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from stream_merge.demo import oracle
from stream_merge.demo.events import SCHEMA, Disorder, Event, History, cut, deliveries, share
from stream_merge.errors import ConfigError
from stream_merge.jobs.watch import queries, screen
from stream_merge.model.logs import counted
from stream_merge.model.results import MergeResult
from stream_merge.model.settings import RetryPolicy
from stream_merge.model.table_ref import TableRef
from stream_merge.sink import MergeSink

_WRITERS = ("one", "two")
_RETRY = RetryPolicy(attempts=30)
"""Two writers that never rest lose more commits to each other than jobs with triggers do."""
_SHOWN = 3
"""Differing rows shown of each kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """What the demo is told to do."""

    seed: int = 7
    """The same seed makes the same events."""
    events: int = 20_000
    """Events delivered, duplicates and broken ones included."""
    keys: int = 5_000
    """How many different orders there may be."""
    batches: int = 6
    """Micro-batches, per writer."""
    conflict: bool = False
    """Let a second query merge half of the events into the same table at the same time."""
    keep: Path | None = None
    """Folder that stays, and is continued when it is there. None: a temporary folder."""
    hold_seconds: float = 0.0
    """How long table and metrics stay up after the end."""


def run(
    settings: DemoSettings, *, console: Console, start_session: Callable[[], SparkSession], metrics_url: str
) -> bool:
    """Run the demo.

    Returns:
        Whether table, ledger and quarantine are what they must be; True as well when it was stopped.

    Raises:
        ConfigError: the folder to keep belongs to something else.
        StreamMergeError: whatever a sink raises.
    """
    say = screen.Teller(console)
    with _folder(settings.keep) as folder:
        continued = folder.has_events
        delivered = _deliver(settings, folder)
        say("events", _description(delivered, settings))
        with console.status("starting Spark (the first time, Delta's jars are downloaded: about 90 MB)"):
            session = start_session()
        say("table", f"{folder.table}{' (continued, with what an earlier run left)' if continued else ''}")
        say("metrics", metrics_url)
        streams = [_stream(session, folder, writer) for writer in folder.writers]
        batches = settings.batches * (2 if settings.conflict else 1)
        with queries.stop_on_signal(lambda text: say("stop", text)) as stopping:
            with screen.Screen(console, batches=batches, several_streams=len(streams) > 1) as shown:
                results = queries.run(streams, once=True, stopping=stopping, on_result=shown.add)
            if stopping.is_set():
                say("stopped", f"after {counted(len(results), 'micro-batch')}; the table was not compared")
                return True
            report = _Report(session, folder, results, console, keeps=settings.keep is not None)
            as_expected = report.show(None if continued else len(delivered))
            say("metrics", metrics_url)
            if settings.keep is None:
                say("folder", "temporary and removed at the end; --keep DIR leaves it to look into")
            if settings.hold_seconds:
                say("hold", f"for {settings.hold_seconds:g} s; Ctrl-C ends it")
                stopping.wait(settings.hold_seconds)
    return as_expected


@dataclass(frozen=True, slots=True)
class _Folder:
    """Where everything of a demo lies; the change files are the only state it needs to continue."""

    root: Path

    @property
    def table(self) -> TableRef:
        return TableRef(self.root / "orders")

    @property
    def quarantine(self) -> TableRef:
        return self.table.quarantine

    @property
    def changes(self) -> Path:
        return self.root / "changes"

    @property
    def has_events(self) -> bool:
        return bool(self.writers)

    @property
    def writers(self) -> list[str]:
        return [writer for writer in _WRITERS if self.files(writer)]

    def files(self, writer: str) -> list[Path]:
        return sorted((self.changes / writer).glob("*.json"))

    def lines(self) -> Iterator[str]:
        for writer in self.writers:
            for file in self.files(writer):
                yield from file.read_text(encoding="utf-8").splitlines()

    def write(self, writer: str, events: Sequence[Event]) -> None:
        """Add a change file, which appears at once and whole: Spark passes over names that start with a dot."""
        place = self.changes / writer
        place.mkdir(parents=True, exist_ok=True)
        name = f"{len(self.files(writer)):06d}.json"
        unfinished = place / f".{name}"
        unfinished.write_text("".join(event.to_json() + "\n" for event in events), encoding="utf-8")
        unfinished.rename(place / name)


@contextmanager
def _folder(keep: Path | None) -> Iterator[_Folder]:
    if keep is None:
        root = Path(tempfile.mkdtemp(prefix="stream-merge-demo-"))
        try:
            yield _Folder(root)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return
    folder = _Folder(keep.absolute())
    if keep.exists() and not (keep.is_dir() and (folder.has_events or not any(keep.iterdir()))):
        msg = f"[INVALID_SETTING] --keep {str(keep)!r} does not contain a demo; use a new, an empty or a demo's folder"
        raise ConfigError(msg)
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        msg = f"[NOT_WRITABLE] --keep {str(keep)!r} cannot be created ({err.strerror}); use a writable folder"
        raise ConfigError(msg) from err
    yield folder


def _deliver(settings: DemoSettings, folder: _Folder) -> list[Event]:
    """Make up the next events and put them into the folder, one change file per micro-batch."""
    history = History.of(Event.from_json(line) for line in folder.lines())
    delivered = deliveries(seed=settings.seed, events=settings.events, keys=settings.keys, after=history)
    writers = _WRITERS[: 2 if settings.conflict else 1]
    for writer, events in zip(writers, share(settings.seed, delivered, len(writers)), strict=True):
        for piece in cut(events, settings.batches):
            folder.write(writer, piece)
    return delivered


def _description(delivered: Sequence[Event], settings: DemoSettings) -> str:
    found = Disorder.of(delivered)
    return (
        f"{len(delivered):,} (seed {settings.seed}): {found.upserts:,} upserts and {found.deletes:,} deletes;"
        f" {found.late:,} come late, {found.revenants:,} of them after the delete of their key;"
        f" {found.repeated:,} come twice; {found.broken} are broken"
    )


def _stream(session: SparkSession, folder: _Folder, writer: str) -> queries.Stream:
    reader = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    sink = MergeSink(
        target=folder.table,
        keys=["id"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        # Native merges are too quick to get into each other's way.
        engine="spark" if len(folder.writers) > 1 else "auto",
        retry=_RETRY,
    )
    return queries.Stream(
        name=writer,
        events=reader.json(str(folder.changes / writer)),
        sink=sink,
        checkpoint=str(folder.root / "checkpoints" / writer),
    )


class _Report:
    """What is shown and checked after the end."""

    def __init__(
        self, session: SparkSession, folder: _Folder, results: list[MergeResult], console: Console, *, keeps: bool
    ) -> None:
        self._session = session
        self._folder = folder
        self._quarantined_in = folder.quarantine if keeps else "quarantine"
        self._results = results
        self._console = console
        self._say = screen.Teller(console)
        self._expected = oracle.expected(folder.lines())

    def show(self, delivered: int | None) -> bool:
        """Print the report; whether everything is as it must be.

        Args:
            delivered: events that must have been received; None when an earlier run may have left some.
        """
        verdicts = [self._ledger(delivered), self._quarantine(), self._table()]
        return all(verdicts)

    def _ledger(self, delivered: int | None) -> bool:
        counts = queries.total(self._results)
        self._console.print()
        self._console.print(screen.ledger(counts))
        self._console.print()
        complete = delivered is None or counts.received == delivered
        text = (
            f"{counted(counts.received, 'event')} in {counted(len(self._results), 'micro-batch')}, each with one fate"
        )
        if not complete:
            text += f", but {delivered:,} were delivered"
        self._say("ledger", text, good=complete)
        self._say("conflicts", screen.conflicts(self._results))
        self._say("change feed", self._change_feed())
        return complete

    def _change_feed(self) -> str:
        versions = [result.version for result in self._results if result.version is not None]
        if not versions:
            return "nothing new"
        feed = self._read(self._folder.table, readChangeFeed="true", startingVersion=str(min(versions)))
        counts = {str(row[0]): int(row[1]) for row in feed.groupBy("_change_type").count().collect()}
        since = f" (from version {min(versions)} on)"
        return ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items())) + since

    def _quarantine(self) -> bool:
        wanted = self._expected.quarantined
        found: Mapping[tuple[str, ...], int] = {}
        if wanted:
            reasons = self._read(self._folder.quarantine).groupBy(F.array_sort("reasons").alias("reasons"))
            found = {tuple(row[0]): int(row[1]) for row in reasons.count().collect()}
        listed = ", ".join(f"{number} {' and '.join(kind)}" for kind, number in sorted(found.items()))
        text = f"{counted(sum(found.values()), 'broken event')} ({listed or 'none'}) in {self._quarantined_in}"
        if found != wanted:
            text += f", but {sum(wanted.values())} were delivered: {dict(wanted)!r}"
        self._say("quarantine", text, good=found == wanted)
        return found == wanted

    def _table(self) -> bool:
        rows = [tuple(row) for row in self._read(self._folder.table).select(*oracle.STORED).collect()]
        difference = oracle.compare(self._expected, rows)
        apart = f"computed apart from the sink from {counted(self._expected.received, 'event')}"
        if not difference:
            self._say("table", f"equal to the expected state: {counted(len(rows), 'row')} ({apart})", good=True)
            return True
        self._say("table", f"NOT equal to the expected state ({apart}):", good=False)
        for kind, examples in (
            ("missing", difference.missing),
            ("unexpected", difference.unexpected),
            ("expected, found", difference.other),
            ("key held twice", difference.twice),
        ):
            if examples:
                listed = ", ".join(map(str, examples[:_SHOWN]))
                self._say("", f"{len(examples):,} {kind}: {listed}{' …' if len(examples) > _SHOWN else ''}")
        return False

    def _read(self, path: str, **options: str) -> DataFrame:
        return self._session.read.format("delta").options(**options).load(path)
