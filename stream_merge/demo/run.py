"""`stream-merge demo`: merges a generated change stream and compares the table with the expected state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from stream_merge.demo import oracle
from stream_merge.demo.events import SCHEMA, Disorder, Event, History, cut, deliveries, share
from stream_merge.errors import ConfigError
from stream_merge.jobs.watch import queries, screen
from stream_merge.model.logs import counted
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
    """Options of the demo."""

    seed: int = 7
    events: int = 20_000
    keys: int = 5_000
    batches: int = 6
    """Per writer."""
    conflict: bool = False
    keep: Path | None = None
    """None: a temporary folder."""
    hold_seconds: float = 0.0


def run(
    settings: DemoSettings, *, console: Console, start_session: Callable[[], SparkSession], metrics_url: str
) -> bool:
    """Run the demo; whether table, ledger and quarantine are as expected, True also when it was stopped."""
    status = partial(screen.print_status, console)
    with _folder(settings.keep) as folder:
        continued = bool(folder.writers)
        delivered = _deliver(settings, folder)
        status("events", _description(delivered, settings))
        with console.status("starting Spark (the first time, Delta's jars are downloaded: about 90 MB)"):
            session = start_session()
        status("table", f"{folder.table}{' (continued, with what an earlier run left)' if continued else ''}")
        status("metrics", metrics_url)
        streams = [_stream(session, folder, writer) for writer in folder.writers]
        batches = settings.batches * (2 if settings.conflict else 1)
        with queries.stop_on_signal(partial(status, "stop")) as stopping:
            with screen.Screen(console, batches=batches, several_streams=len(streams) > 1) as shown:
                results = queries.run(streams, once=True, stopping=stopping, on_result=shown.add)
            if stopping.is_set():
                status("stopped", f"after {counted(len(results), 'micro-batch')}; the table was not compared")
                return True
            quarantine = folder.table.quarantine if settings.keep is not None else "quarantine"
            merged = screen.Merged(name="demo", target=folder.table, quarantine=quarantine)
            for result in results:
                merged.add(result)
            versions = [result.version for result in results if result.version is not None]
            report = _Report(session, folder, merged, versions, console)
            as_expected = report.show(None if continued else len(delivered))
            status("metrics", metrics_url)
            if settings.keep is None:
                status("folder", "temporary and removed at the end; --keep DIR leaves it to look into")
            if settings.hold_seconds:
                status("hold", f"for {settings.hold_seconds:g} s; Ctrl-C ends it")
                stopping.wait(settings.hold_seconds)
    return as_expected


@dataclass(frozen=True, slots=True)
class _Folder:
    """The files of a demo; it continues from its change files alone."""

    root: Path

    @property
    def table(self) -> TableRef:
        return TableRef(self.root / "orders")

    @property
    def changes(self) -> Path:
        return self.root / "changes"

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
        """Add a change file by a rename: Spark ignores names that start with a dot."""
        folder = self.changes / writer
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{len(self.files(writer)):06d}.json"
        unfinished = folder / f".{name}"
        unfinished.write_text("".join(event.to_json() + "\n" for event in events), encoding="utf-8")
        unfinished.rename(folder / name)


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
    if keep.exists() and not (keep.is_dir() and (folder.writers or not any(keep.iterdir()))):
        msg = f"[INVALID_SETTING] --keep {str(keep)!r} does not contain a demo; use a new, an empty or a demo's folder"
        raise ConfigError(msg)
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        msg = f"[NOT_WRITABLE] --keep {str(keep)!r} cannot be created ({err.strerror}); use a writable folder"
        raise ConfigError(msg) from err
    yield folder


def _deliver(settings: DemoSettings, folder: _Folder) -> list[Event]:
    """Generate the next events and write them to the folder, one change file per micro-batch."""
    history = History.replay(Event.from_json(line) for line in folder.lines())
    delivered = deliveries(seed=settings.seed, events=settings.events, keys=settings.keys, after=history)
    writers = _WRITERS[: 2 if settings.conflict else 1]
    for writer, events in zip(writers, share(settings.seed, delivered, len(writers)), strict=True):
        for piece in cut(events, settings.batches):
            folder.write(writer, piece)
    return delivered


def _description(delivered: Sequence[Event], settings: DemoSettings) -> str:
    disorder = Disorder.count(delivered)
    return (
        f"{len(delivered):,} (seed {settings.seed}): {disorder.upserts:,} upserts and {disorder.deletes:,} deletes;"
        f" {disorder.late:,} come late, {disorder.revenants:,} of them after the delete of their key;"
        f" {disorder.repeated:,} come twice; {disorder.broken} are broken"
    )


def _stream(session: SparkSession, folder: _Folder, writer: str) -> queries.Stream:
    reader = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    sink = MergeSink(
        target=folder.table,
        keys=["id"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        # Merges in the driver are too quick to conflict.
        engine="spark" if len(folder.writers) > 1 else "auto",
        retry=_RETRY,
    )
    return queries.Stream(
        name=writer,
        events=reader.json(str(folder.changes / writer)),
        sink=sink,
        checkpoint=str(folder.root / "checkpoints" / writer),
    )


@dataclass(frozen=True, slots=True)
class _Report:
    """The comparison of ledger, quarantine and table with what was delivered."""

    session: SparkSession
    folder: _Folder
    merged: screen.Merged
    versions: list[int]
    console: Console

    def show(self, delivered: int | None) -> bool:
        """Print the report; whether all is as expected. `delivered` events; None: an earlier run may have left some."""
        expected = oracle.expected(self.folder.lines())
        return all([self._ledger(delivered), self._quarantine(expected), self._table(expected)])

    def _status(self, about: str, text: str, *, good: bool | None = None) -> None:
        screen.print_status(self.console, about, text, good=good)

    def _ledger(self, delivered: int | None) -> bool:
        counts = self.merged.events
        self.console.print()
        self.console.print(screen.ledger(counts))
        self.console.print()
        complete = delivered is None or counts.received == delivered
        batches = counted(self.merged.micro_batches, "micro-batch")
        text = f"{counted(counts.received, 'event')} in {batches}, each with one fate"
        if not complete:
            text += f", but {delivered:,} were delivered"
        self._status("ledger", text, good=complete)
        self._status("conflicts", self.merged.conflicts())
        self._status("change feed", self._change_feed())
        return complete

    def _change_feed(self) -> str:
        if not self.versions:
            return "nothing new"
        first = min(self.versions)
        feed = self._read(self.folder.table, readChangeFeed="true", startingVersion=str(first))
        counts = {str(row[0]): int(row[1]) for row in feed.groupBy("_change_type").count().collect()}
        changes = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items()))
        return f"{changes} (from version {first} on)"

    def _quarantine(self, expected: oracle.Expected) -> bool:
        wanted = expected.quarantined
        stored: Mapping[tuple[str, ...], int] = {}
        if wanted:
            reasons = self._read(self.folder.table.quarantine).groupBy(F.array_sort("reasons").alias("reasons"))
            stored = {tuple(row[0]): int(row[1]) for row in reasons.count().collect()}
        listed = ", ".join(f"{number} {' and '.join(kind)}" for kind, number in sorted(stored.items()))
        text = f"{counted(sum(stored.values()), 'broken event')} ({listed or 'none'}) in {self.merged.quarantine}"
        if stored != wanted:
            text += f", but {sum(wanted.values())} were delivered: {dict(wanted)!r}"
        self._status("quarantine", text, good=stored == wanted)
        return stored == wanted

    def _table(self, expected: oracle.Expected) -> bool:
        rows = [tuple(row) for row in self._read(self.folder.table).select(*oracle.STORED).collect()]
        difference = oracle.compare(expected, rows)
        apart = f"computed apart from the sink from {counted(expected.received, 'event')}"
        if not difference:
            self._status("table", f"equal to the expected state: {counted(len(rows), 'row')} ({apart})", good=True)
            return True
        self._status("table", f"NOT equal to the expected state ({apart}):", good=False)
        for kind, examples in (
            ("missing", difference.missing),
            ("unexpected", difference.unexpected),
            ("expected, found", difference.other),
            ("key held twice", difference.twice),
        ):
            if examples:
                listed = ", ".join(map(str, examples[:_SHOWN]))
                self._status("", f"{len(examples):,} {kind}: {listed}{' …' if len(examples) > _SHOWN else ''}")
        return False

    def _read(self, path: str, **options: str) -> DataFrame:
        return self.session.read.format("delta").options(**options).load(path)
