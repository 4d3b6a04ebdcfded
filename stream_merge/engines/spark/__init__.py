"""Delta's MERGE on Spark's executors."""
