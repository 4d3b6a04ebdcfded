"""What README and the pages in `docs` say is what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

from stream_merge import MergeSink, MergeSinks
from stream_merge.jobs.kafka.formats import DebeziumFormat, FlattenedFormat, JsonFormat, KeySettings, PlainFormat
from stream_merge.jobs.kafka.settings import (
    KafkaSettings,
    Limits,
    MetricsSettings,
    QuerySettings,
    SchemaRegistrySettings,
    SecuritySettings,
)
from stream_merge.jobs.units import Model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
JOB_FILE = PAGES["docs/reference/job-file.md"]
SINK_SETTINGS, SINKS_SETTINGS = PAGES["docs/reference/sink.md"].split("\n## MergeSinks\n")
QUERY = {"name": "a", "topic": "a", "target": "a", "keys": "a", "checkpoint": "a"}


def test_the_readme_is_for_newcomers():
    """What it takes to find out whether to read on; all else is a page of its own."""
    assert len(README.encode()) <= 9_000


def test_every_argument_of_the_sink_is_in_the_settings_table():
    """A setting that nobody can find is no setting."""
    named = set(re.findall(r"`(\w+)`", SINK_SETTINGS))

    assert set(inspect.signature(MergeSink).parameters) - {"renamed"} <= named


def test_every_argument_of_the_sinks_is_explained():
    assert [name for name in inspect.signature(MergeSinks).parameters if name not in SINKS_SETTINGS] == []


@pytest.mark.parametrize(
    ("model", "required"),
    [(KafkaSettings, {"bootstrap": "a"}), (MetricsSettings, {}), (QuerySettings, QUERY), (Limits, {})],
)
def test_every_setting_of_a_job_file_is_listed_with_its_default(model: type[Model], required: dict[str, str]):
    """As it would be written in the file; a default that is no text, number or truth value is said in words."""
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", JOB_FILE, flags=re.M))
    shipped = model.model_validate(required)
    for name, field in model.model_fields.items():
        if field.is_required():
            assert (name, told[name]) == (name, "required")
        elif isinstance(field.default, str | int | float):
            written = model.model_validate({**required, name: yaml.safe_load(told[name].strip("`"))})
            assert (name, getattr(written, name)) == (name, getattr(shipped, name))
        else:
            assert name in told


def test_every_setting_of_a_format_is_listed():
    named = set(re.findall(r"`(\w+)`", JOB_FILE))
    formats = (
        KeySettings,
        DebeziumFormat,
        FlattenedFormat,
        JsonFormat,
        PlainFormat,
        SecuritySettings,
        SchemaRegistrySettings,
    )

    assert {name for model in formats for name in model.model_fields} - {"type", "holds"} <= named


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_every_make_target_that_a_page_names_exists(page: str):
    """The pages' commands are the project's commands."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.M))

    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / page).read_text(), flags=re.M)) <= targets
