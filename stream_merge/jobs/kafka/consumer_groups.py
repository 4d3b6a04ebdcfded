"""Mirrors merged offsets to a consumer group, where lag tools read them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka.errors import KafkaError

from stream_merge.model.logs import tell
from stream_merge.sources.kafka.connection import Cluster

log = logging.getLogger(__name__)

FAILURES = (KafkaError, OSError, TimeoutError)
"""Errors of a broker that is away, or refuses."""
_RENEW_SECONDS = 600.0
"""A broker forgets a group without members after `offsets.retention.minutes`, a week by default."""
_RETRY_SECONDS = 60.0
"""Pause after a failure: a missing ACL is not there two seconds later either."""


@dataclass(kw_only=True)
class ConsumerGroup:
    """The consumer group of one query. Its offsets are a copy for lag tools: Spark reads from its checkpoint."""

    name: str
    _mirrored: dict[tuple[str, int], int] = field(default_factory=dict)
    _mirrored_at: float = 0.0
    _failed_at: float | None = None

    def mirror(self, cluster: Cluster, ends: Mapping[tuple[str, int], int], *, now: float, is_last: bool) -> bool:
        """Commit offsets if they have moved or are due for renewal; a failure is logged once until one succeeds.

        Args:
            cluster: the broker.
            ends: topic and partition -> offset behind the last merged record.
            now: seconds on a clock that never goes back.
            is_last: no later call will try again, so try despite an earlier failure.

        Returns:
            Whether it did not fail.
        """
        offsets = dict(ends)
        is_renewed = offsets == self._mirrored and now - self._mirrored_at < _RENEW_SECONDS
        is_paused = self._failed_at is not None and now - self._failed_at < _RETRY_SECONDS and not is_last
        if not offsets or is_renewed or is_paused:
            return True
        try:
            cluster.commit(self.name, offsets)
        except FAILURES as err:
            if self._failed_at is None:
                tell(log.warning, "offsets_not_mirrored", group=self.name, error=type(err).__name__)
            self._failed_at = now
            return False
        self._mirrored, self._mirrored_at, self._failed_at = offsets, now, None
        return True
