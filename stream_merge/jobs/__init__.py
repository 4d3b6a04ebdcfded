"""Processes that run queries: sources and sinks together."""
