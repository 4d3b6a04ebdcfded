"""A sentence of the sink names what its reader has written: options of `files`, or settings of a job file."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.jobs.kafka.settings import MaintenanceSettings, QuerySettings
from stream_merge.jobs.spelling import _OPTIONS, _SETTINGS, as_options, as_settings


@pytest.mark.parametrize(
    ("text", "options", "settings"),
    [
        (
            "[MISSING_SETTING] keys is empty; name one",
            "[MISSING_SETTING] --keys is empty; name one",
            "[MISSING_SETTING] queries.a.keys is empty; name one",
        ),
        (
            "set schema_evolution=True to add them, or schema_evolution='widen'",
            "set --schema-evolution to add them, or --schema-evolution 'widen'",
            "set 'queries.a.schema_evolution: true' to add them, or 'queries.a.schema_evolution: widen'",
        ),
        (
            "leave them out with except_column_list, or set change_data_feed=False",
            "leave them out with --except-columns, or set change_data_feed=False (in Python)",
            "leave them out with except_column_list, or set change_data_feed=False (in Python)",
        ),
        (
            "target_filter is given; for a part give shape=Snapshot(within=…)",
            "--target-filter is given; for a part give --shape snapshot --within …",
            "queries.a.target_filter is given; for a part give 'queries.a.shape: snapshot' within=… (in Python)",
        ),
        (
            "delete_missing=False is given, and shape=Clauses(…) says what is deleted",
            "--no-delete-missing is given, and --clauses says what is deleted",
            "delete_missing=False (in Python) is given, and 'queries.a.shape: clauses' says what is deleted",
        ),
        (
            "target 'x' is merged by keys ['a'], now keys=['b']",
            "target 'x' is merged by keys ['a'], now --keys ['b']",
            "target 'x' is merged by keys ['a'], now queries.a.keys: ['b']",
        ),
        *(
            (said, said, said)
            for said in (
                "the table's column 'keys=1' and the feed's `sequence_by` differ, t.name='x'",
                "missing rows stay; target 'x' has no keys",
            )
        ),
    ],
)
def test_arguments_are_named_as_their_reader_has_written_them(text: str, options: str, settings: str) -> None:
    assert (as_options(text), as_settings("a", text)) == (options, settings)


def test_every_name_is_one_that_command_or_job_file_has() -> None:
    shown = CliRunner().invoke(cli.app, ["files", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    fields = {*QuerySettings.model_fields, *(f"maintenance.{name}" for name in MaintenanceSettings.model_fields)}

    assert set(_OPTIONS.values()) <= set(re.findall(r"--[\w-]+", shown))
    assert set(_SETTINGS.values()) <= fields
