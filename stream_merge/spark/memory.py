"""The default heap of Spark in a container, and the memory left for merges in the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stream_merge.spark.confs import in_effect

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""cgroup v2 and v1: folder, files of limit and usage, and the file cache's name in `memory.stat`."""
SHARE_OF_FREE_MEMORY = 0.4
"""Share of the free memory for all merges in the driver and their compaction."""
HEAP = "spark.driver.memory"

_MIB, _GIB = 1 << 20, 1 << 30
_WITHOUT_LIMIT = 2 * _GIB
_SMALLEST_HEAP = 512 * _MIB
"""Spark 4.2 refuses to start with less than 450 MiB (UnifiedMemoryManager)."""
_BESIDE = _GIB
"""For Python, and for the JVM beside its heap (classes, compiled code, threads, buffers)."""


def container_limit() -> int | None:
    """Memory limit of this process's container (cgroup v2 and v1) in bytes; None if not below the machine's."""
    limits = []
    for folder, limit, *_ in groups():
        try:
            limits.append(int((folder / limit).read_text("ascii")))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    least = min(limits, default=None)
    return least if least is not None and least < _machine() else None


def groups() -> Iterator[tuple[Path, str, str, str]]:
    """Folders of control groups that may limit this process, with the names of their files.

    A container has its own as the root; a service of systemd is named in /proc/self/cgroup.
    """
    for folder, *names in _GROUPS:
        yield (CGROUPS / folder, *names)  # type: ignore[misc]  # three of them
    try:
        own = OWN_GROUP.read_text("ascii").rpartition("0::/")[2].partition("\n")[0]
    except OSError:
        return
    if own:
        yield (CGROUPS / own, *_GROUPS[0][1:])


def heap(confs: Mapping[str, str]) -> str:
    """The driver's heap from confs, `spark-defaults.conf` or the environment, else `default_heap`."""
    return _configured(confs) or f"{default_heap() // _MIB}m"


def _configured(confs: Mapping[str, str]) -> str | None:
    return in_effect(HEAP, confs) or os.environ.get("SPARK_DRIVER_MEMORY")


def default_heap() -> int:
    """Half of the container's limit less 1 GiB, at least 512 MiB; 2 GiB without a limit. The rest is for the driver."""
    limit = container_limit()
    return _WITHOUT_LIMIT if limit is None else max(_SMALLEST_HEAP, (limit - _BESIDE) // 2)


def shares() -> str:
    """How the memory is divided, in one line."""
    limit = container_limit()
    total = f"{'machine' if limit is None else 'limit'} {_shown(limit or _machine())}"
    named = _configured({})
    if named:
        return f"{total}: {named} for Spark's heap, as it is set, the rest for Python and merges in the driver"
    free = max(0, (limit or _machine()) - default_heap() - _BESIDE)
    return (
        f"{total}: {_shown(default_heap())} for Spark's heap ({HEAP}), {_shown(_BESIDE)} for Python and the JVM itself,"
        f" {_shown(free)} for Arrow, DuckDB and delta-rs, of which merges take {SHARE_OF_FREE_MEMORY:.0%}"
    )


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shown(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
