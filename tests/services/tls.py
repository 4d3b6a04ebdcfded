"""Certificates of a test's own, and a broker that asks for passwords and certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from services import Broker

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


def need() -> None:
    """Skip the test, with the reason, where no certificates can be made."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not there; it makes the certificates")


def openssl(*args: str) -> str:
    return subprocess.run(["openssl", *args], check=True, capture_output=True, text=True).stdout


class Authority:
    """A root, and an intermediate that signs for it."""

    def __init__(self, folder: Path, *, name: str = "test") -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.root = self._made(f"{name} root", None, "basicConstraints=critical,CA:TRUE")
        self.intermediate = self._made(f"{name} intermediate", self.root, "basicConstraints=critical,CA:TRUE")

    def certificate(self, name: str, *, key: str = "ec") -> Path:
        """A PEM with key (PKCS #8), certificate and intermediate, for 127.0.0.1."""
        made = self._made(
            name, self.intermediate, "basicConstraints=critical,CA:FALSE", "subjectAltName=IP:127.0.0.1", key=key
        )
        found = self._folder / f"{name}.chain.pem"
        parts = [made.with_suffix(".key"), made, self.intermediate]
        found.write_text("".join(part.read_text() for part in parts))
        return found

    def _made(self, name: str, issuer: Path | None, *extensions: str, key: str = "ec") -> Path:
        file = self._folder / f"{name.replace(' ', '-')}.crt"
        kinds = {"ec": ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"], "rsa": ["rsa:2048"], "ed25519": ["ed25519"]}
        command = ["req", "-x509", "-days", "2", "-nodes", "-subj", f"/CN={name}", "-newkey", *kinds[key]]
        command += ["-keyout", str(file.with_suffix(".key")), "-out", str(file)]
        command += [part for extension in extensions for part in ("-addext", extension)]
        if issuer is not None:
            command += ["-CA", str(issuer), "-CAkey", str(issuer.with_suffix(".key"))]
        # "-addext basicConstraints" beside the one of openssl's own configuration would be there twice.
        openssl(*command, "-config", str(self._config()))
        return file

    def _config(self) -> Path:
        file = self._folder / "openssl.cnf"
        file.write_text("[req]\ndistinguished_name = name\n[name]\n")
        return file


def secured_broker(folder: Path, authority: Authority) -> Broker:
    """A broker that listens with SASL_SSL (SCRAM-SHA-512) and with SSL (certificates on both sides), too."""
    settings = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.certificate("broker")),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.root),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": SCRAM,
        "listener.name.ssl.ssl.client.auth": "required",
    }
    return Broker(folder, settings=settings, listeners=("SASL_SSL", "SSL"))
