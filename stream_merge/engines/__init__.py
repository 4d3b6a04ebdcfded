"""How a merge is executed; what it means is decided elsewhere."""
