"""The job: topics in, current Delta tables out, described by one file."""

from stream_merge.job.replay import replay
from stream_merge.job.run import Job, run
from stream_merge.job.settings import JobSettings, load

__all__ = ["Job", "JobSettings", "load", "replay", "run"]
