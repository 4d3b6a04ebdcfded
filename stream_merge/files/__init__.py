"""A folder of change files, written by any tool, merged into a Delta table."""
