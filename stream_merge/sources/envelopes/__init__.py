"""What a record says of its change: operation, position, the row before and after."""
