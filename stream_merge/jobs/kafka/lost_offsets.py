"""Offsets that nobody can read any more: found before a batch reads, named, and never passed over in silence."""

from __future__ import annotations

from collections.abc import Mapping

from stream_merge.errors import ContractError
from stream_merge.jobs.kafka.batch_offsets import Range, Ranges
from stream_merge.sources.kafka.connection import TopicState


def lost(ranges: Ranges, topics: Mapping[str, TopicState]) -> Ranges:
    """The parts of a batch that the broker has no longer: from where the batch starts to where the log starts now.

    Args:
        ranges: what the batch covers.
        topics: the topics as the broker describes them; one that is gone is not among them.
    """
    found: Ranges = {}
    for topic, partitions in ranges.items():
        starts = topics[topic].starts if topic in topics else {}
        for partition, wanted in partitions.items():
            first = starts.get(partition, wanted.end)
            if len(wanted) and first > wanted.start:
                found.setdefault(topic, {})[partition] = Range(start=wanted.start, end=min(first, wanted.end))
    return found


def refuse(found: Ranges, target: str) -> None:
    """Stop for lost offsets.

    Raises:
        ContractError: there are some.
    """
    if not found:
        return
    listed = ", ".join(
        f"topic {topic!r}, partition {partition}, offsets {gone.start} to {gone.end - 1}"
        for topic, partitions in found.items()
        for partition, gone in sorted(partitions.items())
    )
    msg = (
        f"[OFFSETS_LOST] the broker removed records for {target!r} before they were merged: {listed}; take a new"
        " snapshot of the source, or set 'on_data_loss: continue'"
    )
    raise ContractError(msg, reasons={"lost_offsets": 1}, target=target)
