"""Data files, deletion vectors and commits that the driver reads and writes."""
