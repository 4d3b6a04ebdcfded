"""No test of this folder gets a Spark session, or a JVM."""

from __future__ import annotations

from typing import NoReturn

import pyspark.java_gateway
import pytest


def refused(*_: object, **__: object) -> NoReturn:
    pytest.fail("a test in tests/unit asks for Spark; it belongs to tests/contract")


@pytest.fixture(scope="session")
def spark() -> NoReturn:
    """Takes the place of the session for this folder, also where another fixture asks for it."""
    refused()


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in this process nor in one that a test starts."""
    monkeypatch.setattr(pyspark.java_gateway, "launch_gateway", refused)
    monkeypatch.setattr("pyspark.core.context.launch_gateway", refused)
    monkeypatch.setenv("JAVA_HOME", "/no/java/for/tests/in/unit")
