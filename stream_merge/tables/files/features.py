"""Tables that merge-on-read may write, by table feature (all of Delta 4.4) and table property.

The Delta protocol forbids writing a table with an unknown feature, so features that are not listed here are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stream_merge.model.results import Mode
from stream_merge.model.snapshot import VECTORS_PROPERTY, is_on

CONSTRAINT = "delta.constraints."
"""Prefix, in lower case, of the table properties that hold CHECK constraints in SQL."""

OTHER_READERS: Mapping[str, tuple[str, str]] = {
    "delta.compatibility.symlinkformatmanifest.enabled": ("false", "demands manifests, made by Spark alone"),
    "delta.universalformat.enabledformats": ("", "demands that readers of other formats see each commit"),
}
"""Table properties, in lower case, for which Spark does more than commit -> the value that turns it off, the reason."""


@dataclass(frozen=True, slots=True)
class Support:
    """Whether merge-on-read may write a table with a feature."""

    may: bool
    why: str
    """The reason, for error messages."""


DELETION_VECTORS = "deletionVectors"


def _yes(why: str) -> Support:
    return Support(may=True, why=why)


def _no(why: str) -> Support:
    return Support(may=False, why=why)


FEATURES: Mapping[str, Support] = MappingProxyType(
    {
        DELETION_VECTORS: _yes("rows are removed by them"),
        # A table upgraded from an older protocol lists all legacy features, used or not.
        "appendOnly": _yes("the property is checked"),
        "invariants": _yes("the columns are checked"),
        "checkConstraints": _yes("the properties are checked"),
        "generatedColumns": _yes("the columns are checked"),
        "identityColumns": _yes("the columns are checked"),
        "allowColumnDefaults": _yes("the columns are checked"),
        "changeDataFeed": _yes("each commit adds change files"),
        "columnMapping": _yes("files have physical names and field ids"),
        "timestampNtz": _yes("a type like others"),
        "typeWidening": _yes("old files are read in the table's types; only new files are written"),
        "typeWidening-preview": _yes("as typeWidening"),
        "v2Checkpoint": _yes("a form of checkpoints, not of commits"),
        "clustering": _yes("new files are unclustered, with statistics; others keep their `clusteringProvider`"),
        "domainMetadata": _yes("a merge changes no domain"),
        "inCommitTimestamp": _yes("each commit records its time"),
        "vacuumProtocolCheck": _yes("concerns VACUUM only"),
        "rowTracking": _no("updated rows would lose their ids"),
        "icebergCompatV1": _no("Iceberg readers know no vectors of Delta"),
        "icebergCompatV2": _no("Iceberg readers know no vectors of Delta"),
        "icebergCompatV3": _no("its vectors are bound to Iceberg's rules and to row tracking"),
        "catalogManaged": _no("its catalog commits, not a file in the log"),
        "coordinatedCommits-preview": _no("its coordinator commits, not a file in the log"),
        "adaptiveMetadata-preview": _no("its catalog commits, and its log is of another form"),
        "variantType": _no("variants are not proven"),
        "variantType-preview": _no("variants are not proven"),
        "variantShredding": _no("variants are not proven"),
        "variantShredding-preview": _no("variants are not proven"),
        "geospatial": _no("geometries are not proven"),
        "geospatial-dev": _no("geometries are not proven"),
        "materializePartitionColumns": _no("data files must hold the partition columns, which is not proven"),
        "checkpointProtection": _no("cleaning the log has rules that are not proven"),
        "redirectReaderWriter-preview": _no("the data is elsewhere"),
        "redirectWriterOnly-preview": _no("the data is elsewhere"),
    }
)
"""All features of Delta 4.4 by name; tests/contract/test_table_features.py compares them with Delta's own list."""

_NAMED_FEATURES = 3, 7
"""Reader and writer version with named features; older ones have no deletion vectors, newer ones are unknown."""

_ON_ELSE_REFUSED: Mapping[str, str] = {
    "delta.appendonly": "forbids to delete or update rows",
    "delta.enablerowtracking": "demands ids of rows that merge-on-read does not keep",
    "delta.randomizefileprefixes": "demands paths that merge-on-read does not give",
    "delta.enablematerializepartitioncolumnsfeature": "demands partition columns in data files",
}
"""Properties that default to false, in lower case: Delta ignores their case."""
_EXPECTED: Mapping[str, tuple[str, str]] = {
    "delta.checkpoint.writestatsasjson": ("true", "takes from checkpoints the statistics that commits must repeat"),
    "delta.parquet.compression.codec": ("snappy", "demands files of another compression"),
    "delta.parquet.format.version": ("1.0.0", "demands files of another format"),
    **OTHER_READERS,
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
    unproven = [f"{name} ({why})" for name, why in _unproven(features)]
    if unproven:
        return f"the target uses {', '.join(unproven)}"
    demands = [f"{name} = {properties[name]!r} {what}" for name, what in _demands(properties)]
    return f"the target's {', and '.join(demands)}" if demands else None


def mode_of(features: Collection[str], properties: Mapping[str, str]) -> Mode:
    """How rows are removed: by deletion vectors where the table has them, else by writing their files again."""
    return "mark" if DELETION_VECTORS in features and is_on(properties, VECTORS_PROPERTY) else "rewrite"


def _unproven(features: Collection[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(features):
        support = FEATURES.get(name)
        if support is None:
            yield name, "a feature that Delta 4.4 does not have"
        elif not support.may:
            yield name, support.why


def _demands(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Properties that merge-on-read does not support, and what they require."""
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
