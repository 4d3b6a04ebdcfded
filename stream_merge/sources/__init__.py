"""Where change events come from: files and topics, and the formats of what is in them."""
