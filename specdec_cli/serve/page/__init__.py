"""The page at `/`: one file without anything from elsewhere, and the policy that a browser is to hold it to."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """What `GET /` answers.

    Args:
        body: the HTML document, UTF-8.
        content_security_policy: the header of that name. Its own script and style run by their hashes, it may talk to
            this server alone, and nothing may frame it.
    """

    body: bytes
    content_security_policy: str


@cache
def read_page() -> Page:
    """The page and its policy, read once; key and data stay out of it, so it may be served to anyone."""
    html = files(__package__).joinpath("index.html").read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = b64encode(sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(html.encode(), "; ".join(f"{name} {sources}" for name, sources in rules.items()))
