"""What the types of a database mean."""
