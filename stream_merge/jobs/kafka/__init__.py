"""The job: topics in, current Delta tables out, described by one file."""

from stream_merge.jobs.kafka.replay import replay
from stream_merge.jobs.kafka.run import Job, run
from stream_merge.jobs.kafka.settings import JobSettings, load

__all__ = ["Job", "JobSettings", "load", "replay", "run"]
