"""`python -m stream_merge.cli`."""

from stream_merge.cli import main

main()
