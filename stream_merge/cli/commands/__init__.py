"""The commands of `stream-merge`."""
