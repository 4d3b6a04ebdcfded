"""Processes that run queries: the only place where sources meet the sink."""
