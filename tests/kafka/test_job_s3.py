"""A job whose target and checkpoint lie on S3. Needs a broker, an S3 server and a JVM: Spark reads and writes both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import services
from pyspark.sql import SparkSession
from services import s3
from topic_job import TopicJob

from stream_merge import ConfigError
from stream_merge.jobs.kafka.control import request_stop


@pytest.fixture
def job(spark: SparkSession, broker: services.Broker, bucket: s3.Bucket, tmp_path: Path) -> Iterator[TopicJob]:
    job = TopicJob(spark, broker, tmp_path)
    place = uuid4().hex[:8]
    job.target, job.checkpoint = f"s3://{bucket.name}/{place}/rows", f"s3://{bucket.name}/{place}/checkpoint"
    yield job
    job.close()


def test_a_job_goes_on_from_a_checkpoint_on_s3(job: TopicJob, bucket: s3.Bucket) -> None:
    """Rows, quarantine, and where it stopped; nobody has promised to be alone, and small batches stay in the driver."""
    job.send(1, job.event("c", 1, "first"))
    job.send(2, b"{")
    (first,) = job.merge()
    job.send(1, job.event("u", 1, "second"))
    job.send(3, job.event("c", 3, "third"))
    (second,) = job.merge()
    nothing = job.merge()

    assert [first.events.received, second.events.received, len(nothing)] == [2, 2, 0]
    assert second.engine != "spark", second.plan
    assert job.rows() == [(1, "second"), (3, "third")]
    place = bucket.folder / job.target.split("/")[3]
    assert sorted(path.name for path in (place / "checkpoint" / "commits").iterdir() if path.name.isdigit()) == [
        "0",
        "1",
    ]
    assert (place / "__stream_merge_quarantine_rows" / "_delta_log").is_dir()


def test_who_cannot_leave_a_request_beside_the_checkpoint_is_told_how_to_stop(job: TopicJob) -> None:
    with pytest.raises(ConfigError, match="send SIGTERM to the job"):
        request_stop(job.settings())
