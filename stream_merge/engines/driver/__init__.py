"""Merges in the driver that copy no row: replaced rows are marked in deletion vectors, new ones appended."""
