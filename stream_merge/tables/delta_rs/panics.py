"""A panic of delta-rs as an error like any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class NativePanicError(RuntimeError):
    """delta-rs broke off in the middle of something; its own exception would pass `except Exception`."""


def no_panics(method: Callable[P, R]) -> Callable[P, R]:
    """Turn a panic of Rust code (a bare `BaseException` of pyo3) into an ordinary error."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as err:
            if type(err).__name__ == "PanicException":
                raise NativePanicError(str(err)) from err
            raise

    return guarded
