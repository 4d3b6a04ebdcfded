"""Tables that the driver may write, by table feature (all of Delta 4.4) and table property.

The Delta protocol forbids writing a table with an unknown feature, so features that are not listed here are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from stream_merge.model.results import Mode
from stream_merge.model.snapshot import VECTORS_PROPERTY, is_on

CONSTRAINT = "delta.constraints."
"""Prefix, in lower case, of the table properties that hold CHECK constraints in SQL."""

DELETION_VECTORS = "deletionVectors"

SUPPORTED: Mapping[str, str] = {
    DELETION_VECTORS: "rows are removed by them",
    # A table upgraded from an older protocol lists all legacy features, used or not.
    "appendOnly": "the property is checked",
    "invariants": "the columns are checked",
    "checkConstraints": "the properties are checked",
    "generatedColumns": "the columns are checked",
    "identityColumns": "the columns are checked",
    "allowColumnDefaults": "the columns are checked",
    "changeDataFeed": "each commit adds change files",
    "columnMapping": "files have physical names and field ids",
    "timestampNtz": "a type like others",
    "typeWidening": "old files are read in the table's types; only new files are written",
    "typeWidening-preview": "as typeWidening",
    "v2Checkpoint": "a form of checkpoints, not of commits",
    "clustering": "new files are unclustered, with statistics; others keep their `clusteringProvider`",
    "domainMetadata": "a merge changes no domain",
    "inCommitTimestamp": "each commit records its time",
    "vacuumProtocolCheck": "concerns VACUUM only",
}
"""Features of Delta 4.4 of tables that the driver writes, and why it may."""
UNPROVEN: Mapping[str, str] = {
    "rowTracking": "updated rows would lose their ids",
    "icebergCompatV1": "Iceberg readers know no vectors of Delta",
    "icebergCompatV2": "Iceberg readers know no vectors of Delta",
    "icebergCompatV3": "its vectors are bound to Iceberg's rules and to row tracking",
    "catalogManaged": "its catalog commits, not a file in the log",
    "coordinatedCommits-preview": "its coordinator commits, not a file in the log",
    "adaptiveMetadata-preview": "its catalog commits, and its log is of another form",
    "variantType": "variants are not proven",
    "variantType-preview": "variants are not proven",
    "variantShredding": "variants are not proven",
    "variantShredding-preview": "variants are not proven",
    "geospatial": "geometries are not proven",
    "geospatial-dev": "geometries are not proven",
    "materializePartitionColumns": "data files must hold the partition columns, which is not proven",
    "checkpointProtection": "cleaning the log has rules that are not proven",
    "redirectReaderWriter-preview": "the data is elsewhere",
    "redirectWriterOnly-preview": "the data is elsewhere",
}
"""All others, and why not; tests/contract/test_table_features.py compares both with Delta's own list."""

_NAMED_FEATURES = 3, 7
"""Reader and writer version with named features; older ones have no deletion vectors, newer ones are unknown."""

_ON_ELSE_REFUSED: Mapping[str, str] = {
    "delta.appendonly": "forbids to delete or update rows",
    "delta.enablerowtracking": "demands ids of rows that the driver does not keep",
    "delta.randomizefileprefixes": "demands paths that the driver does not give",
    "delta.enablematerializepartitioncolumnsfeature": "demands partition columns in data files",
}
"""Properties that default to false, in lower case: Delta ignores their case."""
_EXPECTED: Mapping[str, tuple[str, str]] = {
    "delta.checkpoint.writestatsasjson": ("true", "takes from checkpoints the statistics that commits must repeat"),
    "delta.parquet.compression.codec": ("snappy", "demands files of another compression"),
    "delta.parquet.format.version": ("1.0.0", "demands files of another format"),
    "delta.compatibility.symlinkformatmanifest.enabled": ("false", "demands manifests, made by Spark alone"),
    "delta.universalformat.enabledformats": ("", "demands that readers of other formats see each commit"),
}
"""Properties of which only one value is supported -> that value, and what another one means."""
_ICEBERG = "delta.enableiceberg"
_COORDINATED = "delta.coordinatedcommits."
_OFF = "false"


def refusal(
    reader_version: int, writer_version: int, features: Collection[str], properties: Mapping[str, str]
) -> str | None:
    """Why the driver may not write a table, by protocol and properties: all reasons of one kind; None where it may."""
    versions = reader_version, writer_version
    if reader_version > _NAMED_FEATURES[0] or writer_version > _NAMED_FEATURES[1]:
        return f"the target has protocol {versions}, which is newer than Delta 4.4's {_NAMED_FEATURES}"
    unknown = "a feature that Delta 4.4 does not have"
    unproven = [f"{name} ({UNPROVEN.get(name, unknown)})" for name in sorted(features) if name not in SUPPORTED]
    if unproven:
        return f"the target uses {', '.join(unproven)}"
    demands = [f"{name} = {properties[name]!r} {what}" for name, what in _demands(properties)]
    return f"the target's {', and '.join(demands)}" if demands else None


def merge_mode(features: Collection[str], properties: Mapping[str, str]) -> Mode:
    """The mode "mark" (deletion vectors) where the table has them, else "rewrite" (its files)."""
    return "mark" if DELETION_VECTORS in features and is_on(properties, VECTORS_PROPERTY) else "rewrite"


def _demands(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Properties that the driver does not support, and what they require."""
    for name, value in sorted(properties.items()):
        key, given = name.lower(), value.strip().lower()
        if key.startswith(CONSTRAINT):
            yield name, "is a CHECK constraint, which only Spark enforces"
        elif key.startswith(_COORDINATED):
            yield name, "demands another way to commit"
        elif key.startswith(_ICEBERG) and given != _OFF:
            yield name, "demands files that Iceberg reads"
        elif key in _ON_ELSE_REFUSED and given != _OFF:
            yield name, _ON_ELSE_REFUSED[key]
        elif key in _EXPECTED and given != _EXPECTED[key][0]:
            yield name, _EXPECTED[key][1]
