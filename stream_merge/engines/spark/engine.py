"""Spark as an engine: it takes any batch into any table."""

from __future__ import annotations

from stream_merge.engines import tombstone_access
from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.engines.costs import favours_deletion_vectors
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.model.results import Refusal
from stream_merge.spark.versions import VECTOR_COLUMNS


def start(job: MergeJob, why: str, refusal: Refusal | None) -> Execution:
    """Spark at work on the job; its tombstones by whoever is faster."""
    spec, target = job.spec, job.target
    deletion_vectors: bool | None = None
    if job.work.bytes and target.has_vectors:
        # Most events of a full copy change nothing: how many do, nobody knows before the MERGE.
        deletion_vectors = job.layout.is_whole or favours_deletion_vectors(job.work)
    if target.has_vectors and _hinders_vectors(job):
        deletion_vectors = False
    how = {None: "", True: "; with deletion vectors", False: "; copy-on-write"}[deletion_vectors]
    by_driver = tombstone_access.quickly(job) if spec.tombstones else None
    return Execution(
        choice=Choice(engine="spark", why=why, how=how, refusal=refusal),
        merger=SparkMerger(job, deletion_vectors=deletion_vectors),
        tombstones=by_driver or (tombstone_access.on_spark(job) if spec.tombstones else None),
        in_driver=False,
        only_spark=by_driver is None,
    )


def _hinders_vectors(job: MergeJob) -> bool:
    """Whether a column has a name that Delta needs to write deletion vectors."""
    layout = job.layout
    carried = () if layout.whole is None else layout.whole.columns
    names = [*job.target.schema.names, *(c.name for c in layout.stored), *(c.name for c in carried)]
    return any(name.lower() in VECTOR_COLUMNS for name in names)
