"""Maintenance: its settings, and when it runs."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest

from stream_merge import ConfigError, Maintenance
from stream_merge.model.results import MAINTENANCE_OUTCOMES, MaintenanceRun
from stream_merge.model.settings import MergeSpec
from stream_merge.tables import maintenance
from stream_merge.tables.maintenance import MaintenancePlan, worse

SPEC = MergeSpec(target="shop.orders", keys=("id",), sequence_by=("lsn",))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"every": 0}, "[INVALID_SETTING] every=0 must be a whole number of calls, 1 or more"),
        ({"every": 1.5}, "[INVALID_SETTING] every=1.5 must be a whole number of calls"),
        ({"vacuum": 7}, "[INVALID_SETTING] vacuum=7 must be True or False"),
        ({"optimize": False}, "nothing is left to do; remove maintenance"),
        ({"zorder_by": ("id",)}, "[UNKNOWN_SETTING] zorder_by is not a setting; create the table with cluster_by"),
        ({"vacuum_after": 7}, "[UNKNOWN_SETTING] vacuum_after is not a setting; set vacuum"),
        ({"budget_seconds": 60}, "[UNKNOWN_SETTING] budget_seconds is not a setting; raise every"),
        ({"force": True}, "[UNKNOWN_SETTING] force is not a setting; shorten the table property"),
    ],
)
def test_wrong_settings_are_one_sentence(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Maintenance(**wrong)
    assert problem in str(raised.value)


def calls(monkeypatch: pytest.MonkeyPatch, wanted: Maintenance, *changed: bool) -> list[bool | None]:
    """For each call whether its run vacuumed; None where none was due."""

    def maintained(*_: Any, vacuum: bool, **__: Any) -> MaintenanceRun:
        return MaintenanceRun(outcome="done", vacuumed=vacuum)

    monkeypatch.setattr(maintenance, "_maintained", maintained)
    plan = MaintenancePlan(SPEC, wanted)
    runs = [plan.after_call(cast(Any, None), changed=one) for one in changed]
    return [None if run is None else run.vacuumed for run in runs]


def test_it_runs_after_so_many_calls_that_changed_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Maintenance(every=3)
    assert calls(monkeypatch, wanted, *[True] * 7) == [None, None, False, None, None, False, None]
    assert calls(monkeypatch, wanted, True, False, True, False, True) == [None, None, None, None, False]


def test_it_vacuums_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, Maintenance(every=1, vacuum=True), True, True) == [True, False]


def test_the_worst_outcome_of_several_parts_is_reported() -> None:
    for one, other in product(MAINTENANCE_OUTCOMES, repeat=2):
        total = worse([MaintenanceRun(outcome=one, removed_files=1), MaintenanceRun(outcome=other, removed_files=2)])
        assert total.outcome in (one, other)
        assert total.removed_files == 3
    assert worse([MaintenanceRun(outcome="done"), MaintenanceRun(outcome="failed", detail="full")]).outcome == "failed"
