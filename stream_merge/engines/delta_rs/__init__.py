"""The merge by delta-rs, in the driver."""
