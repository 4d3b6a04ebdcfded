#!/usr/bin/env bash
# Runs a job on a Spark cluster, with its driver on this machine:
#
#   deployments/spark-submit.sh [options of spark-submit] JOB [options of 'stream-merge run']
#   deployments/spark-submit.sh --master spark://host:7077 --executor-memory 4g job.yaml --once
#
#   PYSPARK_PYTHON     a Python that has stream_merge, at the same path on every node, since executors decode the records;
#                      the one that this file was installed with, .venv beside this folder, or python3, unless set;
#                      --conf spark.pyspark.python=... wins over it
#   STREAM_MERGE_JARS  the folder that 'stream-merge jars' (in a clone: 'make jars') has filled; .jars/spark beside this
#                      folder unless set
#   SPARK_HOME         Spark on this machine, of the version that the jars are for; the one of PYSPARK_PYTHON unless set
#
# The exit code is that of 'stream-merge run'. SIGTERM, Ctrl-C and 'stream-merge stop JOB' end it after the running micro-batches.
set -euo pipefail
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd) # also through a link in a bin folder

fail() { echo "stream_merge: $*" >&2; exit 2; }

options=() jars= conf_jars= properties=
while [[ "${1:-}" = -* ]]; do
    case $1 in
        --jars=*) jars=${1#*=} && shift ;; # joined with ours: spark-submit takes the last --jars only, and no other conf
        --properties-file=*) properties=${1#*=} options+=("$1") && shift ;;
        --conf=spark.jars=*) conf_jars=${1#*=*=} && shift ;;
        --verbose | -v | --supervise | --load-spark-defaults | --*=*) options+=("$1") && shift ;;
        *)
            [ $# -gt 1 ] || fail "$1 needs a value"
            case $1=$2 in
                --jars=*) jars=$2 ;;
                --conf=spark.jars=* | -c=spark.jars=*) conf_jars=${2#spark.jars=} ;;
                *)
                    [ "$1" != --properties-file ] || properties=$2
                    options+=("$1" "$2")
                    ;;
            esac
            shift 2
            ;;
    esac
done
[ $# -gt 0 ] || fail "usage: deployments/spark-submit.sh [options of spark-submit] JOB [options of 'stream-merge run']"

if [ -z "${PYSPARK_PYTHON:-}" ]; then
    PYSPARK_PYTHON=python3
    for bin in "$here/../../bin" "$here/../.venv/bin"; do # share/stream-merge of an environment; deployments of a clone
        [ ! -x "$bin/stream-merge" ] || PYSPARK_PYTHON=$bin/python
    done
fi
SPARK_HOME=${SPARK_HOME:-$("$PYSPARK_PYTHON" -c 'import pyspark; print(pyspark.__path__[0])')} \
    || fail "SPARK_HOME is not set and $PYSPARK_PYTHON has no pyspark; set SPARK_HOME or PYSPARK_PYTHON"
export PYSPARK_PYTHON SPARK_HOME

# Which of the user's jars spark-submit would take: --jars, else the conf, else the entry of its file of properties.
jars=${jars:-$conf_jars}
properties=${properties:-${SPARK_CONF_DIR:-$SPARK_HOME/conf}/spark-defaults.conf}
if [ -z "$jars" ] && grep -qs '^[[:space:]]*spark\.jars[[:space:]=:]' "$properties"; then
    jars=$("$PYSPARK_PYTHON" -c 'import sys; from stream_merge.spark.confs import JARS, properties
print(properties(open(sys.argv[1], encoding="utf-8", errors="replace").read()).get(JARS, ""))' "$properties") \
        || fail "$PYSPARK_PYTHON has no stream_merge, which reads spark.jars in $properties; set PYSPARK_PYTHON"
fi
# What 'stream-merge jars' has fetched and Spark does not have itself: Delta, the Kafka connector, and what they need.
folder=${STREAM_MERGE_JARS:-$here/../.jars/spark}
compgen -G "$folder/*.jar" >/dev/null \
    || fail "no jars are in $folder; 'stream-merge jars $folder' fills it, and STREAM_MERGE_JARS names another folder"
for jar in "$folder"/*.jar; do
    artifact=$(basename "${jar%-[0-9]*}")
    compgen -G "$SPARK_HOME/jars/$artifact-[0-9]*.jar" >/dev/null || jars+=${jars:+,}$jar
done

job=$1 && shift
# A terminal sends Ctrl-C to the driver, to Spark's JVM and to the JVM's helpers, such as the 'chmod' by which Hadoop sets
# the mode of a checkpoint's file, whose end would be the batch's. What starts from here leaves it to the driver.
trap '' INT
# In place of this shell: SIGTERM to this process is one to spark-submit's.
exec "$SPARK_HOME/bin/spark-submit" --name "stream-merge $(basename "${job%.*}")" ${jars:+--jars "$jars"} \
    ${options+"${options[@]}"} "$here/job.py" run "$job" "$@"
