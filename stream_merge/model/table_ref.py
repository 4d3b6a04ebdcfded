"""`TableRef`: a table as the user names it, parsed once: a catalog name, or a path or URI."""

from __future__ import annotations

import posixpath
import re
from functools import cached_property
from pathlib import Path

from stream_merge.model import names
from stream_merge.model.locations import canonical_location, hadoop_uri, local_path

_EMPTY_AUTHORITY = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):///")
_IN_STORE = re.compile(r"^(?P<store>[A-Za-z][A-Za-z0-9+.-]*://[^/]+)(?P<path>/.*)$", re.DOTALL)
_QUOTED = re.compile(r"`(?:[^`]|``)*`")
_PATH_IDENTIFIER = re.compile(r"^delta\.`(?P<path>.+)`$", re.IGNORECASE)


class TableRef(str):
    """The text as given, and its table: a path or URI (slash or colon outside of quotes), else a catalog name."""

    @cached_property
    def path(self) -> str | None:
        """The normalized path or URI; None for a catalog name.

        Without `delta.` wrapping, trailing slashes and the empty authority of `file:///`; S3 as `s3a:`. `orders/`
        becomes `./orders`, since `orders` is a name.
        """
        if not _denotes_path(self):
            return None
        wrapped = _PATH_IDENTIFIER.match(self.strip())
        path = wrapped.group("path").replace("``", "`") if wrapped else str(self)
        # Delta 4.4 takes file:///a and file:/a for two locations and refuses to create the table.
        plain = _EMPTY_AUTHORITY.sub(r"\g<scheme>:/", hadoop_uri(path)).rstrip("/") or "/"
        plain = _IN_STORE.sub(_resolved, plain)
        return plain if _denotes_path(plain) else f"./{plain}"

    @property
    def plain(self) -> str:
        """The normalized path, or the catalog name as it was given."""
        return str(self) if self.path is None else self.path

    @cached_property
    def local(self) -> Path | None:
        """The folder on this machine; None for a catalog name and for an object store."""
        return None if self.path is None else local_path(self.path)

    @cached_property
    def canonical(self) -> str:
        """One spelling per table, by its name alone."""
        if self.path is not None:
            return canonical_location(self.path)
        return ".".join(names.quote(part) for part in _parts(self.casefold()))

    @property
    def sql(self) -> str:
        """The table in SQL."""
        return str(self) if self.path is None else f"delta.{names.quote(self.path)}"

    @property
    def last(self) -> str:
        """The last part: table of a catalog name, folder of a path."""
        return _parts(self)[-1] if self.path is None else self.path.rsplit("/", 1)[-1]

    @property
    def is_root(self) -> bool:
        """Whether it is the root of an object store, beside which no table can be located."""
        inside = None if self.path is None else _IN_STORE.fullmatch(f"{self.path}/")
        return inside is not None and not inside["path"].strip("/")

    def beside(self, prefix: str) -> TableRef:
        """The table whose name has a prefix, in the same schema or parent folder."""
        if self.path is not None:
            parent, slash, last = self.path.rpartition("/")
            return TableRef(f"{parent}{slash}{prefix}{last}")
        *parents, last = _parts(self)
        return TableRef(".".join(names.quote(part) for part in [*parents, prefix + last]))

    @property
    def tombstones(self) -> TableRef:
        """Its tombstone table."""
        return self.beside(names.TOMBSTONE_TABLE_PREFIX)

    @property
    def quarantine(self) -> TableRef:
        """Its quarantine, unless a setting names another one."""
        return self.beside(names.QUARANTINE_TABLE_PREFIX)


def _denotes_path(text: str) -> bool:
    outside = text if _PATH_IDENTIFIER.match(text.strip()) else _QUOTED.sub("", text)
    return "/" in outside or ":" in outside


def _resolved(uri: re.Match[str]) -> str:
    """A URI without `.`, `..` and double slashes in its path, as Hadoop's `Path` resolves it."""
    inside = posixpath.normpath(f"/{uri['path'].lstrip('/')}").rstrip("/")
    return f"{uri['store']}{inside}"


def _parts(name: str) -> list[str]:
    """The parts of a (possibly quoted) SQL identifier, unquoted."""
    parts: list[str] = []
    part, quoted, i = "", False, 0
    while i < len(name):
        char = name[i]
        if char == "`":
            if quoted and name[i + 1 : i + 2] == "`":
                part, i = part + "`", i + 1
            else:
                quoted = not quoted
        elif char == "." and not quoted:
            parts, part = [*parts, part], ""
        else:
            part += char
        i += 1
    return [*parts, part]


def canonical_folder(path: str) -> str:
    """One spelling per checkpoint folder; without a slash, too, it is a path."""
    return canonical_location(TableRef(path).path or path)
