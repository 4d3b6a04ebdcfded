"""Error codes: every message has one, and the troubleshooting page has a section for each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_merge import errors
from stream_merge.errors import ConfigError, StreamMergeError

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\[([A-Z][A-Z0-9_]{2,})\] ")
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
LONGEST = 30
"""Words of a message, what is filled in not counted."""


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "stream_merge").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _text(node: ast.AST) -> str | None:
    """The text of a literal, `…` for what an f-string fills in; None of anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
    return None


def _messages() -> Iterator[tuple[str, str]]:
    """(where, message) of every literal that begins with a code."""
    for path, module in _modules():
        inner = {id(part) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(module):
            text = _text(node)
            if text is not None and id(node) not in inner and CODE.match(text):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", text


def test_the_troubleshooting_page_has_a_section_for_each_code_and_for_no_other() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    sections = re.findall(r"^### ([A-Z][A-Z0-9_]+)$", page, re.MULTILINE)

    assert len(sections) == len(set(sections))
    assert sorted(sections) == sorted({code[1] for _, message in _messages() if (code := CODE.match(message))})


def _raised(function: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, message) of the literals that a function gives to an error, itself or by a variable."""
    given = [
        node.args[0]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args
    ]
    names = {argument.id for argument in given if isinstance(argument, ast.Name)}
    given += [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
    ]
    for argument in given:
        text = _text(argument)
        if text is not None:
            yield argument.lineno, text


def test_a_literal_that_is_raised_begins_with_a_code() -> None:
    without = {
        f"{path.relative_to(ROOT)}:{line}: {message}"
        for path, module in _modules()
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef)
        for line, message in _raised(function)
        if not CODE.match(message)
    }

    assert sorted(without) == []


def test_a_message_is_short() -> None:
    long = [
        f"{where}: {len(message.split()) - 1}" for where, message in _messages() if len(message.split()) - 1 > LONGEST
    ]

    assert long == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("[KEYS_MISSING] name the key columns"), "KEYS_MISSING"),
        (ConfigError(["[KEYS_MISSING] name the key columns", "[INVALID_SETTING] …"]), "KEYS_MISSING"),
        (StreamMergeError("[not a code] text"), None),
    ],
)
def test_an_error_knows_its_code(error: StreamMergeError, code: str | None) -> None:
    assert error.code == code
