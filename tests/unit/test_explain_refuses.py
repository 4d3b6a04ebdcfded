"""What `stream-merge explain` says where no table's log can be read, and of a table whose batches are all refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from driver_target import LONG, TEXT, Target
from pyspark.sql.types import DataType, DoubleType, MapType, StructField, StructType

from stream_merge import ConfigError
from stream_merge.model import names
from stream_merge.tables.explain import explain


@pytest.mark.parametrize(
    ("table", "problem"), [("sales.orders", "is a catalog name"), ("/nowhere/at/all", "there is no Delta table")]
)
def test_what_is_not_a_table_is_one_sentence(table: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        explain(table)


def test_a_log_that_cannot_be_read_is_one_sentence(tmp_path: Path):
    log = tmp_path / "table" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("{broken")

    with pytest.raises(ConfigError, match="cannot be read without Spark"):
        explain(str(tmp_path / "table"))


def test_a_path_in_which_delta_rs_would_decode_something_is_not_read_as_another_folders(tmp_path: Path):
    """Spark takes `a%20b` as it is, given by a URI, too."""
    write_deltalake(str(tmp_path / "a b"), pa.table({"id": [1]}))

    for target in (f"file://{tmp_path}/a%20b", f"{tmp_path}/a%20b"):
        with pytest.raises(ConfigError, match="has '%20', which delta-rs and Spark read differently"):
            explain(target)
    assert explain(f"file://{tmp_path}/a b").version == 0


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"k": LONG, "lsn": LONG}, None),
        ({"k": DoubleType(), "lsn": LONG}, "'k' is double as a key"),
        ({"K": StructType([StructField("a", LONG)]), "lsn": LONG}, "as a key"),
        ({"k": LONG, "LSN": DoubleType()}, "'LSN' is double as a sequence"),
        (
            {"k": LONG, names.SEQUENCE_COLUMN: StructType([StructField("c1", DoubleType())])},
            "'c1' is double as a sequence",
        ),
        ({"k": LONG, "lsn": LONG, "m": MapType(TEXT, TEXT)}, None),
    ],
)
def test_keys_and_sequence_that_refuse_each_batch_are_told(
    tmp_path: Path, columns: dict[str, DataType], wanted: str | None
):
    """By what a sink has recorded with the table."""
    target = Target(tmp_path / "table", StructType([StructField(name, dtype) for name, dtype in columns.items()]))
    recorded = {names.KEYS_PROPERTY: '["k"]', names.SEQUENCE_PROPERTY: '{"columns": ["lsn"]}'}
    target.metadata["metaData"]["configuration"] |= recorded
    target.put(target.protocol, target.metadata)

    said = explain(str(tmp_path / "table")).driver

    assert (said is None) == (wanted is None)
    assert wanted is None or wanted in str(said)
