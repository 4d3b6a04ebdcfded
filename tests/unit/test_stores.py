"""What errors of S3A and of delta-rs say of a store, in a sentence; texts as they came out of the fault tests."""

from __future__ import annotations

import pytest

from stream_merge.errors import ConfigError, MergeFailedError
from stream_merge.jobs.kafka.exit_codes import Verdict, verdict
from stream_merge.spark import environment
from stream_merge.spark.errors import reason

S3A = "An error occurred while calling z:io.delta.tables.DeltaTable.forPath.\n: {0}\n\tat org.apache.hadoop.x(X.java:1)"
SDK = "software.amazon.awssdk.services.s3.model.S3Exception"
ABFS = S3A.format(
    "Operation failed: {0}, HEAD, " + "http://a.blob.core.windows.net/lake/t/_delta_log?upn=false, rId: {1}"
)
CONTAINER = "http://a.blob.core.windows.net/lake/t/_delta_log"
HERE = "s3a://lake/t/orders/_delta_log"
URL = "http://127.0.0.1:9000/lake/t/orders/_delta_log/00000000000000000003.json"
RUST = (
    "{0}\n          \x1b[31m↳\x1b[0m Error performing PUT " + URL + " in 39.3ms, after 2 retries, max_retries\n"
    "           \x1b[31m↳\x1b[0m 2, retry_timeout\n            \x1b[31m↳\x1b[0m 5s  - {1}"
)
STATUS = "Server returned non-2xx status code\n             \x1b[31m↳\x1b[0m {0}: <Error><Code>{1}</Code></Error>"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            S3A.format(
                f"java.nio.file.AccessDeniedException: {HERE}: getFileStatus on {HERE}: {SDK}: Forbidden (Service: S3,"
                " Status Code: 403, Request ID: null):null"
            ),
            f"[STORE_ACCESS_DENIED] the object store denies access (403, {HERE}); grant",
        ),
        (
            S3A.format(
                f"org.apache.hadoop.fs.s3a.AWSBadRequestException: getFileStatus on {HERE}: {SDK}: Bad Request"
                " (Service: S3, Status Code: 400, Request ID: null):null: Bad Request (Service: S3, Status Code: 400)"
            ),
            f"[STORE_ACCESS_DENIED] the object store rejects the credentials (400, {HERE}); renew",
        ),
        (
            S3A.format(
                f"org.apache.hadoop.fs.s3a.UnknownStoreException: `{HERE}': getFileStatus on {HERE}:"
                " NoSuchBucketException: The specified bucket does not exist (Service: S3, Status Code: 404, Request"
                " ID: null):NoSuchBucket: x"
            ),
            f"[BUCKET_NOT_FOUND] the bucket does not exist (404 NoSuchBucket, {HERE}); create",
        ),
        (
            "[TASK_WRITE_FAILED] Task failed while writing rows to s3a://lake/t.\nCaused by:"
            f" java.nio.file.AccessDeniedException: t/1.parquet: Writing Object on t/1.parquet: {SDK}: Access Denied"
            " (Service: S3, Status Code: 403, Request ID: null) (SDK Attempt Count: 1):AccessDenied",
            "[STORE_ACCESS_DENIED] the object store denies access (403 AccessDenied, t/1.parquet); grant",
        ),
        (
            RUST.format("Generic S3 error", STATUS.format("403 Forbidden", "ExpiredToken")),
            f"[STORE_ACCESS_DENIED] the object store rejects the credentials (403 ExpiredToken, {URL}); renew",
        ),
        (
            RUST.format("Object at location x not found", STATUS.format("404 Not Found", "NoSuchBucket")),
            f"[BUCKET_NOT_FOUND] the bucket does not exist (404 NoSuchBucket, {URL}); create",
        ),
        (
            ABFS.format('"Forbidden", 403', ""),
            f"[STORE_ACCESS_DENIED] the object store denies access (403, {CONTAINER}); grant",
        ),
        (
            ABFS.format('"Server failed to authenticate the request.", 403', '1, AuthenticationFailed, "x"'),
            f"[STORE_ACCESS_DENIED] the object store rejects the credentials (403 AuthenticationFailed, {CONTAINER});"
            " renew",
        ),
        (
            ABFS.format('"The specified container does not exist.", 404', '1, ContainerNotFound, "x"'),
            f"[BUCKET_NOT_FOUND] the bucket does not exist (404 ContainerNotFound, {CONTAINER}); create",
        ),
        (
            ABFS.format('"The specified filesystem does not exist.", 404', '1, FilesystemNotFound, "x"'),
            f"[BUCKET_NOT_FOUND] the bucket does not exist (404 FilesystemNotFound, {CONTAINER}); create",
        ),
        (
            S3A.format("Status code: -1 error code: null error message: Auth failure: HTTP Error 401; url=x"),
            "[STORE_ACCESS_DENIED] the object store denies access (401, the store); grant",
        ),
        (
            RUST.format("Generic MicrosoftAzure error", STATUS.format("403 Forbidden", "AuthorizationFailure")),
            f"[STORE_ACCESS_DENIED] the object store denies access (403 AuthorizationFailure, {URL}); grant",
        ),
    ],
)
def test_a_store_that_refuses_wants_a_person(text: str, sentence: str) -> None:
    error = OSError(text)

    assert str(environment.said(error)).startswith(sentence)
    assert reason(error) == environment.said(error)
    assert verdict(error) is Verdict.CONFIGURATION


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            S3A.format(
                f"org.apache.hadoop.fs.s3a.AWSServiceThrottledException: getFileStatus on {HERE}: {SDK}: Service"
                " Unavailable (Service: S3, Status Code: 503, Request ID: null):null: Service Unavailable"
            ),
            f"503, {HERE}",
        ),
        (ABFS.format('"Service Unavailable", 503', ""), f"503, {CONTAINER}"),
        (
            S3A.format(
                "Status code: -1 error code: null error message: java.net.SocketException: Unexpected end of file from"
                " server"
            ),
            "SocketException, the store",
        ),
        (
            S3A.format(
                f"org.apache.hadoop.fs.s3a.HttpChannelEOFException: getFileStatus on {HERE}: SdkClientException: Unable"
                " to execute HTTP request: The target server failed to respond (SDK Attempt Count: 3)"
            ),
            f"HttpChannelEOFException, {HERE}",
        ),
        (
            S3A.format(
                f"org.apache.hadoop.fs.s3a.AWSServiceThrottledException: Writing Object on t/_delta_log/3.json: {SDK}:"
                " Please reduce your request rate. (Service: S3, Status Code: 503, Request ID: null):SlowDown: Please"
            ),
            "503 SlowDown, t/_delta_log/3.json",
        ),
        (RUST.format("Generic S3 error", STATUS.format("503 Service Unavailable", "SlowDown")), f"503 SlowDown, {URL}"),
        (RUST.format("Generic S3 error", "HTTP error: error sending request"), f"no connection, {URL}"),
    ],
)
def test_a_store_that_is_away_is_tried_again_later(text: str, answer: str) -> None:
    """Also by whoever restarts jobs, whatever our error over it is."""
    error = OSError(text)
    outer = MergeFailedError("merging failed")
    outer.__cause__ = error
    refused = ConfigError("the table could not be created")
    refused.__cause__ = error

    assert environment.said(error) is None
    assert reason(error) == (
        f"[STORE_UNAVAILABLE] the object store is unavailable, also after retries ({answer}); run it again"
    )
    assert {verdict(one) for one in (error, outer, refused)} == {Verdict.AGAIN}


def test_a_commit_that_is_not_listed_yet_is_said() -> None:
    error = RuntimeError("Kernel error: Generic delta kernel error: LogSegment end version 2 not the same as 3")

    assert "does not list an existing commit yet (LogSegment end version 2" in reason(error)


@pytest.mark.parametrize(
    "text",
    [
        "java.io.FileNotFoundException: No such file or directory: s3a://lake/t",
        "org.apache.hadoop.fs.s3a.RemoteFileChangedException: open `s3a://lake/t': changed",
        f"CHECK constraint note (note <> '') violated by row with values:\n - note : {S3A.format(HERE)}",
        "Invalid data found: 1 rows failed.\nPreview of invalid data:\n| Error performing GET http://x/y in |",
        f"Object at location x not found: Error performing GET {URL} in 1ms - Server returned non-2xx status code: 404"
        " Not Found: <Error><Code>NoSuchKey</Code></Error>",
    ],
)
def test_what_is_no_trouble_of_the_store_is_left_alone(text: str) -> None:
    """A file that is missing, and what stands in rows."""
    assert (environment.said(OSError(text)), environment.away(OSError(text))) == (None, None)
