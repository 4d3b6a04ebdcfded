"""Databases that Debezium reads."""

from stream_merge.sources.databases.mysql import MARIADB, MYSQL
from stream_merge.sources.databases.oracle import ORACLE
from stream_merge.sources.databases.postgresql import POSTGRESQL

DATABASES = (POSTGRESQL, MARIADB, MYSQL, ORACLE)
"""All of them; the first is the default of `database` in a job file."""
