"""The engines of each test: as shipped, and where a test or its file is marked with `engines`, those in turn."""

from __future__ import annotations

from collections.abc import Iterator

import engines
import pytest

PARAMETER = "judged_by"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("engines")
    if marker is not None:
        metafunc.parametrize(PARAMETER, marker.args, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--engines shipped` each test runs once."""
    if config.option.engines == "all":
        return

    def is_shipped(item: pytest.Item) -> bool:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return params.get(PARAMETER, engines.AS_SHIPPED) == engines.AS_SHIPPED

    config.hook.pytest_deselected(items=[item for item in items if not is_shipped(item)])
    items[:] = filter(is_shipped, items)


@pytest.fixture(autouse=True)
def judged_by(request: pytest.FixtureRequest, seed: int) -> Iterator[str]:
    """How the sinks of the test choose their engine."""
    how = getattr(request, "param", engines.AS_SHIPPED)
    with engines.judged(how, f"{seed} {request.node.nodeid}"):
        yield how
