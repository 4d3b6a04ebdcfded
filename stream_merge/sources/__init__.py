"""Where change events come from: topics, and the formats of what is in them."""
