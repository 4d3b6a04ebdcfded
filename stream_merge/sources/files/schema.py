"""The schema of a source's files: given, or inferred once and recorded in the checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from stream_merge.errors import ConfigError, located
from stream_merge.model import names
from stream_merge.spark import environment
from stream_merge.spark.versions import from_ddl

_RECORD = "stream_merge_schema"
"""Folder of the schema in the checkpoint; Spark's own are offsets, commits, sources, metadata."""
NEW_FIELD_REMEDY = (
    "pass --schema: with them to store them (add --schema-evolution if the table lacks them), without them to ignore"
    " them"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """Names and types of the fields of a source."""

    fields: StructType
    is_inferred: bool
    """Whether they were inferred, so that a field outside them is an error instead of left out."""
    keeps_spelling: bool = False
    """Whether numbers that would be stored in another spelling, such as 007, are refused, as their type was inferred;
    False in checkpoints of older versions, which have merged them."""

    def __str__(self) -> str:
        """Spark DDL, as `--schema` takes it."""
        columns = ((f.name if re.fullmatch(r"\w+", f.name) else names.quote(f.name), f) for f in self.fields.fields)
        return ", ".join(f"{name} {f.dataType.simpleString()}" for name, f in columns)

    def to_json(self) -> str:
        """Text in the checkpoint."""
        return json.dumps(
            {"fields": self.fields.jsonValue(), "inferred": self.is_inferred, "keeps_spelling": self.keeps_spelling}
        )

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema of a checkpoint's text."""
        record = json.loads(text)
        return cls(
            fields=StructType.fromJson(record["fields"]),
            is_inferred=record["inferred"],
            keeps_spelling=record.get("keeps_spelling", False),
        )


def parse(ddl: str, *, setting: str = "--schema") -> Schema:
    """The schema of Spark DDL, which PySpark needs a running session for; `setting` names it in errors."""
    try:
        fields = from_ddl(ddl)
    except ParseException as err:
        reason = message(err)
        msg = f"[INVALID_SETTING] {setting} {ddl!r} is not a list of columns like 'id BIGINT, name STRING': {reason}"
        raise ConfigError(msg) from err
    if not isinstance(fields, StructType) or not fields.fields:
        msg = f"[INVALID_SETTING] {setting} {ddl!r} has no columns; write it like 'id BIGINT, name STRING'"
        raise ConfigError(msg)
    if re.search(r"char\(", fields.simpleString()):
        msg = f"[INVALID_SETTING] {setting} {ddl!r} has CHAR or VARCHAR, which Spark cannot read from files; use STRING"
        raise ConfigError(msg)
    return Schema(fields=fields, is_inferred=False)


def recorded(session: SparkSession, checkpoint: str) -> Schema | None:
    """The schema recorded in a checkpoint, or None."""
    try:
        lines = session.read.text(f"{checkpoint}/{_RECORD}").collect()
    except AnalysisException:
        return None
    return Schema.from_json(lines[0][0]) if lines else None


def record(session: SparkSession, checkpoint: str, schema: Schema) -> None:
    """Record the schema in the checkpoint, so that a restart reads the same types."""
    line = session.createDataFrame([(schema.to_json(),)], "value STRING")
    try:
        line.coalesce(1).write.mode("overwrite").text(f"{checkpoint}/{_RECORD}")
    except (PySparkException, Py4JJavaError) as err:
        msg = (
            f"[NOT_WRITABLE] checkpoint {checkpoint!r} cannot be written: {message(err)}; use a folder that is writable"
        )
        raise ConfigError(outside_problem(err, f"checkpoint {checkpoint!r}") or msg) from err


def outside_problem(err: BaseException, where: str) -> str | None:
    """The message for a problem of the machine or the object store; None for others."""
    problem = environment.said(err)
    return None if problem is None else located(where, problem)


def message(err: BaseException) -> str:
    """Spark's message without the place in its code."""
    first, _, rest = str(err).strip().partition("\n")
    java = re.match(r": [\w.$]+: (.*)", rest)  # Py4J: the first line names its own object
    return java[1] if java is not None else first
