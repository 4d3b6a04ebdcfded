"""The SQL metrics of Delta's MERGE and what each is exported as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

Type: TypeAlias = Literal["counter", "gauge", "histogram"]


class DeltaMetric(NamedTuple):
    """How one SQL metric of Delta's MERGE is exported."""

    name: str
    type: Type
    unit: str
    factor: float
    """Delta's number times this is ours; turns milliseconds into seconds."""
    help: str


# Names of delta-spark 4.4.0, MergeIntoCommandBase.baseMetrics. The splits (matched, not matched by
# source) are families of their own: in one family with their totals, a sum would count rows twice.
# fmt: off
DELTA_MERGE_METRICS: Mapping[str, DeltaMetric] = {
    "operationNumSourceRows": DeltaMetric(
        "stream_merge_source_rows_total", "counter", "rows", 1,
        "Rows the merge read from its source, as the table history reports them."),
    "numSourceRows": DeltaMetric(
        "stream_merge_source_rows_first_scan_total", "counter", "rows", 1,
        "Source rows counted in the first scan, which finds the files to touch."),
    "numSourceRowsInSecondScan": DeltaMetric(
        "stream_merge_source_rows_second_scan_total", "counter", "rows", 1,
        "Source rows counted in the second scan, which writes; 0 where none was needed."),
    "numTargetRowsCopied": DeltaMetric(
        "stream_merge_target_rows_copied_total", "counter", "rows", 1,
        "Unchanged rows rewritten because they share a file with a changed one."),
    "numTargetRowsInserted": DeltaMetric(
        "stream_merge_target_rows_inserted_total", "counter", "rows", 1,
        "Rows inserted."),
    "numTargetRowsUpdated": DeltaMetric(
        "stream_merge_target_rows_updated_total", "counter", "rows", 1,
        "Rows updated."),
    "numTargetRowsMatchedUpdated": DeltaMetric(
        "stream_merge_target_rows_matched_updated_total", "counter", "rows", 1,
        "Rows updated by a matched clause; part of the updated rows."),
    "numTargetRowsNotMatchedBySourceUpdated": DeltaMetric(
        "stream_merge_target_rows_not_matched_by_source_updated_total", "counter", "rows", 1,
        "Rows updated by a clause for rows absent from the source; part of the updated rows."),
    "numTargetRowsDeleted": DeltaMetric(
        "stream_merge_target_rows_deleted_total", "counter", "rows", 1,
        "Rows deleted."),
    "numTargetRowsMatchedDeleted": DeltaMetric(
        "stream_merge_target_rows_matched_deleted_total", "counter", "rows", 1,
        "Rows deleted by a matched clause; part of the deleted rows."),
    "numTargetRowsNotMatchedBySourceDeleted": DeltaMetric(
        "stream_merge_target_rows_not_matched_by_source_deleted_total", "counter", "rows", 1,
        "Rows deleted by a clause for rows absent from the source; part of the deleted rows."),
    "numTargetFilesBeforeSkipping": DeltaMetric(
        "stream_merge_target_files_before_skipping_total", "counter", "files", 1,
        "Files of the target when the merge began, summed over merges."),
    "numTargetFilesAfterSkipping": DeltaMetric(
        "stream_merge_target_files_after_skipping_total", "counter", "files", 1,
        "Files left to scan after partition pruning and data skipping, summed over merges."),
    "numTargetFilesRemoved": DeltaMetric(
        "stream_merge_target_files_removed_total", "counter", "files", 1,
        "Data files removed from the table."),
    "numTargetFilesAdded": DeltaMetric(
        "stream_merge_target_files_added_total", "counter", "files", 1,
        "Data files added to the table."),
    "numTargetBytesBeforeSkipping": DeltaMetric(
        "stream_merge_target_bytes_before_skipping_total", "counter", "bytes", 1,
        "Bytes of the target when the merge began, summed over merges."),
    "numTargetBytesAfterSkipping": DeltaMetric(
        "stream_merge_target_bytes_after_skipping_total", "counter", "bytes", 1,
        "Bytes left to scan after partition pruning and data skipping, summed over merges."),
    "numTargetBytesRemoved": DeltaMetric(
        "stream_merge_target_removed_bytes_total", "counter", "bytes", 1,
        "Bytes of the data files removed from the table."),
    "numTargetBytesAdded": DeltaMetric(
        "stream_merge_target_added_bytes_total", "counter", "bytes", 1,
        "Bytes of the data files added to the table."),
    "numTargetPartitionsAfterSkipping": DeltaMetric(
        "stream_merge_target_partitions_after_skipping_total", "counter", "partitions", 1,
        "Partitions left to scan after skipping, summed over merges by Spark, which alone counts them; 0 for an "
        "unpartitioned table."),
    "numTargetPartitionsRemovedFrom": DeltaMetric(
        "stream_merge_target_partitions_removed_from_total", "counter", "partitions", 1,
        "Partitions that files were removed from, summed over merges by Spark, which alone counts them; 0 for an "
        "unpartitioned table."),
    "numTargetPartitionsAddedTo": DeltaMetric(
        "stream_merge_target_partitions_added_to_total", "counter", "partitions", 1,
        "Partitions that files were added to, summed over merges by Spark, which alone counts them; 0 for an "
        "unpartitioned table."),
    "numTargetChangeFilesAdded": DeltaMetric(
        "stream_merge_target_change_files_added_total", "counter", "files", 1,
        "Change data feed files added."),
    "numTargetChangeFileBytes": DeltaMetric(
        "stream_merge_target_change_file_bytes_total", "counter", "bytes", 1,
        "Bytes of the change data feed files added."),
    "numTargetDeletionVectorsAdded": DeltaMetric(
        "stream_merge_target_deletion_vectors_added_total", "counter", "deletion vectors", 1,
        "Deletion vectors added to files that had none."),
    "numTargetDeletionVectorsRemoved": DeltaMetric(
        "stream_merge_target_deletion_vectors_removed_total", "counter", "deletion vectors", 1,
        "Deletion vectors removed together with their files."),
    "numTargetDeletionVectorsUpdated": DeltaMetric(
        "stream_merge_target_deletion_vectors_updated_total", "counter", "deletion vectors", 1,
        "Deletion vectors replaced by larger ones; the table history counts these as added and removed."),
    "executionTimeMs": DeltaMetric(
        "stream_merge_merge_execution_seconds", "histogram", "seconds", 0.001,
        "Time of one MERGE up to its commit, as Delta measured it."),
    "materializeSourceTimeMs": DeltaMetric(
        "stream_merge_merge_materialize_source_seconds_total", "counter", "seconds", 0.001,
        "Time merges took to materialise their source."),
    "scanTimeMs": DeltaMetric(
        "stream_merge_merge_scan_seconds_total", "counter", "seconds", 0.001,
        "Time merges took to find the files to touch."),
    "rewriteTimeMs": DeltaMetric(
        "stream_merge_merge_rewrite_seconds_total", "counter", "seconds", 0.001,
        "Time merges took to write files and deletion vectors."),
}
"""Delta's name to ours; every SQL metric of a MERGE is here, and a test fails when Delta emits another."""
# fmt: on
