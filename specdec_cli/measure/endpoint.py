"""An OpenAI-compatible server somewhere: one request, streamed, and the clock beside it.

A server is asked over HTTP alone: nothing here needs torch, a tokenizer or weights. What goes wrong becomes one
sentence with the server's own words in it; the key goes into a header and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.answer import Answer
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from httpx2 import Request, Response

_CONNECT_SECONDS = 10.0
_MOST_WORDS = 300
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
class Address:
    """Where a server is.

    Args:
        root: `http://host:port`, with whatever path a proxy puts before the API.
        api: the same with the API's version, `/v1` where none was given.
    """

    root: str
    api: str

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, which no proxy is asked about."""
        return urlsplit(self.root).hostname in _LOOPBACK


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


class Endpoint:
    """A server; an async context manager, open while it is asked.

    Args:
        address: where it is.
        key: sent as a bearer token; None sends none.
        timeout_s: longest silence of the server.
        concurrency: most requests at a time.

    Attributes:
        num_sent_again: requests whose connection broke before the answer's head, and that were sent anew.
    """

    def __init__(self, address: Address, key: str | None = None, timeout_s: float = 300, concurrency: int = 1) -> None:
        import httpx2

        self.address = address
        self.server: str | None = None
        self.num_sent_again = 0
        self._key, self._timeout_s = key, timeout_s
        self._client = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1),
            trust_env=not address.is_local,
        )

    async def __aenter__(self) -> Endpoint:
        """Open the connections."""
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""
        await self._client.__aexit__(kind, error, trace)

    async def models(self) -> list[str]:
        """The names of the server's models.

        Raises:
            EndpointError: it does not answer, or not with a list of models.
        """
        url = f"{self.address.api}/models"
        with self._clear_errors():
            response = await self._send(self._client.build_request("GET", url))
            await response.aread()
        if response.status_code != 200:
            raise self._refusal(response, url)
        self.server = response.headers.get("server")
        listed = self._json(response.text, url)
        rows = listed.get("data") if isinstance(listed, dict) else None
        names = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        return [name for name in names if isinstance(name, str)]

    async def text(self, path: str) -> str | None:
        """What stands at a path below the root; None where there is nothing."""
        import httpx2

        try:
            request = self._client.build_request("GET", self.address.root + path, timeout=_CONNECT_SECONDS)
            response = await self._send(request)
            await response.aread()
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return None
        return response.text if response.status_code == 200 else None

    async def version(self) -> str | None:
        """What `/version` says, as vLLM and specdec have it; None elsewhere."""
        text = await self.text("/version")
        try:
            said = json.loads(text or "null")
        except ValueError:
            return None
        version = said.get("version") if isinstance(said, dict) else None
        return printable(version)[:80] if isinstance(version, str) else None

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Send one request and read its stream to the end.

        Args:
            path: `/completions` or `/chat/completions`.
            body: the request, with `stream` set.

        Raises:
            EndpointError: it failed; the server's words are in the sentence.
        """
        from httpx2 import EventSource

        url = self.address.api + path
        answer = Answer(perf_counter())
        is_done = False
        with self._clear_errors():
            async with aclosing(await self._send(self._client.build_request("POST", url, json=body))) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(response, url)
                self._check_streams(response, url)
                async for event in EventSource(response):
                    now = perf_counter()
                    answer.end_s = now - answer.sent
                    is_done = is_done or event.data.strip() == "[DONE]"
                    if not is_done and event.data:
                        answer.feed(self._chunk(event.data, url), now)
        if not is_done and answer.finish_reason is None:
            raise EndpointError("the server ended its stream before the answer was finished", "look into its log")
        return answer

    async def _send(self, request: Request) -> Response:
        """The answer's head. A server may close a kept connection just when it is used again, so that is tried anew."""
        import httpx2

        try:
            return await self._client.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            self.num_sent_again += 1
            return await self._client.send(request, stream=True)

    def _check_streams(self, response: Response, url: str) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "text/event-stream":
            raise EndpointError(
                f"`{url}` answers with `{self._clean(kind) or 'no content type'}`, not with a stream of events",
                "only servers that stream (`stream: true`) can be measured",
            )

    def _chunk(self, data: str, url: str) -> dict[str, Any]:
        chunk = self._json(data, url)
        error = chunk.get("error") if isinstance(chunk, dict) else None
        if error:
            raise EndpointError(f"the server broke off its answer: {self._words(data)}")
        if not isinstance(chunk, dict):
            raise EndpointError(f"`{url}` streams something else than chunks: `{self._clean(data)[:60]}`")
        return chunk

    def _json(self, text: str, url: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            said = self._clean(text).strip()[:60]
            raise EndpointError(
                f"`{url}` answers with something that is no JSON: `{said}`", "is it an OpenAI-compatible server?"
            ) from None

    def _refusal(self, response: Response, url: str) -> EndpointError:
        """The error that an HTTP status and the server's words make."""
        status, said = response.status_code, self._words(response.text)
        told = f" ({status}): {said}" if said else f" ({status})"
        if status in (401, 403):
            hint = "give the key with --api-key, SPECDEC_API_KEY or OPENAI_API_KEY"
            refused = "the key" if self._key else "to be asked without a key"
            return EndpointError(f"`{url}` refuses {refused}{told}", hint, status=status)
        hints = {404: "check --endpoint and --endpoint-model", 429: "ask fewer at a time: --concurrency"}
        if 300 <= status < 400:
            where = self._clean(response.headers.get("location", "elsewhere"))
            return EndpointError(f"`{url}` sends on to `{where}` ({status})", "give that as --endpoint", status=status)
        return EndpointError(f"`{url}` refused the request{told}", hints.get(status), status=status)

    def _words(self, text: str) -> str:
        """The server's message, out of an OpenAI-shaped error or as it stands."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return self._clean(re.sub(r"<[^>]*>", " ", text))
        error = said.get("error", said) if isinstance(said, dict) else said
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        return self._clean(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))

    def _clean(self, text: str) -> str:
        """A server's text on one short line, without control characters and without the key."""
        shown = text.replace(self._key, "***") if self._key else text
        shown = " ".join(printable(shown).split())
        return shown if len(shown) <= _MOST_WORDS else f"{shown[:_MOST_WORDS]}…"

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn what the connection does wrong into a sentence."""
        import httpx2

        root = self.address.root
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            said = _system_words(error) or self._clean(str(error)) or "it does not answer"
            hint = "start the server, or check host and port"
            raise EndpointError(f"no server at `{root}`: {said}", hint, is_gone=True) from error
        except httpx2.TimeoutException as error:
            silence = f"the server was silent for {self._timeout_s:g} s"
            raise EndpointError(silence, "raise --endpoint-timeout, or look into its log") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            said = self._clean(str(error)) or type(error).__name__
            raise EndpointError(f"the connection to `{root}` broke: {said}", "look into the server's log") from error


def _system_words(error: BaseException | None) -> str | None:
    """What the operating system said, `connection refused` for example, below the libraries' own words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            said = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
            return said[:1].lower() + said[1:]
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__
    return None
