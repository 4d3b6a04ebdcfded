"""A table that the driver merges into without a JVM: its first files by hand, all others by the merger."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from delta_log import check_table, live_rows
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.engines.memory import Promise
from stream_merge.model import names
from stream_merge.model.results import Mode
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout, StoredColumn
from stream_merge.tables.log.handle import open_table

LONG, TEXT = LongType(), StringType()
COLUMNS: Mapping[str, DataType] = {"id": LONG, "lsn": LONG, "name": TEXT}
SCHEMA = StructType([StructField(name, dtype) for name, dtype in COLUMNS.items()])
ARROW = pa.schema([("id", pa.int64()), ("lsn", pa.int64()), ("name", pa.string())])
EVENTS = pa.schema(
    [*ARROW, (names.SEQUENCE_COLUMN, pa.struct([("c1", pa.int64())])), (names.DELETE_COLUMN, pa.bool_())]
)
SPEC = MergeSpec(target="/t", keys=("id",), sequence_by=("lsn",), apply_as_deletes="op = 'd'")

Row = tuple[int | None, int | None, str | None]


def layout(columns: Mapping[str, DataType] = COLUMNS) -> Layout:
    return Layout(
        stored=tuple(
            StoredColumn(name=name, source_name=name, source_type=dtype, field=StructField(name, dtype))
            for name, dtype in columns.items()
        ),
        keys=("id",),
        sequence_fields=(StructField("c1", LONG),),
        sequence_columns=("lsn",),
        sequence_source=(),
        deletes=None,
        new_columns=(),
        type_changes=(),
        definition="",
        case_sensitive=False,
    )


def events(*rows: Row, delete: Sequence[int] = ()) -> pa.Table:
    """Events of which those of these keys are deletes."""
    told = [
        {
            "id": key,
            "lsn": lsn,
            "name": name,
            names.SEQUENCE_COLUMN: {"c1": lsn},
            names.DELETE_COLUMN: key in delete,
        }
        for key, lsn, name in rows
    ]
    return pa.Table.from_pylist(told, EVENTS)


def tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows.to_pylist()]


def merger(
    root: Path,
    given: pa.Table,
    spec: MergeSpec = SPEC,
    lock: Callable[[], Any] | None = None,
) -> DriverMerger:
    """A merge of these events into a table that is there."""
    native = open_table(str(root))
    assert native is not None
    native.lock = lock or nullcontext
    return DriverMerger(
        spec=spec,
        target=native,
        layout=layout(),
        events=given,
        bounds=KeyBounds(),
        prepared_for=native.table_id,
        chosen_at=native.version,
        promise=Granted(None),
    )


class Granted(Promise):
    """Takes nothing from the other tests of the process, for nobody gives it back."""

    def cover(self, wanted: int) -> int | None:
        return None


class Target:
    """A table without a JVM: its first files by hand, all others by the merger.

    Args:
        mode: in which the driver merges into it: "rewrite" has no deletion vectors.
    """

    def __init__(
        self,
        root: Path,
        schema: StructType = SCHEMA,
        partition_columns: Sequence[str] = (),
        mode: Mode = "mark",
        **properties: str,
    ) -> None:
        self.root = root
        self.log = root / "_delta_log"
        self.log.mkdir(parents=True)
        self.batch_id = -1
        self.mode = mode
        vectors = ["deletionVectors"] if mode == "mark" else []
        writer = [*vectors, "changeDataFeed", "inCommitTimestamp", "checkConstraints", "invariants"]
        configuration = {"enableDeletionVectors": str(bool(vectors)).lower(), "enableChangeDataFeed": "true"}
        configuration |= properties
        self.protocol = {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": vectors,
                "writerFeatures": writer,
            }
        }
        self.metadata = {
            "metaData": {
                "id": "a8f5",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": schema.json(),
                "partitionColumns": list(partition_columns),
                "configuration": {f"delta.{name}": value for name, value in configuration.items()},
                "createdTime": 1,
            }
        }
        self.put(self.protocol, self.metadata)

    @property
    def version(self) -> int:
        return len(list(self.log.glob("*.json"))) - 1

    def put(self, *actions: Mapping[str, Any], operation: str = "WRITE") -> None:
        info = {"timestamp": 1, "operation": operation, "inCommitTimestamp": 2**42 + self.version}
        file = self.log / f"{self.version + 1:020}.json"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in ({"commitInfo": info}, *actions)))

    def append(self, *rows: Row, name: str | None = None) -> str:
        """A file without statistics."""
        path = name or f"part-{self.version}.parquet"
        told = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        pq.write_table(pa.Table.from_pylist(told, ARROW), self.root / path)
        size = (self.root / path).stat().st_size
        body = {"path": path, "partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True}
        self.put({"add": {**body, "stats": f'{{"numRecords":{len(rows)}}}'}})
        return path

    def merger(self, given: pa.Table, spec: MergeSpec = SPEC, lock: Callable[[], Any] | None = None) -> DriverMerger:
        return merger(self.root, given, spec, lock)

    def tag(self, app_id: str | None = "app") -> CommitTag:
        self.batch_id += 1
        return CommitTag(app_id=app_id, batch_id=self.batch_id, user_metadata='{"a":"ü"}', token="t")

    def merge(self, given: pa.Table, **how: Any) -> MergeReport:
        return self.merger(given, **how).merge(None, self.tag())

    def rows(self) -> list[tuple[Any, ...]]:
        """As a reader has them that shares no code with the package, after it has checked the whole log."""
        check_table(self.root)
        return sorted(tuples(live_rows(self.root).select(list(COLUMNS))), key=repr)

    def actions(self, kind: str, version: int | None = None) -> list[dict[str, Any]]:
        text = (self.log / f"{self.version if version is None else version:020}.json").read_bytes()
        return [action[kind] for action in map(json.loads, text.split(b"\n")[:-1]) if kind in action]

    def files(self) -> set[str]:
        return {str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file()}

    def feed(self) -> list[tuple[Any, ...]]:
        """Rows of the newest commit's change files."""
        read = [pq.read_table(self.root / cdc["path"]) for cdc in self.actions("cdc")]
        return sorted((row for one in read for row in tuples(one.select(["_change_type", *COLUMNS]))), key=repr)
