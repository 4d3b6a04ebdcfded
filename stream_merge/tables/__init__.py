"""A Delta table, whoever reads it: what it is like, how it is made ready, and the tables beside it."""
