"""Decoding of records into change events, in Spark's workers."""
