"""Which tables merge-on-read may write: a word on every table feature of Delta 4.4, and on the properties that matter.

The protocol lets nobody write a table with a feature that is unknown to them: what is not named here is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stream_merge.model.snapshot import VECTORS_PROPERTY, is_on
from stream_merge.tables.whitelist import CONSTRAINT, OTHER_READERS


@dataclass(frozen=True, slots=True)
class Support:
    """Whether merge-on-read may write a table that has a feature."""

    may: bool
    why: str
    """What makes it right, or what would go wrong; for people."""


DELETION_VECTORS = "deletionVectors"


def _yes(why: str) -> Support:
    return Support(may=True, why=why)


def _no(why: str) -> Support:
    return Support(may=False, why=why)


FEATURES: Mapping[str, Support] = MappingProxyType(
    {
        DELETION_VECTORS: _yes("this is how rows go"),
        # Legacy features are all named by a table that was raised from an older protocol, in use or not.
        "appendOnly": _yes("the property is looked at"),
        "invariants": _yes("the columns are looked at"),
        "checkConstraints": _yes("the properties are looked at"),
        "generatedColumns": _yes("the columns are looked at"),
        "identityColumns": _yes("the columns are looked at"),
        "allowColumnDefaults": _yes("the columns are looked at"),
        "changeDataFeed": _yes("each commit brings a change file"),
        "columnMapping": _yes("files have physical names and field ids"),
        "timestampNtz": _yes("a type like others"),
        "typeWidening": _yes("old files are read in the table's types; only new files are written"),
        "typeWidening-preview": _yes("as typeWidening"),
        "v2Checkpoint": _yes("a form of checkpoints, not of commits"),
        "clustering": _yes("new files are unclustered, with statistics; others keep their `clusteringProvider`"),
        "domainMetadata": _yes("a merge changes no domain"),
        "inCommitTimestamp": _yes("each commit bears its time"),
        "vacuumProtocolCheck": _yes("a duty of VACUUM only"),
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
"""By name, all in the code of Delta 4.4; tests/contract/test_table_features.py compares them with Delta's own list."""

_NAMED_FEATURES = 3, 7
"""The reader and writer version that name their features; older ones have no vectors, newer ones nobody knows."""

_ON_ELSE_REFUSED: Mapping[str, str] = {
    "delta.appendonly": "forbids to delete or update rows",
    "delta.enablerowtracking": "demands ids of rows that merge-on-read does not keep",
    "delta.randomizefileprefixes": "demands paths that merge-on-read does not give",
    "delta.enablematerializepartitioncolumnsfeature": "demands partition columns in data files",
}
"""Properties that default to false, in lower case: Delta finds them in any case when they are set."""
_EXPECTED: Mapping[str, tuple[str, str]] = {
    "delta.checkpoint.writestatsasjson": ("true", "takes from checkpoints the statistics that commits must repeat"),
    "delta.parquet.compression.codec": ("snappy", "demands files of another compression"),
    "delta.parquet.format.version": ("1.0.0", "demands files of another format"),
    **OTHER_READERS,
}
"""Properties for which one value only is proven."""
_ICEBERG = "delta.enableiceberg"
_COORDINATED = "delta.coordinatedcommits."
_OFF = "false"


def refusal(
    reader_version: int, writer_version: int, features: Collection[str], properties: Mapping[str, str]
) -> str | None:
    """Why merge-on-read may not write a table, as a clause; None where protocol and properties allow it.

    Columns, their types and the files are not looked at. All reasons of a kind are told at once.

    Args:
        reader_version: `minReaderVersion` of the table's protocol.
        writer_version: `minWriterVersion` of it.
        features: `readerFeatures` and `writerFeatures` together.
        properties: `configuration` of the table's metadata.
    """
    versions = reader_version, writer_version
    if reader_version > _NAMED_FEATURES[0] or writer_version > _NAMED_FEATURES[1]:
        return f"the target has protocol {versions}, which is newer than Delta 4.4's {_NAMED_FEATURES}"
    if versions != _NAMED_FEATURES or DELETION_VECTORS not in features:
        return f"the target's deletion vectors are off (its protocol {versions} does not have {DELETION_VECTORS})"
    if not is_on(properties, VECTORS_PROPERTY):
        return f"the target's deletion vectors are off ({VECTORS_PROPERTY} is not true)"
    unproven = [f"{name} ({why})" for name, why in _unproven(features)]
    if unproven:
        return f"the target uses {', '.join(unproven)}"
    demands = [f"{name} = {properties[name]!r} {what}" for name, what in _demands(properties)]
    return f"the target's {', and '.join(demands)}" if demands else None


def _unproven(features: Collection[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(features):
        support = FEATURES.get(name)
        if support is None:
            yield name, "a feature that Delta 4.4 does not have"
        elif not support.may:
            yield name, support.why


def _demands(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The properties that merge-on-read would not obey, and what they ask for."""
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
