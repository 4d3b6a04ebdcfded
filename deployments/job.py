"""What spark-submit runs: the commands of `stream-merge`, in the Spark application that it has started."""

from stream_merge.cli import main

main()
