"""Errors between this client and a server, each a sentence with the server's words and the proxy's name."""

from __future__ import annotations

import errno
import json
import os
import re
import ssl
from dataclasses import dataclass, field

from specdec_cli.errors import RunError
from specdec_cli.measure.endpoint.address import Address
from specdec_cli.proxy import Proxy
from specdec_cli.text.printable import printable

TOO_MANY_FILES = os.strerror(errno.EMFILE).lower()
_MOST_WORDS = 300
_OTHER_FIELD = "max_completion_tokens"


class EndpointError(RunError):
    """A request that failed, and how.

    Args:
        message: one sentence, with the server's words.
        hint: what to do about it.
        status: of the HTTP answer, or None.
        is_gone: whether nothing answers at the address.
    """

    def __init__(
        self, message: str, hint: str | None = None, *, status: int | None = None, is_gone: bool = False
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.is_gone = is_gone


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes the errors of one server: without its key, and with the proxy between.

    Args:
        key: the API key, which no sentence may hold.
        proxy: what stands between, or None.
        address: the server's, with the options that name it and its model.
    """

    key: str | None = field(default=None, repr=False)
    proxy: Proxy | None = None
    address: Address = field(default_factory=lambda: Address("", ""))

    def error(
        self, message: str, hint: str | None = None, *, status: int | None = None, is_gone: bool = False
    ) -> EndpointError:
        """Make an error of a sentence; it names the proxy if there is one, which might be the cause."""
        if self.proxy is not None:
            message = f"{message}; asked through the {self.proxy}"
            hint = f"{hint}; {self.proxy.hint}" if hint else self.proxy.hint
        return EndpointError(message, hint, status=status, is_gone=is_gone)

    def refusal(self, url: str, status: int, text: str, location: str | None) -> EndpointError:
        """Make an error of an HTTP status and the server's words."""
        message, option = self.words(text), self.address.option
        told = f" ({status}): {message}" if message else f" ({status})"
        if status in (401, 403):
            hint = "give the key with --api-key, SPECDEC_API_KEY or OPENAI_API_KEY"
            refused = "the key" if self.key else "to be used without a key"
            return self.error(f"`{url}` refuses {refused}{told}", hint, status=status)
        if 300 <= status < 400:
            where = self.clean(location or "elsewhere")
            return self.error(f"`{url}` sends on to `{where}` ({status})", f"give that as {option}", status=status)
        options = [option, *([self.address.model_option] if self.address.model_option else [])]
        hints = {404: f"check {' and '.join(options)}", 429: "send fewer at a time: --concurrency"}
        if status in (400, 422) and _OTHER_FIELD in message and option == "--endpoint":
            hints[status] = f"--max-tokens-field {_OTHER_FIELD} sends the same number under that name"
        return self.error(f"`{url}` refused the request{told}", hints.get(status), status=status)

    def words(self, text: str) -> str:
        """The server's message, out of an OpenAI-shaped error or as it stands."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return self.clean(re.sub(r"<[^>]*>", " ", text))
        error = message.get("error") or message if isinstance(message, dict) else message
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        return self.clean(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))

    def clean(self, text: str) -> str:
        """A server's text on one short line, without control characters and without the key."""
        shown = text.replace(self.key, "***") if self.key else text
        shown = " ".join(printable(shown).split())
        return shown if len(shown) <= _MOST_WORDS else f"{shown[:_MOST_WORDS]}…"


def system_words(error: BaseException | None) -> str | None:
    """The operating system's error below the libraries' own, for example `connection refused`."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            reason = getattr(error, "reason", None) or "it failed"
            why = getattr(error, "verify_message", None) or reason.replace("_", " ").lower()
            return f"no secure connection: {why}"
        if isinstance(error, OSError) and error.errno:
            message = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
            return message[:1].lower() + message[1:]
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__
    return None
