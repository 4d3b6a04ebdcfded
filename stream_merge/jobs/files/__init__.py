"""`stream-merge files`: a folder of change files, merged into a Delta table."""
