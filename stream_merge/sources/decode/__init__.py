"""Records in, change events out: what Spark's workers run."""
