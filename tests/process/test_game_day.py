"""The quick ones of the faults of a game day; `make game-day` has all."""

from __future__ import annotations

from pathlib import Path

import game_day
import pytest
import services
from services import prometheus


@pytest.mark.timeout(1_500)
def test_alerts_name_what_is_wrong_with_a_running_job(tmp_path: Path) -> None:
    services.need()
    prometheus.need_alertmanager()
    quick = tuple(fault for fault in game_day.FAULTS if fault.is_quick)

    outcomes = game_day.play(tmp_path, quick)

    assert all(outcome.is_well for outcome in outcomes), game_day.table(outcomes)
