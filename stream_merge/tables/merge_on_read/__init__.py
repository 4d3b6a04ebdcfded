"""Merges that mark old rows as deleted and append new ones, by a commit of one's own; no data file is rewritten."""
