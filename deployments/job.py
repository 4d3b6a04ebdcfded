"""What spark-submit runs: the commands of `stream-merge`, in the Spark application that it has started."""

import signal

from stream_merge.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # which spark-submit.sh has had ignored
main()
