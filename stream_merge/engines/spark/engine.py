"""Spark as an engine: it takes any batch into any table."""

from __future__ import annotations

from stream_merge.engines import tombstones
from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.engines.costs import favours_deletion_vectors
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.engines.spark.pruning import Pruning
from stream_merge.model.results import Refusal
from stream_merge.shapes.surely_changes import GreatestSequence, stored
from stream_merge.spark.versions import VECTOR_COLUMNS


def start(job: MergeJob, why: str, refusal: Refusal | None) -> Execution:
    """The merger, with the tombstones beside it looked after by whoever does it faster."""
    spec, target = job.spec, job.target
    deletion_vectors: bool | None = None
    if job.work.bytes and target.has_vectors:
        # Of a whole copy most events change nothing: how many do, nobody knows before the MERGE.
        deletion_vectors = job.layout.is_whole or favours_deletion_vectors(job.work)
    if target.has_vectors and _stands_in_their_way(job):
        deletion_vectors = False
    how = {None: "", True: "; with deletion vectors", False: "; copy-on-write"}[deletion_vectors]
    natively = tombstones.quickly(job) if spec.tombstones else None
    merger = SparkMerger(
        session=job.session,
        spec=spec,
        layout=job.layout,
        batch=job.batch,
        target=target,
        pruning=Pruning(job.session, spec, job.layout, job.batch, target, inside_at=job.inside_at),
        stored_greatest=lambda: _stored_greatest(job),
        deletion_vectors=deletion_vectors,
    )
    return Execution(
        choice=Choice(engine="spark", why=why, how=how, refusal=refusal),
        merger=merger,
        tombstones=natively or (tombstones.on_spark(job) if spec.tombstones else None),
        in_driver=False,
        only_spark=natively is None,
    )


def _stands_in_their_way(job: MergeJob) -> bool:
    """Whether a column is called as one that Delta needs to write deletion vectors."""
    layout = job.layout
    carried = () if layout.whole is None else layout.whole.columns
    names = [*job.target.schema.names, *(c.name for c in layout.stored), *(c.name for c in carried)]
    return any(name.lower() in VECTOR_COLUMNS for name in names)


def _stored_greatest(job: MergeJob) -> GreatestSequence | None:
    if job.target.maps_columns:
        return None  # statistics go by the names in the files, which may be those of other columns by now
    files = job.tables.target.files()
    return None if files is None else stored(files, job.layout)
