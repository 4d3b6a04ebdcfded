"""A folder of change files, written by any tool, merged into a Delta table."""

from stream_merge.sources.files.reader import read_files

__all__ = ["read_files"]
