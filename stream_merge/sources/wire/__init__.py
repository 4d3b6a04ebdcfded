"""How a change event is written in a record: exact, or refused with a reason."""
