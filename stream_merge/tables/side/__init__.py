"""Side tables of a target: tombstones and quarantine."""
