"""Reads schemas by their ids from a registry with Confluent's API (7.9; Apicurio 3.0 under `/apis/ccompat/v7`)."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from stream_merge.errors import ConfigError
from stream_merge.sources.wire.strict_json import NotRegisteredError

_TIMEOUT_SECONDS = 10.0
_REFUSALS = (401, 403)
_NOT_FOUND = 404
_NOT_REGISTERED = (40401, 40402, 40403)
"""`error_code` of a 404 for a subject, a version or a schema that is not there; any other 404 is for the path."""


class Registered(NamedTuple):
    """A schema and all that it refers to."""

    kind: str
    """AVRO, JSON or PROTOBUF."""
    text: str
    references: tuple[str, ...]
    """Texts of the schemas that it refers to, those that are referred to first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrySettings:
    """Where a registry is, and how this client proves who it is; nothing of it is logged."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None


class SchemaRegistry:
    """A client that caches schemas, which never change under an id. It stays in the driver: pickled it is None."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._known: dict[int, Registered] = {}
        self._context = _context(settings)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Workers do not ask the registry."""
        return type(None), ()

    def schema(self, schema_id: int) -> Registered:
        """A schema.

        Raises:
            NotRegisteredError: the registry has no schema with this id.
            ConfigError: it refuses this client, or is not at this URL.
            ConnectionError: it cannot be reached, or fails.
        """
        if schema_id not in self._known:
            found = self._get(f"/schemas/ids/{schema_id}", f"schema {schema_id}")
            self._known[schema_id] = Registered(
                kind=str(found.get("schemaType", "AVRO")),
                text=str(found.get("schema")),
                references=tuple(self._references(found, set())),
            )
        return self._known[schema_id]

    def _references(self, schema: dict[str, Any], seen: set[tuple[str, Any]]) -> list[str]:
        texts: list[str] = []
        for one in schema.get("references") or ():
            subject, version = str(one["subject"]), one["version"]
            if (subject, version) not in seen:
                seen.add((subject, version))
                path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
                found = self._get(path, f"version {version} of subject {subject!r}")
                texts += [*self._references(found, seen), str(found.get("schema"))]
        return texts

    def _get(self, path: str, what: str) -> dict[str, Any]:
        request = urllib.request.Request(self._settings.url.rstrip("/") + path, headers=_headers(self._settings))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=self._context) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as err:
            with err:
                raise _refusal(err, what) from None
        except ValueError:
            found = None
        except (OSError, http.client.HTTPException) as err:
            why = getattr(err, "reason", None) or err
            if isinstance(why, ssl.SSLCertVerificationError):
                msg = (
                    f"[REGISTRY_REFUSED] the schema registry's certificate is not trusted: {why.verify_message};"
                    " correct schema_registry.ca_file"
                )
                raise ConfigError(msg) from err
            msg = f"[REGISTRY_UNREACHABLE] the schema registry at {self._settings.url} cannot be reached: {why}"
            raise ConnectionError(msg) from err
        if not isinstance(found, dict):
            msg = f"[REGISTRY_UNREACHABLE] the schema registry's answer to the request for {what} is not a JSON object"
            raise ConnectionError(msg)
        return found


def _refusal(err: urllib.error.HTTPError, what: str) -> Exception:
    answers = f"the schema registry answers {err.code} to the request for {what}"
    if err.code in _REFUSALS:
        return ConfigError(f"[REGISTRY_REFUSED] {answers}; correct schema_registry.user and password, or token")
    if err.code != _NOT_FOUND:
        return ConnectionError(f"[REGISTRY_UNREACHABLE] {answers}")
    try:
        code = json.load(err).get("error_code")
    except (OSError, ValueError, AttributeError):
        code = None
    if code in _NOT_REGISTERED:
        return NotRegisteredError(f"the schema registry has no {what}")
    return ConfigError(f"[REGISTRY_REFUSED] {answers}; correct schema_registry.url")


def _headers(settings: RegistrySettings) -> dict[str, str]:
    headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
    if settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token}"
    elif settings.user is not None:
        pair = f"{settings.user}:{settings.password or ''}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    return headers


def _context(settings: RegistrySettings) -> ssl.SSLContext | None:
    if not settings.url.startswith("https:"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.certificate_file is not None:
            context.load_cert_chain(settings.certificate_file, password="")
    except OSError as err:
        msg = f"[CANNOT_READ_FILE] schema_registry: ca_file or certificate_file is not a PEM that can be used: {err}"
        raise ConfigError(msg) from err
    return context
