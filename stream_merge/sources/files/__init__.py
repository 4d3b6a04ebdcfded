"""A folder of change files, written by any tool, as a stream of events."""

from stream_merge.sources.files.reader import read_files

__all__ = ["read_files"]
