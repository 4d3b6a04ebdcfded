"""Values in records: read exactly, or refused with the reason."""
