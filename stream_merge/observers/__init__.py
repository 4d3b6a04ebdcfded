"""Observers of micro-batches that need packages of their own; nothing imports them until one is asked for."""
