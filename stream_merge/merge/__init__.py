"""One call of a sink, from frame to commit."""
