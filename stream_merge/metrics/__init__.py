"""What sinks did, as numbers that Prometheus scrapes."""
