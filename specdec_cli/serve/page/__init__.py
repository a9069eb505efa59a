"""The page at `/`: one file that loads nothing else, and its content security policy."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WebPage:
    """A page as it is sent.

    Args:
        body: the HTML document, UTF-8.
        content_security_policy: the header of that name. Its own script and style run by their hashes, it may talk to
            this server alone, and nothing may frame it.
    """

    body: bytes
    content_security_policy: str


@cache
def read_page() -> WebPage:
    """The page and its policy, read once; key and data stay out of it, so it may be served to anyone."""
    return page_of(files(__package__).joinpath("index.html").read_text(encoding="utf-8"))


def page_of(html: str) -> WebPage:
    """A page of HTML, and the policy under which its own scripts and styles run, and no others."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = b64encode(sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]) or "'none'",
        "style-src": " ".join(hashes["style"]) or "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return WebPage(html.encode(), "; ".join(f"{name} {sources}" for name, sources in rules.items()))
