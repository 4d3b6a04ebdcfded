"""`stream-merge demo`: a generated change stream, merged and compared with the expected table."""
