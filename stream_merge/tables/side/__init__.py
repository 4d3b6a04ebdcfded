"""The tables beside a target: its remembered deletes and its quarantine."""
