"""One security section opens the broker for Spark and for kafka-python, and nobody finds the password afterwards."""

from __future__ import annotations

import base64
import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import services
from kafka.admin import ScramMechanism, UserScramCredentialUpsertion
from kafka.errors import KafkaError
from prometheus_client import generate_latest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from services import tls
from topic_job import QUERY, TopicJob

from stream_merge import ConfigError
from stream_merge.jobs.kafka.check import Finding, check
from stream_merge.jobs.kafka.exit_codes import Verdict
from stream_merge.jobs.kafka.run import Job, JobResult
from stream_merge.model.logs import JsonFormatter
from stream_merge.sources.kafka import certificates, connection
from stream_merge.sources.kafka.connection import Cluster, Connection, Security
from stream_merge.sources.kafka.connection import records as records_of

USER = "lake=house,1"
"""Both signs separate the parts of SCRAM's messages."""
PASSWORD = 'hid"den\\7,pass=wörd;'
WRONG = "another-secret-93"
LESS_THAN_AN_OUTAGE = 400
"""Seconds, on a slow machine too; a broker that is away is waited for longer."""


class Secured:
    """A broker that lets nobody in without a password or a certificate, and the authority behind its own."""

    def __init__(self, folder: Path) -> None:
        self.authority = tls.Authority(folder / "authority")
        self.stranger = tls.Authority(folder / "stranger", name="stranger")
        self.broker = tls.secured_broker(folder / "broker", self.authority)

    def kafka(self, protocol: str, **security: Any) -> dict[str, Any]:
        """The job file's section."""
        return {
            "bootstrap": self.broker.bootstraps[protocol],
            "security": {"protocol": protocol, "ca_file": str(self.authority.root), **security},
        }

    def with_password(self, password: str = PASSWORD, **more: Any) -> dict[str, Any]:
        return self.kafka("SASL_SSL", mechanism="SCRAM-SHA-512", user=USER, password=password, **more)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    services.need()
    tls.need()
    secured = Secured(tmp_path_factory.mktemp("secured"))
    with services.running(secured.broker):
        yield secured


@pytest.fixture
def job(spark: SparkSession, secured: Secured, tmp_path: Path) -> Iterator[TopicJob]:
    job = TopicJob(spark, secured.broker, tmp_path)
    job.admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, ScramMechanism.SCRAM_SHA_512, PASSWORD)])
    yield job
    job.close()


@pytest.fixture
def java_log(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """What the JVM logs from INFO on, Kafka's clients with all their settings among it."""
    file = tmp_path / "java.log"
    logs = spark._jvm.org.apache.logging.log4j
    core = logs.core
    logger = logs.LogManager.getRootLogger()
    builder = core.appender.FileAppender.newBuilder().withFileName(str(file))
    builder.setName("test").setLayout(core.layout.PatternLayout.createDefaultLayout())
    appender = builder.build()
    before = logger.getLevel()
    appender.start()
    logger.addAppender(appender)
    core.config.Configurator.setRootLevel(logs.Level.INFO)
    yield file
    core.config.Configurator.setRootLevel(before)
    logger.removeAppender(appender)
    appender.stop()


def shapes(secret: str) -> list[bytes]:
    """The secret as it could stand in a file."""
    return [
        secret.encode(),
        secret.replace("\\", "\\\\").replace('"', '\\"').encode(),
        base64.b64encode(secret.encode()),
        secret.encode("unicode_escape"),
    ]


def places_of(secret: str, folder: Path, *texts: str) -> list[str]:
    """Files below a folder, and texts by their number, that hold the secret."""
    files = {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    found = {**files, **{f"text {i}": text.encode() for i, text in enumerate(texts)}}
    return [place for place, content in found.items() if any(shape in content for shape in shapes(secret))]


def commands() -> str:
    """What `ps` shows of every process here."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            found.append((folder / "cmdline").read_text(errors="replace"))
    assert any("SparkSubmit" in command for command in found)
    return "\n".join(found)


def test_a_job_merges_over_sasl_ssl_and_the_password_is_nowhere(
    job: TopicJob, secured: Secured, java_log: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files of table, quarantine and checkpoint, both languages' logs, what is printed, metrics, reprs, plans, `ps`."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "kafka")  # as `sources.kafka` sets it
    job.send(1, job.event("c", 1))
    bad = job.send(2, b'{"id": "a-payload-of-someone')
    settings = job.settings(kafka=secured.with_password())

    (first,) = job.merge(kafka=secured.with_password())
    job.send(1, job.event("u", 1, "newer"))
    (second,) = job.merge(kafka=secured.with_password())

    assert (first.outcome, second.events.updated) == ("committed", 1)
    assert job.rows() == [(1, "newer")]
    assert [row.offset for row in job.spark.read.format("delta").load(job.quarantine).collect()] == [bad]
    logged = java_log.read_text()
    assert "sasl.jaas.config = [hidden]" in logged
    connection = settings.kafka.connection()
    as_json = "\n".join(JsonFormatter().format(record) for record in caplog.records if record.levelno > logging.DEBUG)
    assert '"event": "records_quarantined"' in as_json
    assert "a-payload-of-someone" not in as_json
    texts = [caplog.text, as_json, *capfd.readouterr(), generate_latest(job.registry).decode()]
    records = records_of(
        job.spark,
        connection,
        [job.topic],
        starting_offsets="earliest",
        starting_timestamp_millis=None,
        max_records=1,
        fail_on_data_loss=True,
    )
    plans = records._jdf.queryExecution()
    texts += [repr(records), plans.logical().toString(), plans.analyzed().toString(), commands()]
    texts += [repr(settings), str(settings), settings.model_dump_json(), repr(connection), repr(Cluster(connection))]
    assert places_of(PASSWORD, job.folder, *texts) == []
    assert places_of("sasl.jaas.config", job.folder) == [str(java_log)]


@pytest.mark.timeout(LESS_THAN_AN_OUTAGE)
def test_a_wrong_password_ends_the_job_with_one_sentence_and_nothing_written(
    job: TopicJob, secured: Secured, java_log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job.send(1, job.event("c", 1))

    result = job.run(kafka=secured.with_password(WRONG))

    said = refused(result)
    assert "invalid credentials with SASL mechanism SCRAM-SHA-512" in said
    assert not Path(job.target).exists()
    assert not list(Path(job.checkpoint).rglob("commits/*"))
    cause = result.failures[QUERY].__cause__
    assert places_of(WRONG, job.folder, said, str(cause), getattr(cause, "trace", ""), caplog.text) == []
    job.merge(kafka=secured.with_password())
    assert job.rows() == [(1, "n")]


def refused(result: JobResult) -> str:
    assert result.verdict is Verdict.CONFIGURATION
    error = result.failures[QUERY]
    assert isinstance(error, ConfigError)
    said = str(error)
    assert said.startswith(f"[BROKER_REFUSED] query {QUERY!r} and the broker do not accept each other: ")
    assert "\n" not in said
    return said


@pytest.mark.timeout(LESS_THAN_AN_OUTAGE)
@pytest.mark.parametrize(
    ("who", "why"),
    [("kafka-python", "certificate verify failed"), ("Spark", "unable to find valid certification path")],
)
def test_a_broker_that_the_authority_did_not_sign_for_is_not_talked_to(
    job: TopicJob, secured: Secured, monkeypatch: pytest.MonkeyPatch, who: str, why: str
) -> None:
    """kafka-python is the first to ask; Spark speaks of it only where a certificate comes to be wrong later."""
    job.send(1, job.event("c", 1))
    if who == "Spark":
        monkeypatch.setattr(Job, "look_before", lambda *_, **__: None)

    said = refused(job.run(kafka=secured.with_password(ca_file=str(secured.stranger.root))))

    assert why in said
    assert not Path(job.target).exists()


def test_a_certificate_opens_a_broker_that_asks_for_one(job: TopicJob, secured: Secured) -> None:
    job.send(1, job.event("c", 1))
    file = str(secured.authority.certificate("lake", key="rsa"))

    job.merge(kafka=secured.kafka("SSL", certificate_file=file))

    assert job.rows() == [(1, "n")]


@pytest.mark.timeout(LESS_THAN_AN_OUTAGE)
def test_without_one_it_stays_closed(job: TopicJob, secured: Secured) -> None:
    refused(job.run(kafka=secured.kafka("SSL")))


@pytest.mark.timeout(LESS_THAN_AN_OUTAGE)
def test_a_key_that_spark_cannot_read_ends_the_job(job: TopicJob, secured: Secured, tmp_path: Path) -> None:
    file = tmp_path / "old.pem"
    pkcs1(file, authority=secured.authority)

    assert "Private key could not be loaded" in refused(job.run(kafka=secured.kafka("SSL", certificate_file=str(file))))


def findings(job: TopicJob, kafka: dict[str, Any]) -> dict[str, Finding]:
    """By what they are about."""
    return {finding.about: finding for finding in check(job.settings(kafka=kafka), jars_in=None)}


def test_check_says_whether_the_broker_lets_the_job_in(
    job: TopicJob, secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the setting that is wrong, though kafka-python (3.0.12) ends some of these as a timeout without a word."""
    job.send(1, job.event("c", 1))

    good = findings(job, secured.with_password())

    assert not any(finding.is_problem for finding in good.values())
    assert good["security"].said == "SASL_SSL, SCRAM-SHA-512: both Spark and kafka-python accept this"
    assert good["records"].said == "1 tried, 0 undecodable"
    monkeypatch.setattr(connection, "_ADMIN_TIMEOUT_MILLIS", 2_000)
    sasl_ssl, plain = secured.broker.bootstraps["SASL_SSL"], secured.broker.bootstrap
    remedy = "use SASL_PLAINTEXT or SASL_SSL if it requires a login, SSL or SASL_SSL if it requires TLS"
    user = {"mechanism": "SCRAM-SHA-512", "user": USER, "password": PASSWORD}
    for kafka, said in (
        (
            secured.with_password(WRONG),
            f"[BROKER_REFUSED] {sasl_ssl} refuses the job: Authentication failed during authentication due to invalid"
            " credentials with SASL mechanism SCRAM-SHA-512; check 'kafka.security.user' and 'password'",
        ),
        (
            secured.kafka("SASL_SSL", mechanism="PLAIN", user=USER, password=PASSWORD),
            f"[BROKER_REFUSED] {sasl_ssl} refuses the job: the broker does not offer SASL mechanism PLAIN; set"
            " 'kafka.security.mechanism' to one of its sasl.enabled.mechanisms",
        ),
        (
            {**secured.kafka("SSL"), "bootstrap": sasl_ssl},
            f"[BROKER_UNREACHABLE] {sasl_ssl} does not answer: this listener does not accept"
            f" 'kafka.security.protocol: SSL'; {remedy}",
        ),
        (
            {"bootstrap": sasl_ssl},
            f"[BROKER_UNREACHABLE] {sasl_ssl} does not answer: this listener does not accept"
            f" 'kafka.security.protocol: PLAINTEXT'; {remedy}",
        ),
        (
            {"bootstrap": plain, "security": {"protocol": "SASL_PLAINTEXT", **user}},
            f"[BROKER_REFUSED] {plain} refuses the job: this listener does not use SASL; set 'kafka.security.protocol'"
            " to PLAINTEXT",
        ),
    ):
        about = findings(job, kafka)
        assert (about["broker"].said, about["broker"].is_problem) == (said, True)
        assert about["table"].said == "is created from the first batch"
    strange = findings(job, secured.with_password(ca_file=str(secured.stranger.root)))["broker"]
    assert strange.is_problem
    assert strange.said.startswith(f"[BROKER_REFUSED] {sasl_ssl} refuses the job, or is not trusted: Handshake failed")
    assert "CERTIFICATE_VERIFY_FAILED" in strange.said


def test_without_ca_file_check_says_whom_each_client_trusts() -> None:
    said = certificates.remark(Security(protocol="SSL"))

    assert said is not None
    assert "Spark trusts what Java's own store holds and kafka-python what the system's does" in said
    assert certificates.remark(Security(protocol="SSL", ca_file="ca.pem")) is None
    assert certificates.remark(Security(protocol="SASL_PLAINTEXT")) is None


# -- PEM files: what is said of them is what the clients do -------------------------------------------


def pkcs1(file: Path, *, authority: tls.Authority) -> None:
    source = authority.certificate(file.stem, key="rsa")
    tls.openssl("rsa", "-traditional", "-in", str(source), "-out", str(file))
    append_chain(source, file)


def sec1(file: Path, *, authority: tls.Authority) -> None:
    source = authority.certificate(file.stem)
    tls.openssl("ec", "-in", str(source), "-out", str(file))
    append_chain(source, file)


def encrypted(file: Path, *, authority: tls.Authority) -> None:
    source = authority.certificate(file.stem)
    tls.openssl("pkcs8", "-topk8", "-passout", "pass:x", "-in", str(source), "-out", str(file))
    append_chain(source, file)


def encrypted_as_of_old(file: Path, *, authority: tls.Authority) -> None:
    source = authority.certificate(file.stem, key="rsa")
    tls.openssl("rsa", "-traditional", "-aes128", "-passout", "pass:x", "-in", str(source), "-out", str(file))
    append_chain(source, file)


def parts(source: Path) -> tuple[str, list[str]]:
    """Key and certificates."""
    key, *certificates = source.read_text().split("-----BEGIN CERTIFICATE-----")
    return key, [f"-----BEGIN CERTIFICATE-----{text}" for text in certificates]


def append_chain(source: Path, file: Path) -> None:
    file.write_text(file.read_text() + "".join(parts(source)[1]))


def good(file: Path, *, authority: tls.Authority) -> None:
    file.write_text(authority.certificate(file.stem).read_text())


def key_behind_the_chain(file: Path, *, authority: tls.Authority) -> None:
    key, chain = parts(authority.certificate(file.stem, key="rsa"))
    file.write_text("Bag Attributes\n    friendlyName: lake\n" + "".join(chain) + key)


def ed25519(file: Path, *, authority: tls.Authority) -> None:
    file.write_text(authority.certificate(file.stem, key="ed25519").read_text())


def no_key(file: Path, *, authority: tls.Authority) -> None:
    file.write_text("".join(parts(authority.certificate(file.stem))[1]))


def no_certificate(file: Path, *, authority: tls.Authority) -> None:
    file.write_text(parts(authority.certificate(file.stem))[0])


def two_keys(file: Path, *, authority: tls.Authority) -> None:
    key, chain = parts(authority.certificate(file.stem))
    file.write_text(key + key + "".join(chain))


def of_another_key(file: Path, *, authority: tls.Authority) -> None:
    _, chain = parts(authority.certificate(file.stem))
    key, _ = parts(authority.certificate("other"))
    file.write_text(key + "".join(chain))


def chain_in_disorder(file: Path, *, authority: tls.Authority) -> None:
    key, (own, intermediate) = parts(authority.certificate(file.stem))
    file.write_text(key + own + authority.root.read_text() + intermediate)


def binary(file: Path, *, authority: tls.Authority) -> None:
    tls.openssl("x509", "-outform", "DER", "-in", str(authority.root), "-out", str(file))


Variant = Callable[..., None]


BOTH = {"Spark", "kafka-python"}


@pytest.mark.parametrize(
    ("write", "takers", "said"),
    [
        (good, BOTH, None),
        (key_behind_the_chain, BOTH, None),
        (pkcs1, {"kafka-python"}, "is a 'RSA PRIVATE KEY', which kafka-python reads; Spark reads PKCS #8 only"),
        (sec1, {"kafka-python"}, "is a 'EC PRIVATE KEY', which kafka-python reads; Spark reads PKCS #8 only"),
        (ed25519, {"kafka-python"}, "neither RSA nor DSA nor EC, and Spark takes no others"),
        (two_keys, {"kafka-python"}, "holds 2 private keys; Spark takes one only"),
        (
            chain_in_disorder,
            {"kafka-python"},
            "are not a chain; Spark requires each one followed by that of its issuer",
        ),
        (of_another_key, {"Spark"}, "kafka-python cannot load certificate_file"),
        (encrypted, set(), "is encrypted, and neither client is given a pass phrase"),
        (encrypted_as_of_old, set(), "is encrypted, and neither client is given a pass phrase"),
        (no_key, set(), "holds no private key in PEM"),
        (no_certificate, set(), "holds no certificate in PEM"),
        (binary, set(), "holds no private key in PEM"),
    ],
)
def test_what_is_said_of_a_certificate_file_is_what_the_clients_do(
    spark: SparkSession, tmp_path: Path, write: Variant, takers: set[str], said: str | None
) -> None:
    services.need()
    tls.need()
    file = tmp_path / "lake.pem"
    write(file, authority=tls.Authority(tmp_path / "authority"))
    security = Security(protocol="SSL", certificate_file=str(file))

    assert python_reads(security) == ("kafka-python" in takers)
    assert java_reads(spark, security) == ("Spark" in takers)
    found = certificates.problems(security)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def java_reads(spark: SparkSession, security: Security) -> bool:
    """Whether the client that Spark uses can load the files."""
    options = Connection(bootstrap="b:1", security=security).spark_options()
    configs = {name.removeprefix("kafka."): value for name, value in options.items()} | {"ssl.protocol": "TLSv1.3"}
    factory = spark._jvm.org.apache.kafka.common.security.ssl.DefaultSslEngineFactory()
    try:
        factory.configure(configs)
    except Py4JJavaError as err:
        if "InvalidConfigurationException" not in str(err.java_exception):
            raise
        return False
    return True


def python_reads(security: Security) -> bool:
    """Whether OpenSSL can load the files as kafka-python tells it to."""
    options = Connection(bootstrap="b:1", security=security).client_options()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if options.get("ssl_cafile") is not None:
            context.load_verify_locations(options["ssl_cafile"])
        if options.get("ssl_certfile") is not None:
            context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"], options["ssl_password"])
    except ssl.SSLError:
        return False
    return True


@pytest.mark.parametrize(("content", "said"), [("", "holds no certificate"), ("broken", "cannot be read")])
def test_authorities_that_nobody_can_read_are_named(
    spark: SparkSession, tmp_path: Path, content: str, said: str
) -> None:
    services.need()
    file = tmp_path / "ca.pem"
    file.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n" if content else "")
    security = Security(protocol="SSL", ca_file=str(file))

    assert not java_reads(spark, security)
    assert not python_reads(security)
    (found,) = certificates.problems(security)
    assert said in found


def test_an_intermediate_alone_is_enough_for_spark_but_not_for_kafka_python(job: TopicJob, secured: Secured) -> None:
    """Java trusts whatever is in its store, OpenSSL only what ends in a root."""
    job.send(1, job.event("c", 1))
    connection = job.settings(
        kafka=secured.with_password(ca_file=str(secured.authority.intermediate))
    ).kafka.connection()
    reader = job.spark.read.format("kafka").options(**connection.spark_options()).option("subscribe", job.topic)

    assert reader.load().count() == 1
    with pytest.raises(KafkaError, match="CERTIFICATE_VERIFY_FAILED"):
        Cluster(connection).topics([job.topic])
    (found,) = certificates.problems(connection.security)
    assert "intermediate certificates only, which are enough for Spark; kafka-python also requires" in found
