"""What stops a query before anything of a batch is written, each with one sentence."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from stream_merge.errors import ConfigError, ContractError
from stream_merge.jobs.kafka.batch_offsets import Covered, Ranges
from stream_merge.jobs.kafka.decode import Decoded
from stream_merge.jobs.kafka.lineage import Lineage
from stream_merge.jobs.kafka.missing_values import UNAVAILABLE
from stream_merge.jobs.kafka.ordering import OFFSET, PARTITION
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.model.logs import tell
from stream_merge.model.source_batch import MostUndecodable
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka.connection import TopicState

log = logging.getLogger(__name__)


def refuse_lost(lost: Ranges, query: QuerySettings) -> None:
    """Stop for offsets that the broker has removed, under `on_data_loss: stop`.

    Raises:
        ContractError: there are some.
    """
    if not lost or query.on_data_loss != "stop":
        return
    listed = ", ".join(
        f"topic {topic!r}, partition {partition}, offsets {gone.start} to {gone.end - 1}"
        for topic, partitions in lost.items()
        for partition, gone in sorted(partitions.items())
    )
    msg = (
        f"[OFFSETS_LOST] the broker removed records for {query.target!r} before they were merged: {listed}; take a new"
        " snapshot of the source, or set 'on_data_loss: continue'"
    )
    raise ContractError(msg, reasons={"lost_offsets": 1}, target=query.target)


def refuse_other_topics(lineage: Lineage, topics: Mapping[str, TopicState]) -> None:
    """Stop where offsets mean something else than before.

    Raises:
        ContractError: a topic was made anew, or has other partitions while its events are ordered by offset.
    """
    last, query = lineage.last, lineage.query
    if last is None:
        return
    for name, state in topics.items():
        known = last.topic_ids.get(name, state.topic_id)
        goes_on = any(topic == name for topic, _ in last.ends)
        if known != state.topic_id and (goes_on or query.epoch <= last.epoch):
            msg = (
                f"[TOPIC_RECREATED] topic {name!r} was re-created (id {known}, now {state.topic_id}), so its"
                f" offsets start again; use a new checkpoint and set 'epoch: {last.epoch + 1}'"
            )
            raise ContractError(msg, reasons={}, target=query.target)
        partitions = lineage.partitions(name)
        if lineage.compares_offsets and lineage.is_wider(name, state):
            msg = (
                f"[ORDER_CHANGED] topic {name!r} has {len(state.ends)} partitions, it had {partitions}; keys"
                f" may have moved, so offsets no longer order their events: set 'epoch: {last.epoch + 1}'"
            )
            raise ContractError(msg, reasons={}, target=query.target)


def guard(batch: Decoded, lineage: Lineage, covered: Covered, batch_id: int) -> None:
    """Stop for what the records of a batch say.

    Raises:
        ConfigError: keys of records, or names of columns, cannot be read or taken.
        ContractError: a truncate, too large a share of undecodable records, or a source that is not as before.
    """
    _refuse_truncate(batch, lineage.query, batch_id)
    _refuse_share(batch, lineage.query, batch_id)
    refuse_unreadable(batch, lineage.query)
    _refuse_other_servers(batch, lineage)
    _refuse_regression(batch, lineage, covered.ranges)


def refuse_unreadable(batch: Decoded, query: QuerySettings) -> None:
    """Stop for null-value records whose keys nobody can read yet, and for columns that no event may have.

    Raises:
        ConfigError: no event so far has a schema, and the job file declares no columns; or a name is taken.
    """
    unread = batch.tally.total(Kind.OTHER_SCHEMA)
    if unread:
        msg = (
            f"[KEY_SCHEMA_UNKNOWN] keys of {unread} null-value records cannot be decoded: no earlier event has a"
            " matching schema; declare 'columns' in the job file"
        )
        raise ConfigError(msg)
    taken = [f.name for f in batch.row.fields if f.name.startswith("$")]
    if taken:
        msg = f"[RESERVED_COLUMN_NAME] column(s) {taken!r} must not start with $; rename them in the connector"
        raise ConfigError(msg, target=query.target)
    if query.topic_column in batch.row.names:
        msg = f"[INVALID_SETTING] topic_column {query.topic_column!r} is a column of the events; choose another name"
        raise ConfigError(msg, target=query.target)


def refuse_unavailable(events: DataFrame, query: QuerySettings) -> None:
    """Stop for a value that nobody has, under `unavailable: fail`.

    Raises:
        ContractError: an event lacks one.
    """
    unsupplied = events.where(F.col(UNAVAILABLE).isNotNull()).select(PARTITION, OFFSET, UNAVAILABLE).first()
    if unsupplied is None:
        return
    partition, offset, missing = unsupplied
    msg = (
        f"[UNAVAILABLE_VALUE] the event at partition {partition}, offset {offset} for {query.target!r} lacks"
        f" {list(missing)!r}; replay quarantined records of its key, set REPLICA IDENTITY FULL, or set"
        " 'unavailable: quarantine'"
    )
    raise ContractError(msg, reasons={"unavailable_value": 1}, target=query.target)


def _refuse_truncate(batch: Decoded, query: QuerySettings, batch_id: int) -> None:
    if batch.tally.first_truncate is None:
        return
    topic, partition, offset = batch.tally.first_truncate
    if query.on_truncate == "ignore":
        tell(log.warning, "truncate_ignored", topic=topic, partition=partition, offset=offset)
        return
    msg = (
        f"[SOURCE_TRUNCATED] topic {topic!r}, partition {partition}, offset {offset} truncates the source table"
        f" of {query.target!r}; set 'on_truncate: ignore', let the job pass it, stop it, delete older rows"
    )
    raise ContractError(msg, reasons={"truncate": 1}, target=query.target, batch_id=batch_id)


def _refuse_share(batch: Decoded, query: QuerySettings, batch_id: int) -> None:
    bad, records = batch.tally.total(Kind.UNDECODABLE), batch.tally.records
    most = MostUndecodable(share=query.limits.max_quarantine_share, setting="max_quarantine_share")
    if not most.is_exceeded(bad, records):
        return
    example = batch.of_kinds(Kind.UNDECODABLE).select("topic", "partition", "offset", "note").first()
    where = "" if example is None else f"; {example[0]!r}, partition {example[1]}, offset {example[2]}: {example[3]}"
    raise most.error(bad, records, target=query.target, batch_id=batch_id, example=where)


def _refuse_regression(batch: Decoded, lineage: Lineage, ranges: Ranges) -> None:
    """Stop where the source's log fell back further than the limit: positions compare with nothing that is stored."""
    last, query, source_log = lineage.last, lineage.query, lineage.query.value_format.log
    if last is None or query.epoch > last.epoch or source_log is None:
        return
    for place, position in batch.tally.lowest_positions.items():
        read, highest = ranges.get(place[0], {}).get(place[1]), last.positions.get(place)
        is_new = read is not None and read.start >= last.seen.get(place, 0)
        most = query.limits.max_position_regression
        if is_new and highest is not None and source_log.regression(highest, position) > most:
            back = f"{source_log.shown(highest)} to {source_log.shown(position)}"
            msg = (
                f"[POSITION_REGRESSED] topic {place[0]!r}, partition {place[1]} went back from position {back}; if"
                f" the source was restored, set 'epoch: {last.epoch + 1}'; if the connector re-delivers, raise"
                " max_position_regression"
            )
            raise ContractError(msg, reasons={}, target=query.target)


def _refuse_other_servers(batch: Decoded, lineage: Lineage) -> None:
    """Stop where another server than before wrote the changes: positions are of one server.

    In a new epoch it may be one; then the batch's records before its first change are of the epoch before.
    """
    query = lineage.query
    if query.on_server_change == "ignore":
        return
    for topic, servers in batch.tally.servers.items():
        before, of_epoch = lineage.servers_before.get(topic), lineage.servers.get(topic)
        new = sorted((*min(places.items()), server) for server, places in servers.items() if server != before)
        if len(new) > (of_epoch is None):
            partition, offset, server = new[-1]
            remedy = f"set 'epoch: {query.epoch + 1}'" if of_epoch else "'start' there, with a new snapshot"
            msg = (
                f"[SOURCE_SERVER_CHANGED] topic {topic!r}, partition {partition}, offset {offset}: server"
                f" {server!r} follows {before or new[0][2]!r}; {remedy}, or 'on_server_change: ignore' within one"
                " binlog"
            )
            raise ContractError(msg, reasons={}, target=query.target)
