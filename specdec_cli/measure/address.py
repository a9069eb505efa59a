"""A server's address and its API key, as somebody typed them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from specdec_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Args:
        root: `http://host:port`, with whatever path a proxy puts before the API.
        api: the same with the API's version, `/v1` where none was given.
    """

    root: str
    api: str


def parse_address(url: str) -> Address:
    """Read `--endpoint`.

    Raises:
        UsageError: it is no address of a server, or holds a password or a query.
    """
    example = "for example --endpoint http://127.0.0.1:8000"
    try:
        parts = urlsplit(url.strip())
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise UsageError("`--endpoint` must be an http or https address with a host", example)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise UsageError("`--endpoint` must hold no user, password or query", "give a key with --api-key")
    path = parts.path.rstrip("/")
    version = re.search(r"/v\d+$", path)
    root = f"{parts.scheme}://{parts.netloc}{path[: version.start()] if version else path}"
    return Address(root, root + (version[0] if version else "/v1"))


def check_key(key: str | None) -> str | None:
    """A key that a header can hold; an empty one is none.

    Raises:
        UsageError: it has a space, a line break or a letter that no header takes.
    """
    key = (key or "").strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise UsageError("the API key has characters that no HTTP header takes", "check how it was pasted")
    return key or None
