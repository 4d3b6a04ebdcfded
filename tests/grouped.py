"""A sink by flat settings, as tests merge them from several places; `MergeSink` has them in groups."""

from __future__ import annotations

from typing import Any

from stream_merge import Create, Driver, MergeSink, Tombstones

_GROUPS: dict[str, tuple[str, str]] = {
    "partition_by": ("create", "partition_by"),
    "cluster_by": ("create", "cluster_by"),
    "table_properties": ("create", "properties"),
    "tombstone_retention_seconds": ("tombstones", "retention_seconds"),
    "single_writer": ("driver", "single_writer"),
    "storage_options": ("driver", "storage_options"),
    "driver_memory_bytes": ("driver", "memory_bytes"),
}
_CLASSES: dict[str, Any] = {"create": Create, "tombstones": Tombstones, "driver": Driver}


def sink_with(**flat: Any) -> MergeSink:
    """The sink with these settings."""
    groups: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    for name, value in flat.items():
        group, field = _GROUPS.get(name, (name, ""))
        if field:
            groups.setdefault(group, {})[field] = value
        else:
            settings[name] = value
    return MergeSink(**{**{group: _CLASSES[group](**fields) for group, fields in groups.items()}, **settings})
