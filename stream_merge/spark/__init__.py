"""Corners of Spark and of Delta's JVM that are not public, and what Spark alone says about columns and files."""
