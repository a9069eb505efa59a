"""A server's address and its API key, as given by the user."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from specdec_cli.errors import UsageError

ENGINE_OPTION = "--engine-command"
"""The option that names a server which specdec starts."""
_MODEL_OPTIONS = {"--endpoint": "--endpoint-model", "--target-endpoint": "--target"}
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "0": "127.0.0.1", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server.

    Args:
        root: `http://host:port`, with whatever path a proxy puts before the API.
        api: the same with the API's version, `/v1` where none was given.
        option: that names it.
    """

    root: str
    api: str
    option: str = "--endpoint"

    @property
    def model_option(self) -> str | None:
        """The option that names a model of this server; None without one."""
        return _MODEL_OPTIONS.get(self.option)


def parse_address(url: str, flag: str = "--endpoint") -> Address:
    """Read `--endpoint`, or another option that names a server.

    Raises:
        UsageError: it is no address of a server, or holds a password or a query.
    """
    example = f"for example `{flag} http://127.0.0.1:8000`"
    try:
        parts = urlsplit(url.strip())
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise UsageError(f"`{flag}` must be an http or https address with a host", example)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise UsageError(f"`{flag}` must hold no user, password or query", "give a key with --api-key")
    path = parts.path.rstrip("/")
    version = re.search(r"/v\d+$", path)
    place = _reachable(parts.hostname or "", parts.netloc)
    root = f"{parts.scheme}://{place}{path[: version.start()] if version else path}"
    return Address(root, root + (version[0] if version else "/v1"), flag)


def _reachable(host: str, place: str) -> str:
    """Host and port to ask at: a wildcard address, which a server listens on, stands for this machine."""
    if host not in _WILDCARDS:
        return place
    port = place.rpartition("]")[2].rpartition(":")[2] if place.rpartition("]")[2].count(":") else ""
    return f"{_WILDCARDS[host]}{port and f':{port}'}"


def check_key(key: str | None) -> str | None:
    """Check that a header can hold a key; an empty one is none.

    Raises:
        UsageError: it has a space, a line break or a letter that no header takes.
    """
    key = (key or "").strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise UsageError("the API key has characters that no HTTP header takes", "check how it was pasted")
    return key or None
