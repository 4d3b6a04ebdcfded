"""The remembered deletes of a table."""
