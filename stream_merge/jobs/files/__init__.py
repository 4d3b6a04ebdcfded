"""`stream-merge files`: merges a folder of change files into a Delta table."""
