"""Envelopes of changes: operation, position, the row before and after."""
