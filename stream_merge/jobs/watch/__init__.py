"""Streaming queries run in the foreground: start, watch, stop between two micro-batches."""
