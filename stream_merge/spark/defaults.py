"""Which confs hold where a session names none: those of `spark-defaults.conf`, read as Spark reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pyspark

JARS = "spark.jars"
PACKAGES = "spark.jars.packages"
EXCLUDES = "spark.jars.excludes"
REPOSITORIES = "spark.jars.repositories"

_BLANKS = " \t\f"
_ENTRY = re.compile(r"((?:\\.|[^\\ \t\f=:])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def in_effect(conf: str, confs: Mapping[str, str]) -> str:
    """A conf's value in a session with these confs, which win over the file; empty where nobody names it."""
    return confs[conf] if conf in confs else spark_defaults().get(conf, "")


def listed(conf: str, confs: Mapping[str, str]) -> list[str]:
    """The entries of a conf that is a list with commas, in a session with these confs."""
    return [entry.strip() for entry in in_effect(conf, confs).split(",") if entry.strip()]


def spark_home() -> Path:
    """The Spark that a local session starts."""
    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)


def spark_defaults() -> dict[str, str]:
    """What the JVM's launcher reads in `spark-defaults.conf`; empty where there is none."""
    file = Path(os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf", "spark-defaults.conf")
    return properties(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}


def properties(text: str) -> dict[str, str]:
    """The entries of a properties file by the rules of `java.util.Properties.load`; Spark 4.2 trims the values."""
    found = {}
    lines = iter(re.split(r"\r\n|\r|\n", text))
    for first in lines:
        line = first.lstrip(_BLANKS)
        if not line or line[0] in "#!":
            continue
        while _goes_on(line):
            line = line[:-1] + next(lines, "").lstrip(_BLANKS)
        key, value = _ENTRY.fullmatch(line).groups()  # type: ignore[union-attr]  # matches every line
        found[_plain(key)] = _plain(value).strip()
    return found


def _goes_on(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _plain(escaped: str) -> str:
    return _ESCAPED.sub(
        lambda found: chr(int(found[1], 16)) if found[1] else _CONTROLS.get(found[2], found[2]), escaped
    )
