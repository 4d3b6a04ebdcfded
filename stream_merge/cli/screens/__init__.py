"""How commands show what they have read."""
