"""Benchmarks: side by side in one run, medians of alternating calls, ratios."""
