#!/usr/bin/env bash
# What the Makefile needs before it can run anything; every answer is found, installed, or said in one sentence.
#
#   deployments/setup.sh venv            make .venv and install the locked packages
#   deployments/setup.sh spark DIR VERSION    make another one on top of it, with PySpark of another version (4.1)
#   deployments/setup.sh java    print the home of a JDK that Spark can use; install one through apt when root
#   deployments/setup.sh jars POM DIR    copy what a POM names, and all that it needs, into a folder
#   deployments/setup.sh build PROJECT REPOSITORY    build a Maven project into a repository that holds its jar alone
#   deployments/setup.sh postgres        print the folder of PostgreSQL's server programs; install it through apt when root
#   deployments/setup.sh mariadb         print the path of MariaDB's server; install it through apt when root
#   deployments/setup.sh prometheus      print the path of Prometheus; unpack it, Alertmanager and Pushgateway into .jars where they are missing
#   deployments/setup.sh alertmanager    print the path of Alertmanager
#   deployments/setup.sh podman DIR      install what builds and runs images, and make a Debian base image in DIR
#   deployments/setup.sh s3              print the path of the S3 server of the tests; build it into .jars where there is none
#   deployments/setup.sh azurite         print the path of the tests' emulator of Azure; install it into .jars where there is none
#   deployments/setup.sh helm            print the path of Helm; build it into .jars where there is none
#   deployments/setup.sh registry DIR    unpack the schema registry of the tests into a folder
#   deployments/setup.sh crds DIR        get into DIR what the operators of Prometheus and Spark accept
#   deployments/setup.sh gcs             print the path of the tests' emulator of Google's store; build it into .jars where there is none
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "stream_merge: $*" >&2; exit 1; }
say() { echo "stream_merge: $*" >&2; }

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() { # name of what is missing, then packages: the first one that apt knows is installed
    local what=$1 package; shift
    say "$what is missing; installing it with apt-get"
    apt-get update -qq >&2
    for package in "$@"; do
        if apt-cache show "$package" >/dev/null 2>&1; then
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >&2
            return
        fi
    done
    fail "$what is missing and apt knows none of: $*. Install it and run the same command again."
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer is on the PATH. Install one, or name it: make PYTHON=/path/to/python3 ..."
}

make_venv() {
    local python minor
    python=$(find_python)
    # Debian ships the module venv without ensurepip, which only shows in the middle of making one.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        can_install || fail "$python cannot make virtual environments. Install its venv package (Debian, Ubuntu: apt install python$minor-venv)."
        apt_install "venv of Python $minor" "python$minor-venv" python3-venv
    fi
    say "installing the locked packages into .venv (a few minutes the first time)"
    "$python" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
}

packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# PySpark of another version with its delta-spark, as pyproject.toml pairs them, before the packages of .venv.
make_spark_venv() {
    local folder=$1 spark=$2 pair line
    pair=() # without mapfile: macOS has bash 3.2
    while IFS= read -r line; do pair+=("$line"); done < <(.venv/bin/python -c 'import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["spark" + sys.argv[1].replace(".", "")], sep="\n")' "$spark")
    [ ${#pair[@]} -gt 0 ] || fail "pyproject.toml has no extra for Spark $spark."
    make_other_venv "$folder" "${pair[@]}"
}

make_other_venv() {
    local folder=$1; shift
    say "installing $* into $folder (a minute the first time)"
    rm -rf "$folder"
    .venv/bin/python -m venv --without-pip "$folder"
    .venv/bin/pip --python "$folder/bin/python" install --quiet --disable-pip-version-check --no-deps "$@"
    # Looked through in this order, after what was just installed.
    printf '%s\n' "$PWD" "$(packages_of .venv)" >"$(packages_of "$folder")/locked.pth"
}

# Prints the home of a usable JDK, or nothing. Spark needs Java 17 and the module jdk.incubator.vector.
usable_home() {
    local java=$1 modules major
    modules=$("$java" --list-modules 2>/dev/null) || return 0
    grep -q '^jdk\.incubator\.vector' <<<"$modules" || return 0
    major=$(sed -n 's/^java\.base@\([0-9]*\).*/\1/p' <<<"$modules")
    [ "${major:-0}" -ge 17 ] || return 0
    "$java" -XshowSettings:properties -version 2>&1 | sed -n 's/^ *java\.home = //p'
}

find_java() {
    local java home
    for java in ${JAVA_HOME:+"$JAVA_HOME/bin/java"} java /usr/lib/jvm/*/bin/java /opt/homebrew/opt/openjdk*/bin/java; do
        home=$(usable_home "$java")
        if [ -n "$home" ]; then
            echo "$home"
            return
        fi
    done
}

need_java() {
    local home
    home=$(find_java)
    if [ -z "$home" ]; then
        can_install || fail "no Java 17 or newer with the module jdk.incubator.vector was found. Install a full JDK (Debian, Ubuntu: apt install openjdk-17-jdk-headless) or set JAVA_HOME to one."
        apt_install "a JDK" openjdk-17-jdk-headless openjdk-21-jdk-headless default-jdk-headless
        home=$(find_java)
        [ -n "$home" ] || fail "apt-get installed a JDK, but none with Java 17 or newer and the module jdk.incubator.vector. Set JAVA_HOME to one."
    fi
    echo "$home"
}

need_maven() { # what for
    if ! command -v mvn >/dev/null; then
        can_install || fail "mvn is missing, which $1. Install Maven (Debian, Ubuntu: apt install maven)."
        apt_install "Maven" maven
    fi
}

# A repository of its own: in ~/.m2 Maven leaves descriptions of jars that it did not need, and Spark, which looks
# there first for spark.jars.packages, takes them for the whole and fails. Jansi resets colors in a pipe, too.
maven() { MAVEN_OPTS="${MAVEN_OPTS:-} -Djansi.noreset=true" mvn -q -B -Dmaven.repo.local="$PWD/.jars/maven" "$@"; }

copy_jars() {
    local pom=$1 folder=$2
    need_maven "gets the jars of $pom"
    say "getting the jars of $pom (a minute the first time)"
    mkdir -p "$folder"
    rm -f "$folder"/*.jar # of a POM before this one: two versions of a jar would be on the class path
    maven -f "$pom" dependency:copy-dependencies -DoutputDirectory="$(cd "$folder" && pwd)" -DincludeScope=runtime \
        || fail "mvn could not get the jars of $pom; what it said is above."
}

# Apicurio: its server is an archive, not a jar with dependencies.
get_registry() {
    local folder=$1 name=apicurio-registry-app version=3.0.9
    need_maven "gets the schema registry of the tests"
    say "getting the schema registry of the tests into $folder (a minute)"
    mkdir -p "$folder"
    maven dependency:copy -Dartifact="io.apicurio:$name:$version:tar.gz:all" \
        -DoutputDirectory="$PWD/$folder" || fail "mvn could not get $name $version; what it said is above."
    tar -xzf "$folder/$name-$version-all.tar.gz" -C "$folder"
    rm "$folder/$name-$version-all.tar.gz"
}

build_jar() {
    local project=$1 repository=$2 name version folder
    need_maven "builds $project"
    name=stream-merge-$(basename "$project")
    # Other sources, another version: Ivy never looks again at one that it has.
    version=1.$(cat "$project/pom.xml" $(find "$project/src" -name '*.java' | sort) | { sha256sum 2>/dev/null || shasum -a 256; } | cut -c1-12)
    maven -f "$project/pom.xml" clean package || fail "mvn could not build $project; what it said is above."
    # No group that anybody could publish under: Ivy asks public repositories, too.
    rm -rf "$repository/local"
    folder=$repository/local/stream-merge/$name/$version
    mkdir -p "$folder"
    cp "$project"/target/*.jar "$folder/$name-$version.jar"
    cat >"$folder/$name-$version.pom" <<POM
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local.stream-merge</groupId>
  <artifactId>$name</artifactId>
  <version>$version</version>
</project>
POM
    rm -rf "$project/target"
}

find_postgres() {
    local folder
    for folder in ${POSTGRES_BIN:+"$POSTGRES_BIN"} /usr/lib/postgresql/*/bin /opt/homebrew/opt/postgresql*/bin; do
        if [ -x "$folder/initdb" ]; then
            echo "$folder"
            return
        fi
    done
}

need_postgres() {
    local folder
    folder=$(find_postgres)
    if [ -z "$folder" ]; then
        can_install || fail "PostgreSQL's server programs were not found. Install them (Debian, Ubuntu: apt install postgresql) or set POSTGRES_BIN to their folder."
        apt_install "PostgreSQL" postgresql
        folder=$(find_postgres)
        [ -n "$folder" ] || fail "apt-get installed PostgreSQL, but no initdb is under /usr/lib/postgresql. Set POSTGRES_BIN to its folder."
    fi
    echo "$folder"
}

need_mariadb() {
    local program
    program=$(find_program ${MARIADBD:+"$MARIADBD"} mariadbd /usr/sbin/mariadbd)
    if [ -z "$program" ]; then
        can_install || fail "MariaDB's server was not found. Install it (Debian, Ubuntu: apt install mariadb-server) or set MARIADBD to the program."
        apt_install "MariaDB" mariadb-server
        program=/usr/sbin/mariadbd
        [ -x "$program" ] || fail "apt-get installed MariaDB, but there is no $program. Set MARIADBD to the program."
    fi
    echo "$program"
}

# The first of these that is a program: its path, or nothing.
find_program() {
    local program
    for program in "$@"; do
        if command -v "$program"; then
            return
        fi
    done
}

find_prometheus() {
    find_program ${PROMETHEUS:+"$PROMETHEUS"} prometheus "$PWD/.jars/prometheus/usr/bin/prometheus"
}

need_prometheus() {
    local program folder=.jars/prometheus packages=(prometheus prometheus-alertmanager prometheus-pushgateway)
    program=$(find_prometheus)
    if [ -z "$program" ] || [ ! -x "$folder/usr/bin/prometheus-pushgateway" ]; then
        { command -v apt-get && command -v dpkg-deb; } >/dev/null \
            || fail "Prometheus, Alertmanager and Pushgateway were not found. Install them into $folder/usr/bin."
        # Unpacked, not installed: the packages would start servers of their own.
        say "unpacking Prometheus, Alertmanager and Pushgateway into $folder"
        if can_install; then apt-get update -qq >&2; fi
        mkdir -p "$folder"
        (cd "$folder" && rm -f ./*.deb && apt-get download -qq -o APT::Sandbox::User=root "${packages[@]}" >&2 \
            && for package in ./*.deb; do dpkg-deb -x "$package" .; done) \
            || fail "apt-get could not download ${packages[*]}; what it said is above."
        rm -f "$folder"/*.deb
        program=$(find_prometheus)
        [ -n "$program" ] || fail "the package prometheus holds no usr/bin/prometheus. Set PROMETHEUS to the program."
    fi
    echo "$program"
}

# Of Debian's own packages: no registry of images is asked. runc: crun refuses hybrid cgroups; catatonit: pods.
need_podman() {
    local folder=$1
    if ! { command -v podman && command -v buildah && command -v mmdebstrap; } >/dev/null; then
        can_install || fail "podman, buildah or mmdebstrap is missing. Install them (Debian, Ubuntu: apt install podman buildah runc mmdebstrap catatonit)."
        apt_install podman podman
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah runc mmdebstrap catatonit >&2
    fi
    mkdir -p "$folder"
    [ -f "$folder/base.tar" ] || { say "making a base image of Debian (a minute)"
        mmdebstrap --quiet --variant=minbase --format=tar --include=ca-certificates --dpkgopt='path-exclude=/usr/share/doc/*' \
            --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$folder/base.part" >&2 \
            || fail "mmdebstrap could not make a base image; what it said is above."
        mv "$folder/base.part" "$folder/base.tar"; }
}

need_alertmanager() {
    local folder=.jars/prometheus templates=/usr/share/prometheus/alertmanager
    need_prometheus >/dev/null
    if [ ! -e "$templates" ]; then # Debian's program reads them from there only
        can_install || fail "Alertmanager's templates are not in $templates. Copy $folder$templates to there."
        mkdir -p "${templates%/*}"
        cp -r "$folder$templates" "$templates"
    fi
    echo "$PWD/$folder/usr/bin/prometheus-alertmanager"
}

find_go() {
    local go
    for go in ${GO:+"$GO"} go /usr/local/go/bin/go /usr/lib/go/bin/go /opt/homebrew/bin/go; do
        if "$go" version >/dev/null 2>&1; then
            command -v "$go"
            return
        fi
    done
}

# Go that builds $1: from 1.21 on any one gets by itself the version that a module asks for, which an older one is given.
need_go() {
    local wanted=$1 go version root
    go=$(find_go)
    if [ -z "$go" ]; then
        can_install || fail "Go is missing, which builds the S3 server of the tests. Install it (Debian, Ubuntu: apt install golang-go) or set GO to the program."
        apt_install "Go" golang-go
        go=$(find_go)
        [ -n "$go" ] || fail "apt-get installed Go, but there is no go on the PATH. Set GO to the program."
    fi
    version=$("$go" env GOVERSION)
    if [ "$(printf '%s\n' go1.21 "$version" | sort -V | head -1)" = "$version" ] && [ "$version" != go1.21 ]; then
        say "$version is too old; getting $wanted as a module"
        "$go" mod download "golang.org/toolchain@v0.0.1-$wanted.$("$go" env GOOS)-$("$go" env GOARCH)" >&2 \
            || fail "$go could not get $wanted; what it said is above. Install Go 1.21 or newer, or set GO to the program."
        root=$("$go" env GOMODCACHE)/golang.org/toolchain@v0.0.1-$wanted.$("$go" env GOOS)-$("$go" env GOARCH)
        chmod -R u+x "$root/bin" "$root/pkg/tool" # modules hold no programs
        go=$root/bin/go
    fi
    echo "$go"
}

# Build a program ($4, of Go $3) into a folder ($2). Sources, and what is built of them, are gone when it is there.
go_install() {
    local what=$1 made=$2 version=$3 module=$4 go
    export GOPATH="$PWD/$made/go" GOCACHE="$PWD/$made/cache" GOBIN="$PWD/$made" GOFLAGS=-modcacherw CGO_ENABLED=0
    export GOTOOLCHAIN=auto # distributions say local
    unset GOROOT
    mkdir -p "$made"
    go=$(need_go "$version")
    say "building $what into $made (two minutes)"
    "$go" install -ldflags "-s -w" "$module" >&2 || fail "$module could not be built; what Go said is above. Install ${module##*/} on the PATH by hand."
    rm -rf "$GOPATH" "$GOCACHE"
}

# Where a program is: $4 (of Go $3), named by $5 or on the PATH, else built into a folder ($2).
need_built() {
    local what=$1 folder=$2 version=$3 module=$4 given=${5:-} name program
    name=${module%@*}; name=${name##*/}
    program=$(find_program ${given:+"$given"} "$name" "$PWD/$folder/$name")
    if [ -z "$program" ]; then
        go_install "$what" "$folder" "$version" "$module"
        program=$PWD/$folder/$name
    fi
    echo "$program"
}

# What the operators of Prometheus and Spark accept: the definitions lie in their Go modules.
get_crds() {
    local folder=$1 go module
    go=$(need_go go1.26.0)
    mkdir -p "$folder"
    export GOPATH="$PWD/$folder/go" GOFLAGS=-modcacherw
    for module in github.com/prometheus-operator/prometheus-operator@v0.85.0 github.com/kubeflow/spark-operator/v2@v2.5.2; do
        (cd "$folder" && "$go" mod download "$module") || fail "$go could not get $module; what it said is above."
    done
    find "$GOPATH" \( -path '*/example/prometheus-operator-crd/*' -o -path '*/config/crd/bases/*' \) \
        \( -name '*_servicemonitors.yaml' -o -name '*_podmonitors.yaml' -o -name '*_prometheusrules.yaml' -o -name '*_sparkapplications.yaml' \) -exec cp -f {} "$folder" \;
    rm -rf "$GOPATH"
}

find_azurite() {
    find_program azurite-blob "$PWD/.jars/azurite/node_modules/.bin/azurite-blob"
}

need_azurite() {
    local program
    program=$(find_azurite)
    if [ -z "$program" ]; then
        if ! command -v npm >/dev/null; then
            can_install || fail "npm is missing, which installs the tests' emulator of Azure. Install it (Debian, Ubuntu: apt install npm)."
            apt_install "npm" npm
        fi
        say "installing the emulator of Azure into .jars/azurite"
        npm install --silent --no-audit --no-fund --ignore-scripts --prefix .jars/azurite azurite@3.35.0 >&2 || fail "npm could not install azurite; what it said is above."
        program=$(find_azurite)
    fi
    echo "$program"
}

case "${1:-}" in
    venv) make_venv ;;
    spark) make_spark_venv "$2" "$3" ;;
    packages) make_other_venv "${@:2}" ;;
    java) need_java ;;
    jars) copy_jars "$2" "$3" ;;
    build) build_jar "$2" "$3" ;;
    postgres) need_postgres ;;
    mariadb) need_mariadb ;;
    prometheus) need_prometheus ;;
    alertmanager) need_alertmanager ;;
    podman) need_podman "$2" ;;
    s3) need_built "the S3 server of the tests" .jars/s3 go1.25.0 github.com/versity/versitygw/cmd/versitygw@v1.8.0 "${VERSITYGW:-}" ;;
    azurite) need_azurite ;;
    gcs) need_built "the emulator of Google's store" .jars/gcs go1.25.0 github.com/fsouza/fake-gcs-server@v1.56.1 ;;
    helm) need_built "Helm" .jars/helm go1.26.0 helm.sh/helm/v3/cmd/helm@v3.22.0 ;;
    registry) get_registry "$2" ;;
    crds) get_crds "$2" ;;
    *) fail "usage: deployments/setup.sh venv|spark DIR VERSION|packages DIR PACKAGE...|java|jars POM DIR|build PROJECT REPOSITORY|postgres|mariadb|prometheus|alertmanager|podman DIR|s3|azurite|gcs|helm|registry DIR|crds DIR" ;;
esac
