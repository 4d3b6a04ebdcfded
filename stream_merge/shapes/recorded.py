"""What is recorded with a table of how it is filled: its shape, in the definition of its sequence."""

from __future__ import annotations

import json

from stream_merge.model.settings import MergeSpec

_UNNAMED = "insert-only"
"""The shape of tables without a sequence that record none."""


def without_sequence(spec: MergeSpec) -> str:
    """What is recorded with a table whose rows have no sequence: the shape; without a name it is insert-only."""
    is_named = spec.shape is not None and spec.shape.name != _UNNAMED
    return json.dumps({"columns": [], **({"shape": spec.shape.name} if spec.shape and is_named else {})})


def filled_as(recorded: str) -> str:
    """The shape of a table by the definition that is recorded with it."""
    found = json.loads(recorded)
    return str(found.get("shape", _UNNAMED if found == {"columns": []} else "changes"))
