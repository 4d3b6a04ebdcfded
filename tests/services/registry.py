"""A schema registry (Apicurio) with Confluent's API, as a server of its own."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services import ROOT, Server, free_port

FOUND = ROOT / ".jars" / "registry" / ".found"


def need() -> None:
    """Skip the test, with the reason, where there is no registry."""
    if not FOUND.exists():
        pytest.skip("the schema registry is not there; 'make test-all' gets it")


class Registry:
    """Apicurio 3.0; its schemas outlive a restart."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/apis/ccompat/v7"
        folder.mkdir(parents=True, exist_ok=True)
        home = os.environ.get("JAVA_HOME")
        (runner,) = FOUND.parent.glob("*-runner.jar")
        options = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": str(self.port),
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
            "apicurio.datasource.url": f"jdbc:h2:file:{folder}/schemas",
        }
        command = [f"{home}/bin/java" if home else "java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        command += [*(f"-D{name}={value}" for name, value in options.items()), "-jar", str(runner)]
        self._server = Server(command, folder)

    def start(self) -> None:
        self._server.start(self._answers)

    def stop(self) -> None:
        self._server.stop()

    def register(
        self, subject: str, schema: Any, *, kind: str = "AVRO", references: Sequence[tuple[str, str, int]] = ()
    ) -> int:
        """A version of a subject; the id of its schema.

        Args:
            subject: whatever its name.
            schema: as JSON.
            kind: AVRO or JSON.
            references: a name in the schema, and the subject and version that it stands for.
        """
        named = [{"name": name, "subject": at, "version": version} for name, at, version in references]
        body = {"schema": json.dumps(schema), "schemaType": kind, "references": named}
        answer = self._ask(f"/subjects/{subject}/versions", body)
        return int(answer["id"])

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as err:
            msg = f"{path}: {err.code} {err.read().decode()}"
            raise AssertionError(msg) from err

    def _answers(self) -> bool:
        try:
            self._ask("/subjects")
        except (OSError, AssertionError, ValueError):
            return False
        return True
