"""A look at broker, checkpoint and table before a query starts, beside the others that are running."""

from __future__ import annotations

import threading
from collections.abc import Callable

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from stream_merge.jobs.watch.queries import QueryFailedError


class Look(threading.Thread):
    """Looks once.

    Args:
        query: its name.
        look: raises what keeps the query from starting.
    """

    def __init__(self, query: str, look: Callable[[], None]) -> None:
        super().__init__(name=f"look {query}", daemon=True)
        self._query = query
        self._look = look
        self.error: Exception | None = None
        """Why the query is not to start."""

    def run(self) -> None:
        """Look once."""
        try:
            self._look()
        except (PySparkException, Py4JError) as err:
            self.error = QueryFailedError(self._query, err)
            self.error.__cause__ = err
        except Exception as err:
            self.error = err
