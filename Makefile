# Every target does its own set-up: `make demo` on a fresh machine needs nothing but Python 3.11 and Java 17.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo jars shop unit test test-change test-all soak game-day smoke smoke-change smoke-all next FORCE check lint format types imports collect docs bench bench-versions bench-kafka dashboard alerts reference \
	result pictures log-store lock clean
.SECONDARY: # what a pattern makes for another one is kept

INSTALLED := .venv/.installed
# Found once per command; a JDK is installed through apt when none is there and the user is root.
WITH_JAVA := home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" PATH="$(CURDIR)/.venv/bin:$$home/bin:$$PATH"

# A file stays in one process: its tests share what they have built. Two processes leave 2 cores idle for 40 % of the time:
# a test waits for answers of its JVM and of the disk.
PYTEST := .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# What `make soak` takes: so many histories of each kind, shape and engine, of so many events, and so many merges that race.
HISTORIES := 20
EVENTS := 180
RACES := 500

# What comes by turns with each change (tests/turns.py): a number from the commit's hash.
TURN = $(shell echo $$((0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0))))

# Another version of Spark for `make smoke`, all others for `make smoke-all`, and for `make soak` with all tests on Spark and Kafka. Of the
# tests `make smoke` takes those that are marked so, a few of each thing that a version may do otherwise.
SPARK := 4.1
OTHERS := 3.5 4.0 4.1
SMOKE := -m smoke tests/contract
WIDER := tests/contract tests/kafka
ON_S3 := $(addsuffix .py,contract_rows contract_order contract_names contract_quarantine contract_tombstones idempotency insert_only \
	own_clauses delta_merge_cases snapshot no_change)
NEXT := pyspark delta-spark

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## virtual environment, locked packages, JDK
	@deployments/setup.sh java >/dev/null
	@echo "ready: 'make demo' shows a merge, 'make shop ARGS=shop' starts a database to try a job on, '.venv/bin/stream-merge --help' lists the commands"

demo: $(INSTALLED)  ## merge a generated change stream and watch it; ARGS="--conflict" and others
	@$(WITH_JAVA) .venv/bin/stream-merge demo $(ARGS)

jars: .jars/spark/.copied  ## jars of Delta, of Spark's Kafka connector and of its file systems for S3 and Azure, for a cluster and for machines without network

shop: $(INSTALLED) .jars/spark/.copied .jars/services/.copied .jars/prometheus/.found  ## PostgreSQL, Kafka, Debezium, Prometheus and Alertmanager to try a job on; ARGS=folder, ARGS=--mariadb with MariaDB
	@$(WITH_JAVA) .venv/bin/python tests/shop.py $(ARGS)

unit: $(INSTALLED)  ## the tests that need neither Spark nor Java; ARGS="-k name" selects
	@$(PYTEST) tests/unit $(ARGS)

test: $(INSTALLED) .jars/classes.jsa  ## unit, and the core of what a sink does on Spark, in three processes; ARGS="-k name" selects, ARGS="-n 0" takes one
	@$(WITH_JAVA) $(PYTEST) tests/unit tests/contract --engines shipped --core $(ARGS)

SERVERS := .jars/classes.jsa .jars/spark/.copied .jars/services/.copied .jars/prometheus/.found .jars/podman/.found .jars/s3/.found .jars/azurite/.found .jars/helm/.found .jars/registry/.found

test-change: $(INSTALLED) $(SERVERS)  ## what a change waits for: unit and smoke tests, and a quarter of all others by turns (TURN=1); and which lines and branches they reach
	@$(WITH_JAVA) $(PYTEST) --engines each --turn $(TURN) --cov --cov-report=term $(ARGS)

test-all: $(INSTALLED) $(SERVERS)  ## all tests, on every engine, with Kafka, processes and a cluster
	@$(WITH_JAVA) $(PYTEST) --engines each $(ARGS)

soak: $(INSTALLED) $(SERVERS) .jars/gcs/.found  ## what a change need not wait for: more and longer random histories (HISTORIES=20 EVENTS=180), contract tests with engines in turn, RACES=500 merges at once, ten kills, contract tests on S3 and on Google's store, and all of these and of Kafka's on other versions of Spark, and a look at the next one
	@$(WITH_JAVA) STREAM_MERGE_HISTORIES=$(HISTORIES) STREAM_MERGE_EVENTS=$(EVENTS) $(PYTEST) --dist load tests/contract/test_differential.py $(ARGS)
	@$(WITH_JAVA) $(PYTEST) tests/contract -k random $(ARGS)
	@$(WITH_JAVA) STREAM_MERGE_RACES=$(RACES) $(PYTEST) -n 0 tests/contract/test_races.py tests/process/test_s3_races.py $(ARGS)
	@$(WITH_JAVA) $(PYTEST) tests/contract/test_gcs.py $(ARGS)
	@$(WITH_JAVA) $(PYTEST) --place s3 --engines each $(addprefix tests/contract/test_,$(ON_S3)) $(ARGS)
	@$(WITH_JAVA) STREAM_MERGE_KILLS=10 $(PYTEST) -n 0 tests/process/test_debezium_process.py tests/process/test_mariadb.py $(ARGS)
	@$(MAKE) --no-print-directory game-day ARGS=
	@for spark in $(OTHERS); do \
		$(MAKE) --no-print-directory .jars/spark-$$spark/.copied || echo "without the connector of $$spark its tests of Kafka are skipped"; \
		$(MAKE) --no-print-directory smoke SPARK=$$spark SMOKE="-n 3 --dist loadfile $(WIDER)" || exit; \
	done
	-@$(MAKE) --no-print-directory next

game-day: $(INSTALLED) $(SERVERS)  ## ten faults in a job, and how long it takes until an alert names each (25 minutes, as root); ARGS="'disk full'" chooses
	@folder=$$(mktemp -d) && $(WITH_JAVA) PYTHONPATH=tests:grafana .venv/bin/python tests/game_day.py $$folder $(ARGS)

smoke: smoke-$(SPARK)  ## a few tests of each thing that versions of Spark may do otherwise, on another one than the locked; SPARK=4.1, 4.0 or 3.5

smoke-change: $(INSTALLED)  ## the same on each of these, one after the other, as each change waits for it
	@for spark in $(OTHERS); do $(MAKE) --no-print-directory smoke-$$spark || exit; done

smoke-all: $(INSTALLED)  ## the same on all of these, side by side
	@deployments/setup.sh java >/dev/null
	@$(MAKE) --no-print-directory -j 3 -O $(addprefix smoke-,$(OTHERS))

smoke-%: .venv-%/.installed
	@home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" PATH="$(CURDIR)/.venv-$*/bin:$$home/bin:$$PATH" STREAM_MERGE_JARS=$(CURDIR)/.jars/spark-$* \
		.venv-$*/bin/python -m pytest -n 0 --engines shipped $(SMOKE) $(ARGS)

# Where it fails is the answer, not a failure.
next: .venv-next/.installed  ## what would break on the newest Spark and Delta that PyPI has; NEXT="pyspark==4.2.1 delta-spark==4.4.1" takes others
	@home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" PATH="$(CURDIR)/.venv-next/bin:$$home/bin:$$PATH" STREAM_MERGE_JARS=.venv-next/no-jars \
		.venv-next/bin/python -m pytest -n 0 --engines shipped --newer-spark $(SMOKE) $(ARGS) || true

check: lint format types imports collect docs  ## lint, format, types, import contract, whether all tests can be imported, documentation

lint: $(INSTALLED)
	.venv/bin/ruff check .

format: $(INSTALLED)
	.venv/bin/ruff format --check .

types: $(INSTALLED)
	.venv/bin/mypy

imports: $(INSTALLED)
	.venv/bin/lint-imports

# Seconds, against a test module that only a whole run imports.
collect: $(INSTALLED)
	.venv/bin/python -m pytest --collect-only -q -q tests

docs: $(INSTALLED)  ## the documentation as a site, in .docs; links that lead nowhere are errors
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

bench: $(INSTALLED)  ## what the sink costs beside a bare MERGE
	@$(WITH_JAVA) PYTHONPATH=tests .venv/bin/python tests/bench/run.py $(ARGS)

bench-versions: $(INSTALLED)  ## what a change costs: the sink of several commits side by side; ARGS="before after"
	@$(WITH_JAVA) .venv/bin/python tests/bench/versions.py $(ARGS)

bench-kafka: $(INSTALLED) .jars/spark/.copied .jars/services/.copied  ## what a job brings from Kafka to Delta, beside a hand-written one
	@$(WITH_JAVA) PYTHONPATH=tests .venv/bin/python tests/bench/kafka_job.py $(ARGS)

dashboard: $(INSTALLED)  ## write the Grafana dashboards again
	.venv/bin/python grafana/generate.py

alerts: $(INSTALLED)  ## write the rule file of Prometheus and the table of its alerts again
	.venv/bin/python grafana/alerts.py
	.venv/bin/python docs/generate.py alerts

reference: $(INSTALLED)  ## write the lists of metrics, alerts and commands in docs/reference again from the code
	.venv/bin/python docs/generate.py

result: $(INSTALLED)  ## draw the picture in README again, from a run of the demo
	@$(WITH_JAVA) .venv/bin/python docs/result.py

pictures: $(INSTALLED) $(SERVERS)  ## draw the dashboards in the documentation again, from a job's metrics
	@mkdir -p .docs
	@$(WITH_JAVA) STREAM_MERGE_ANSWERS=$(CURDIR)/.docs/answers.json $(PYTEST) -n 0 tests/process/test_prometheus.py
	.venv/bin/python docs/dashboard_pictures.py .docs/answers.json

log-store: $(INSTALLED)  ## build the log store for S3 from its sources, into the package
	@home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" deployments/setup.sh build deployments/log-store stream_merge/spark/maven

lock:  ## write requirements.lock again from pyproject.toml (needs uv); a release of this week is left alone
	uv pip compile --quiet --upgrade --no-strip-extras --exclude-newer "1 week" --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
		--extra cli --extra lineage --extra otel --extra dev --output-file requirements.lock pyproject.toml

clean:  ## remove everything that make and the tools made
	rm -rf .venv .venv-* .jars .docs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.jars/spark/.copied: $(INSTALLED) $(wildcard stream_merge/spark/maven/local/stream-merge/*/*/*.jar)
	@$(WITH_JAVA) .venv/bin/stream-merge jars --s3 --azure $(@D)
	@touch $@

.jars/spark-%/.copied: .venv-%/.installed
	@home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" PATH="$(CURDIR)/.venv-$*/bin:$$home/bin:$$PATH" \
		.venv-$*/bin/python -m stream_merge.cli jars $(@D)
	@touch $@

.jars/services/.copied: tests/services/pom.xml
	@home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" deployments/setup.sh jars $< $(@D)
	@deployments/setup.sh postgres >/dev/null
	@deployments/setup.sh mariadb >/dev/null
	@touch $@

# With it the JVMs that tests start are ready in half the time.
.jars/classes.jsa: $(INSTALLED) tests/class_archive.py
	@$(WITH_JAVA) .venv/bin/python tests/class_archive.py $@

.jars/prometheus/.found:
	@deployments/setup.sh prometheus >/dev/null
	@deployments/setup.sh alertmanager >/dev/null || echo "stream_merge: without Alertmanager's templates its tests are skipped"
	@mkdir -p $(@D)
	@touch $@

.jars/podman/.found:
	@{ deployments/setup.sh podman $(@D) && touch $@; } || echo "stream_merge: without podman the tests of the image are skipped"

.jars/s3/.found:
	@deployments/setup.sh s3 >/dev/null
	@mkdir -p $(@D)
	@touch $@

.jars/azurite/.found:
	@deployments/setup.sh azurite >/dev/null
	@mkdir -p $(@D)
	@touch $@

.jars/helm/.found:
	@mkdir -p $(@D)
	@{ deployments/setup.sh helm >/dev/null && deployments/setup.sh crds .jars/crds && touch $@; } \
		|| echo "stream_merge: without Helm the tests of the chart are skipped"

.jars/registry/.found:
	@{ home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" deployments/setup.sh registry $(@D) && touch $@; } \
		|| echo "stream_merge: without a schema registry the tests of Avro are skipped"

.jars/gcs/.found: tests/services/gcs.xml
	@deployments/setup.sh gcs >/dev/null
	@home=$$(deployments/setup.sh java) && JAVA_HOME="$$home" deployments/setup.sh jars $< $(@D)
	@touch $@

.venv-next/.installed: FORCE $(INSTALLED)
	@deployments/setup.sh packages $(@D) $(NEXT)
	@touch $@

.venv-%/.installed: $(INSTALLED)
	@deployments/setup.sh spark $(@D) $*
	@touch $@

$(INSTALLED): requirements.lock pyproject.toml deployments/setup.sh
	@deployments/setup.sh venv
	@touch $@
