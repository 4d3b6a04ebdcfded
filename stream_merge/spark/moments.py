"""SQL that asks for the time: the answer is put in its place, so that every look that a call takes has the same."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

_TOKEN = re.compile(
    r"""[rR](?:'[^']*' | "[^"]*") | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | `(?:[^`]|``)*`  # text and quoted names
    | --[^\n]* | /\*.*?\*/                                       # comments
    | (?P<before>\.\s*)?(?P<word>[A-Za-z_]\w*)(?P<call>\s*\(\s*\))?
    """,
    re.VERBOSE | re.DOTALL,
)
_DATES = ("current_date", "curdate")
_INSTANTS = ("current_timestamp", "now")
_CLOCKS = ("localtimestamp",)
_ONLY_CALLED = ("curdate", "now")
"""Names that mean the function with parentheses alone (Spark 4.2)."""


def fixed(session: SparkSession, written: str) -> str:
    """The same with `current_date`, `curdate`, `current_timestamp`, `now` and `localtimestamp` as literals.

    Args:
        session: whose time zone counts.
        written: SQL.

    Cost: none where no time is asked for; else one query without a job.
    """
    if not any(_asked(found) for found in _TOKEN.finditer(written)):
        return written
    ((day, micros, clock),) = session.sql(
        "SELECT CAST(current_date() AS STRING), unix_micros(current_timestamp()), CAST(localtimestamp() AS STRING)"
    ).collect()
    literals = {
        **dict.fromkeys(_DATES, f"DATE '{day}'"),
        **dict.fromkeys(_INSTANTS, f"timestamp_micros({micros})"),
        **dict.fromkeys(_CLOCKS, f"TIMESTAMP_NTZ '{clock}'"),
    }
    return _TOKEN.sub(lambda found: literals.get(_asked(found) or "", found.group()), written)


def _asked(found: re.Match[str]) -> str | None:
    """The function that a word is; None for a column, and for text, names in quotes and comments."""
    word = (found["word"] or "").lower()
    if found["before"] or word not in (*_DATES, *_INSTANTS, *_CLOCKS):
        return None
    return None if word in _ONLY_CALLED and not found["call"] else word
