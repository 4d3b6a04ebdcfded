"""Who executes the clauses of a merge: Spark, or the driver; `choose` decides for each batch."""
