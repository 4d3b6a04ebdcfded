"""Streaming queries in the foreground, and what they print."""
