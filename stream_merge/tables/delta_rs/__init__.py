"""A Delta table by delta-rs: where that is proven to be right, and how."""
