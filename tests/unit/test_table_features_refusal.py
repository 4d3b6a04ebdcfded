"""The driver writes a table only where its protocol and its properties are known to allow it, and in which mode."""

from __future__ import annotations

import pytest

from stream_merge.tables.files.features import SUPPORTED, UNPROVEN, merge_mode, refusal

ON = {"delta.enableDeletionVectors": "true"}


def told(*features: str, **properties: str) -> str | None:
    """The refusal of a table with vectors and this; properties without `delta.`, and `_` for their dots."""
    given = {f"delta.{name.replace('_', '.')}": value for name, value in properties.items()}
    return refusal(3, 7, {"deletionVectors", *features}, ON | given)


def test_a_table_with_vectors_and_nothing_else_is_written():
    assert told() is None


def test_all_features_that_may_be_written_may_be_together():
    assert told(*SUPPORTED) is None
    assert len(SUPPORTED) == 17


@pytest.mark.parametrize("feature", UNPROVEN)
def test_a_feature_that_is_not_proven_is_refused_with_its_reason(feature):
    assert told(feature, *SUPPORTED) == f"the target uses {feature} ({UNPROVEN[feature]})"


@pytest.mark.parametrize("feature", ["collations", "icebergWriterCompatV1", "futureFeature", "DeletionVectors"])
def test_a_feature_that_delta_does_not_have_is_refused(feature):
    """Names are compared as the protocol writes them."""
    assert told(feature) == f"the target uses {feature} (a feature that Delta 4.4 does not have)"


def test_all_refused_features_are_told_at_once():
    refused = told("variantType", "rowTracking")

    assert refused == (
        "the target uses rowTracking (updated rows would lose their ids), variantType (variants are not proven)"
    )


@pytest.mark.parametrize("versions", [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (1, 7), (2, 7)])
def test_tables_of_older_protocols_are_rewritten(versions):
    """They have no deletion vectors, whatever the property says."""
    assert refusal(*versions, (), ON) is None
    assert merge_mode((), ON) == "rewrite"


@pytest.mark.parametrize("versions", [(4, 7), (3, 8), (4, 8)])
def test_a_newer_protocol_is_refused(versions):
    assert "newer than Delta 4.4" in str(refusal(*versions, ["deletionVectors"], ON))


def test_rows_are_marked_where_feature_and_property_say_so():
    """Writers must only write new vectors where the property says so, and the property may outlive the feature."""
    vectors = ["deletionVectors"]
    off, loud = {"delta.enableDeletionVectors": "false"}, {"delta.enableDeletionVectors": "TRUE"}

    assert [merge_mode(vectors, one) for one in ({}, off, ON, loud)] == ["rewrite", "rewrite", "mark", "mark"]
    assert merge_mode(["columnMapping"], ON) == "rewrite"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("appendOnly", "true", "forbids to delete or update rows"),
        ("enableRowTracking", "true", "demands ids of rows"),
        ("constraints_positive", "amount > 0", "is a CHECK constraint"),
        ("constraints_false", "false", "is a CHECK constraint"),
        ("checkpoint_writeStatsAsJson", "false", "takes from checkpoints the statistics"),
        ("randomizeFilePrefixes", "true", "demands paths"),
        ("enableIcebergCompatV1", "true", "demands files that Iceberg reads"),
        ("enableIcebergCompatV3", "true", "demands files that Iceberg reads"),
        ("enableIcebergWriterCompatV1", "true", "demands files that Iceberg reads"),
        ("universalFormat_enabledFormats", "iceberg", "demands that readers of other formats"),
        ("parquet_compression_codec", "zstd", "demands files of another compression"),
        ("parquet_format_version", "2.12.0", "demands files of another format"),
        ("compatibility_symlinkFormatManifest_enabled", "true", "demands manifests"),
        ("enableMaterializePartitionColumnsFeature", "true", "demands partition columns"),
        ("coordinatedCommits_commitCoordinator-preview", "dynamodb", "demands another way to commit"),
        ("APPENDONLY", "True", "forbids to delete or update rows"),
        ("appendOnly", "yes", "forbids to delete or update rows"),
    ],
)
def test_a_property_that_would_not_be_obeyed_is_refused(name, value, why):
    """In any case of its name, and with any value but the one that is known to ask for nothing."""
    refused = told(**{name: value})

    assert refused is not None
    assert refused.startswith(f"the target's delta.{name.replace('_', '.')} = {value!r} {why}")


def test_all_refused_properties_are_told_at_once():
    assert told(appendOnly="true", parquet_compression_codec="gzip") == (
        "the target's delta.appendOnly = 'true' forbids to delete or update rows, and"
        " delta.parquet.compression.codec = 'gzip' demands files of another compression"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendOnly", "false"),
        ("enableRowTracking", "False"),
        ("checkpoint_writeStatsAsJson", "true"),
        ("checkpoint_writeStatsAsStruct", "false"),
        ("randomizeFilePrefixes", "false"),
        ("enableIcebergCompatV2", "false"),
        ("universalFormat_enabledFormats", ""),
        ("parquet_compression_codec", "SNAPPY"),
        ("parquet_format_version", "1.0.0"),
        ("isolationLevel", "WriteSerializable"),
        ("enableChangeDataFeed", "true"),
        ("enableInCommitTimestamps", "true"),
        ("enableTypeWidening", "true"),
        ("columnMapping_mode", "name"),
        ("checkpointPolicy", "v2"),
        ("checkpointInterval", "7"),
        ("dataSkippingNumIndexedCols", "3"),
        ("logRetentionDuration", "interval 3 days"),
    ],
)
def test_a_property_that_asks_for_nothing_special_is_no_reason(name, value):
    assert told(**{name: value}) is None


def test_properties_of_others_are_no_reason():
    assert refusal(3, 7, ["deletionVectors"], ON | {"appendOnly": "true", "owner": "false"}) is None


def test_each_feature_has_a_reason():
    assert all({**SUPPORTED, **UNPROVEN}.values())
