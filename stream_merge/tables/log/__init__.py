"""The log of a table: its newest version, its live files and its commits, read in the driver."""
