"""What would keep a job from running: checks jars, port, broker, topics, folders and tables, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from kafka.errors import KafkaError, TopicAuthorizationFailedError

from stream_merge.errors import ConfigError, located
from stream_merge.jobs.kafka import jars
from stream_merge.jobs.kafka.batch import merge_sink
from stream_merge.jobs.kafka.batch_offsets import Checkpoint
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.control import is_running
from stream_merge.jobs.kafka.newest_records import newest
from stream_merge.jobs.kafka.settings import JobSettings, QuerySettings
from stream_merge.jobs.spelling import as_settings
from stream_merge.metrics.server import serve
from stream_merge.model.locations import local_path
from stream_merge.shapes import widening
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka import certificates
from stream_merge.sources.kafka.connection import Cluster, Connection, Security, TopicState, is_refusal, message
from stream_merge.sources.wire.keys import KeyFormat
from stream_merge.sources.wire.strict_json import UndecodableError
from stream_merge.spark import columns
from stream_merge.spark.memory import shares
from stream_merge.spark.places import not_writable, permission_problems
from stream_merge.spark.preflight import occupied
from stream_merge.tables.applied_batches import expect_same_table
from stream_merge.tables.explain import find
from stream_merge.tables.fitness import keys_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check of one thing says."""

    query: str | None
    """None: it concerns the whole job."""
    about: str
    said: str
    is_problem: bool = False


def check(settings: JobSettings, *, jars_in: str | None) -> Iterator[Finding]:
    """Check everything that a run needs, without Spark; nothing is left behind.

    Args:
        settings: the job.
        jars_in: folder of the Kafka connector's jars; None where Spark has it or downloads it.
    """
    yield _jars(jars_in)
    yield _metrics(settings)
    yield Finding(query=None, about="memory", said=shares())
    connection = settings.kafka.connection()
    yield from _security(connection.security)
    broker, topics = _broker(settings, connection)
    yield broker
    for query in settings.queries:
        for finding in _query(query, topics, connection):
            yield replace(finding, said=as_settings(query.name, finding.said))


def _metrics(settings: JobSettings) -> Finding:
    """Whether the port is free; where none is set, `run` takes another one in its place."""
    metrics = settings.metrics
    try:
        metrics.access().context()
        if "port" not in metrics.model_fields_set:
            serve(0, metrics.host).close()
    except ConfigError as err:
        return Finding(query=None, about="metrics", said=str(err), is_problem=True)
    try:
        serve(metrics.port, metrics.host, access=metrics.access()).close()
    except ConfigError as err:
        is_ours = any(is_running(query) for query in settings.queries)
        said = f"port {metrics.port} is in use by this job, which is running" if is_ours else str(err)
        is_problem = not is_ours and "port" in metrics.model_fields_set
        return Finding(query=None, about="metrics", said=said, is_problem=is_problem)
    return Finding(query=None, about="metrics", said=f"port {metrics.port} is free")


def _broker(settings: JobSettings, connection: Connection) -> tuple[Finding, dict[str, TopicState] | None]:
    """Whether the broker answers, and the topics that it has; None where it does not."""
    cluster = Cluster(connection)
    names = sorted({topic for query in settings.queries for topic in query.topic})
    try:
        topics = cluster.topics(names)
    except TopicAuthorizationFailedError:
        hidden = [name for name in names if _is_hidden(cluster, name)]
        said = f"[TOPIC_HIDDEN] {connection.bootstrap} does not describe topic(s) {hidden!r}; allow the job READ"
        return Finding(query=None, about="broker", said=said, is_problem=True), None
    except (KafkaError, OSError, TimeoutError) as err:
        said = message(err)
        if not said.startswith(connection.bootstrap):
            does = "refuses the job, or is not trusted" if is_refusal(err) else "does not answer"
            said = f"{connection.bootstrap} {does}: {said or type(err).__name__}"
        said = f"[BROKER_REFUSED] {said}" if is_refusal(err) else f"[BROKER_UNREACHABLE] {said}"
        return Finding(query=None, about="broker", said=said, is_problem=True), None
    finally:
        cluster.close()
    return Finding(query=None, about="broker", said=f"{connection.bootstrap} answers"), topics


def _is_hidden(cluster: Cluster, topic: str) -> bool:
    """Whether an ACL keeps the job from a topic."""
    try:
        cluster.topics([topic])
    except TopicAuthorizationFailedError:
        return True
    return False


def _jars(folder: str | None) -> Finding:
    if folder is None:
        return Finding(query=None, about="jars", said="not given, so Spark downloads what it lacks")
    try:
        jars.jars_in(folder)
    except ConfigError as err:
        return Finding(query=None, about="jars", said=str(err), is_problem=True)
    return Finding(query=None, about="jars", said=f"the Kafka connector is in {folder}")


def _security(security: Security) -> Iterator[Finding]:
    """What Spark and kafka-python make of the same settings."""
    found = certificates.problems(security)
    for said in found:
        yield Finding(query=None, about="security", said=said, is_problem=True)
    if not found:
        how = security.protocol if security.mechanism is None else f"{security.protocol}, {security.mechanism}"
        said = certificates.remark(security) or "both Spark and kafka-python accept this"
        yield Finding(query=None, about="security", said=f"{how}: {said}")


def _query(query: QuerySettings, topics: Mapping[str, TopicState] | None, connection: Connection) -> Iterator[Finding]:
    """Args: topics: those of the broker; None where it does not answer."""
    missing = [topic for topic in query.topic if topics is not None and topic not in topics]
    if missing:
        said = f"[TOPIC_NOT_FOUND] the broker has no topic {missing!r}; correct 'topic', or let the connector create it"
        yield Finding(query=query.name, about="topic", said=said, is_problem=True)
    yield from _checkpoint(query, topics or {})
    yield from _sink(query)
    rows = RowSchema.of_query(query)
    yield from _table(query, rows)
    yield from _lineage(query)
    if topics is not None and not missing:
        yield from _sample(query, rows, topics, connection)


def _sink(query: QuerySettings) -> Iterator[Finding]:
    """What the sink does not accept of the settings, and whether the folders of its tables can be written."""
    refused = _refused(query)
    for said in refused:
        yield Finding(query=query.name, about="settings", said=said, is_problem=True)
    if refused:
        return
    if query.target.path is None or local_path(query.target.plain) is None:
        yield Finding(query=query.name, about="storage", said=f"{query.target} is not on this disk; not checked")
        return
    problems = permission_problems(merge_sink(query)._calls.spec, None)
    for said in problems:
        yield Finding(query=query.name, about="storage", said=said, is_problem=True)
    if not problems:
        yield Finding(query=query.name, about="storage", said=f"{query.target} and its side tables can be written")


def _checkpoint(query: QuerySettings, topics: Mapping[str, TopicState]) -> Iterator[Finding]:
    local = local_path(query.checkpoint)
    if local is None:
        for found in _start(query, topics):  # of a checkpoint that goes on it says nothing
            yield replace(found, said=f"with a new checkpoint: {found.said}", is_problem=False)
        yield Finding(query=query.name, about="checkpoint", said=f"{query.checkpoint} is not on this disk; not checked")
        return
    places = (local, local.parent, local / "offsets", local / "commits")  # locks are located beside it
    closed = next(filter(None, (not_writable(str(place)) for place in places)), None)
    if closed is not None:
        yield Finding(query=query.name, about="checkpoint", said=closed, is_problem=True)
        return
    checkpoint = Checkpoint.on_disk(query.checkpoint)
    if not checkpoint.has_begun:
        yield from _start(query, topics)
    try:
        refuse_start_of_existing(query, checkpoint)
        checkpoint.expect_one_of(query.topic, may_lack=query.on_data_loss == "continue")
    except ConfigError as err:
        yield Finding(query=query.name, about="checkpoint", said=str(err), is_problem=True)
        return
    said = f"{query.checkpoint} {'resumes where it ended' if checkpoint.has_begun else 'is new'}"
    yield Finding(query=query.name, about="checkpoint", said=said)


def _start(query: QuerySettings, topics: Mapping[str, TopicState]) -> Iterator[Finding]:
    try:
        refuse_start_elsewhere(query, topics)
    except ConfigError as err:
        yield Finding(query=query.name, about="start", said=str(err), is_problem=True)


def refuse_places(settings: JobSettings) -> None:
    """Stop before Spark starts, which would say so late, or in a trace.

    Raises:
        ConfigError: settings that the sink does not accept, checkpoints that this process cannot write or that are
            another query's, targets where something else is located.
    """
    problems = [as_settings(query.name, said) for query in settings.queries for said in _refused(query)]
    for query in settings.queries:
        problem = not_writable(query.checkpoint) or _foreign(query) or occupied(query.target)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)


def _refused(query: QuerySettings) -> tuple[str, ...]:
    """What the sink does not accept of the settings."""
    try:
        merge_sink(query)
    except ConfigError as err:
        return err.problems
    return ()


def _foreign(query: QuerySettings) -> str | None:
    """Whose checkpoint it is, where it lies on this disk and is another query's by what it reads."""
    if local_path(query.checkpoint) is None:
        return None
    try:
        Checkpoint.on_disk(query.checkpoint).expect_one_of(query.topic, may_lack=query.on_data_loss == "continue")
    except ConfigError as err:
        return located(f"query {query.name!r}", str(err))
    return None


def refuse_start_of_existing(query: QuerySettings, checkpoint: Checkpoint) -> None:
    """A checkpoint says where its query goes on; another starting position beside it would be ignored.

    Raises:
        ConfigError: the query has begun elsewhere.
    """
    if query.start is not None and checkpoint.has_begun and checkpoint.noted_start() != query.begins().text:
        msg = (
            f"[START_IGNORED] query {query.name!r} has a start, but its checkpoint {query.checkpoint!r} began with"
            " another one; remove 'start', or use a new checkpoint"
        )
        raise ConfigError(msg, target=query.target)


def refuse_start_elsewhere(query: QuerySettings, topics: Mapping[str, TopicState]) -> None:
    """Spark takes offsets to start at for all partitions of a topic, or stops without saying which are missing.

    Raises:
        ConfigError: `start` names others.
    """
    (topic, *others), start = query.topic, query.start
    if others or not isinstance(start, Mapping) or topic not in topics:
        return
    partitions = topics[topic].ends
    if start.keys() != partitions.keys():
        msg = (
            f"[INVALID_SETTING] start of query {query.name!r} has offsets of partitions {sorted(start)!r}, topic"
            f" {topic!r} has {sorted(partitions)!r}; give an offset for each of them"
        )
        raise ConfigError(msg, target=query.target)


def _table(query: QuerySettings, rows: RowSchema) -> Iterator[Finding]:
    try:
        table = find(query.target)
    except ConfigError as err:
        yield Finding(query=query.name, about="table", said=f"not checked: {err}")
        return
    if table is None:
        said = occupied(query.target)
        is_problem, said = said is not None, said or "is created from the first batch"
        yield Finding(query=query.name, about="table", said=said, is_problem=is_problem)
        return
    snapshot = table.snapshot()
    stored = snapshot.schema.names
    absent = [key for key in query.keys if columns.resolve(key, stored, case_sensitive=False) is None]
    others = keys_problem(snapshot, query.target, query.keys, case_sensitive=False)
    if others is not None:
        yield Finding(query=query.name, about="table", said=others, is_problem=True)
    elif absent:
        yield Finding(
            query=query.name, about="table", said=f"the table has no key column(s) {absent!r}", is_problem=True
        )
    else:
        yield Finding(query=query.name, about="table", said=f"version {snapshot.version}, keys {list(query.keys)!r}")
    rows.start_from(snapshot.schema)


def _lineage(query: QuerySettings) -> Iterator[Finding]:
    """Whether the table is the one that the checkpoint's query has merged into."""
    place = local_path(query.target.plain) if query.target.path is not None else None
    if place is None or local_path(query.checkpoint) is None:
        return  # only Spark knows; the start of a run looks there
    try:
        table = find(query.target)
        checkpoint = Checkpoint.on_disk(query.checkpoint)
        checkpoint.newest_batch("commits")
    except (ConfigError, OSError):
        return  # told already
    try:
        expect_same_table(
            checkpoint,
            None if table is None else table.snapshot(),
            name=query.name,
            label=query.name,
            target=query.target,
            location=str(place.absolute()),
        )
    except ConfigError as err:
        yield Finding(query=query.name, about="checkpoint", said=str(err), is_problem=True)


def _sample(
    query: QuerySettings, rows: RowSchema, topics: Mapping[str, TopicState], connection: Connection
) -> Iterator[Finding]:
    """Decode the newest records as the job would."""
    try:
        found = newest(connection, {topic: topics[topic] for topic in query.topic})
    except (KafkaError, OSError, TimeoutError) as err:
        said = f"no record could be read: {message(err) or type(err).__name__}"
        yield Finding(query=query.name, about="records", said=said, is_problem=True)
        return
    count = len(found.values)
    if not count:
        yield Finding(query=query.name, about="records", said="the topic is empty")
        return
    try:
        kinds, example = _decoded(query, rows, found)
    except (ConfigError, ConnectionError) as err:  # the latter of a schema registry
        yield Finding(query=query.name, about="records", said=str(err), is_problem=True)
        return
    bad, most = kinds.count(Kind.UNDECODABLE), query.limits.max_quarantine_share
    said = f"{count} tried, {bad} undecodable" + (f" ({example})" if example else "")
    is_problem = bad > most * count
    if is_problem:
        said += f"; more than max_quarantine_share ({most:g}), so 'value_format' is likely not how they are written"
    yield Finding(query=query.name, about="records", said=said, is_problem=is_problem)
    yield from _keys(query, rows.decoder().format.key, found)
    listed = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in rows.columns.fields)
    yield Finding(query=query.name, about="columns", said=listed)
    if rows.changed:
        changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in rows.changed.items())
        said = f"the first batch changes {changes}; {widening.COST}"
        yield Finding(query=query.name, about="types", said=said)


_OF_ROUTING = frozenset({"__dbz__physicalTableIdentifier"})
"""What Debezium's ByLogicalTableRouter adds to record keys (3.4)."""


def _keys(query: QuerySettings, form: KeyFormat, records: Records) -> Iterator[Finding]:
    """How `keys` and the keys of these records differ."""
    lacking, more = set[str](), set[str]()
    for key in records.keys.to_pylist():
        with suppress(UndecodableError, ConnectionError):
            known = form.names(key)
            lacking |= set(query.event_keys) - known if known else set()
            more |= known - set(query.event_keys) - _OF_ROUTING
    if lacking:
        said = (
            f"record keys do not hold {sorted(lacking)!r}: a delete has them from the old row alone, which is whole"
            " with REPLICA IDENTITY FULL, else it reaches no row; an update of one of them is quarantined, and with a"
            " 'flattened' format, which does not tell it, the row before stays"
        )
        yield Finding(query=query.name, about="keys", said=said)
    if more:
        said = (
            f"record keys also hold {sorted(more)!r}, which 'keys' leaves out: rows of the source that differ in them"
            " alone overwrite each other; add them, unless the others tell rows apart"
        )
        yield Finding(query=query.name, about="keys", said=said)


def _decoded(query: QuerySettings, rows: RowSchema, records: Records) -> tuple[list[str], str | None]:
    """Kinds of the records, and why one of them cannot be read."""
    rows.admit_declared()
    registered = rows.registered(records)
    if registered is not None:
        return registered
    for _ in range(2):  # the second time in the schemas that the first one found
        decoder = rows.decoder()
        found = decoder.decode(records, set()).to_pylist()
        rows.admit_noted(row["note"] for row in found if row["kind"] == Kind.OTHER_SCHEMA)
    bad = next((row["note"] for row in found if row["kind"] == Kind.UNDECODABLE), None)
    return [row["kind"] for row in found], bad
