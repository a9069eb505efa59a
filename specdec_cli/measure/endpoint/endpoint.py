"""An OpenAI-compatible server somewhere: one request, streamed, and the clock beside it.

A server is asked over HTTP alone: nothing here needs torch, a tokenizer or weights. What goes wrong becomes one
sentence with the server's own words in it; the key goes into a header and nowhere else.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.endpoint.address import Address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.refusal import TOO_MANY_FILES, EndpointError, Reporter, system_words
from specdec_cli.measure.endpoint.request_fields import MaxTokensField
from specdec_cli.proxy import Proxy, proxy_of
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from ssl import SSLContext

    from httpx2 import AsyncHTTPTransport, Request, Response

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 60.0


class Endpoint:
    """A server; an async context manager, open while it is asked.

    Args:
        address: where it is.
        key: sent as a bearer token; None sends none.
        timeout_s: longest silence of the server.
        concurrency: most requests at a time; None sets no limit.

    Attributes:
        proxy: what stands between, as the environment says; None to this machine and wherever NO_PROXY names it.
        owner: `owned_by` of the first model that the server lists; `specdec` is this package's own server.
        num_sent_again: requests that found their kept connection closed and were sent again on another one.
        num_requests: answers that were read whole.
        num_bytes: of these requests' and answers' bodies.

    Raises:
        UsageError: the environment names a proxy that cannot be used.
    """

    def __init__(
        self, address: Address, key: str | None = None, timeout_s: float = 300, concurrency: int | None = 1
    ) -> None:
        import httpx2

        self.address = address
        self.proxy = proxy_of(address.root)
        self.server: str | None = None
        self.owner: str | None = None
        self.num_sent_again = 0
        self.num_requests = self.num_bytes = 0
        self._timeout_s = timeout_s
        self._say = Reporter(key, self.proxy, address)
        self._client = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_SECONDS),
            transport=_transport(self.proxy, None if concurrency is None else concurrency + 1),
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
            response = await self._get(url)
        if response.status_code != 200:
            raise self._refusal(response, url)
        self.server = response.headers.get("server")
        listed = self._json(response.text, url)
        if isinstance(listed, dict) and listed.get("error"):
            raise self._say.error(f"`{url}` answers with an error: {self._say.words(response.text)}")
        rows = listed.get("data") if isinstance(listed, dict) else None
        models = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        self.owner = next((row["owned_by"] for row in models if isinstance(row.get("owned_by"), str)), None)
        names = [row.get("id") for row in models]
        return [name for name in names if isinstance(name, str)]

    async def choose_model(self, named: str) -> str:
        """The model to request: the given one, else the first that the server lists.

        Raises:
            EndpointError: the server does not answer, or does not list models although none is named.
            RunError: it lists none.
        """
        offered: list[str] = []
        try:
            offered = await self.models()
        except EndpointError as error:
            if error.is_gone or not named:
                raise
        if not named and not offered:
            option = self.address.model_option
            hint = f"check {self.address.option}" if option is None else f"name one with {option}"
            raise RunError(f"the server at `{self.address.root}` lists no model", hint)
        return named or offered[0]

    async def text(self, path: str) -> str | None:
        """The resource at a path below the root; None if there is none."""
        import httpx2

        try:
            response = await self._get(self.address.root + path, _CONNECT_SECONDS)
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return None
        return response.text if response.status_code == 200 else None

    async def version(self) -> str | None:
        """The version from `/version`, as in vLLM and specdec; None for other servers."""
        text = await self.text("/version")
        try:
            message = json.loads(text or "null")
        except (ValueError, RecursionError):
            return None
        version = message.get("version") if isinstance(message, dict) else None
        return printable(version)[:80] if isinstance(version, str) else None

    async def ask(self, path: str, body: dict[str, Any], watch: Callable[[Answer], None] | None = None) -> Answer:
        """Send one request and read its stream to the end.

        Args:
            path: `/completions` or `/chat/completions`.
            body: the request, with `stream` set.
            watch: called with the answer so far after each event of the stream.

        Raises:
            EndpointError: it failed; the server's words are in the sentence.
        """
        from httpx2 import EventSource

        url = self._url(path)
        answer = Answer(perf_counter())
        request = self._client.build_request("POST", url, json=body)
        with self._clear_errors():
            response, answer.opened_connection = await self._send(request)
            async with aclosing(response):
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(response, url)
                await self._check_streams(response, url)
                async with asyncio.timeout(self._timeout_s) as patience:
                    async for event in EventSource(response):
                        patience.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                        self._take(answer, event.event, event.data, url)
                        if watch is not None:
                            watch(answer)
        if answer.fault is not None:
            raise self._say.error(answer.fault, "check its log")
        answer.check_usage(next((body[name] for name in get_args(MaxTokensField) if name in body), None))
        return answer

    async def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request that is not streamed.

        Args:
            path: `/completions` or `/chat/completions`.
            body: the request.

        Raises:
            EndpointError: it failed; the server's words are in the sentence.
        """
        answer = await self._post(path, body)
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list) or not answer["choices"]:
            words = self._say.words(json.dumps(answer))
            raise self._say.error(f"`{self._url(path)}` answers without choices: {words}")
        return answer

    def _url(self, path: str) -> str:
        """Address of a path of the API."""
        return self.address.api + path

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Send one request that is not streamed, and read its JSON."""
        url = self._url(path)
        request = self._client.build_request("POST", url, json=body)
        with self._clear_errors():
            response, _ = await self._send(request)
            async with aclosing(response):
                await response.aread()
        if response.status_code != 200:
            raise self._refusal(response, url)
        self.num_bytes += len(request.content) + len(response.content)
        self.num_requests += 1
        return self._json(response.text, url)

    async def _get(self, url: str, timeout_s: float | None = None) -> Response:
        """Send a GET request and read the whole answer."""
        request = self._client.build_request("GET", url, timeout=timeout_s or self._client.timeout)
        response, _ = await self._send(request)
        async with aclosing(response):
            await response.aread()
        return response

    async def _send(self, request: Request) -> tuple[Response, bool]:
        """Send a request; gives the answer's head, and whether a connection was opened for it.

        A server may close a kept connection just when it is used again, so the request is retried.
        """
        import httpx2

        events: list[str] = []

        async def trace(event: str, _: dict[str, Any]) -> None:
            events.append(event)

        def opened() -> bool:
            return any(event.endswith("connect_tcp.started") for event in events)

        request.extensions["trace"] = trace
        try:
            return await self._client.send(request, stream=True), opened()
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            if opened():
                raise
            self.num_sent_again += 1
            return await self._client.send(request, stream=True), opened()

    async def _check_streams(self, response: Response, url: str) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "text/event-stream":
            await response.aread()
            raise self._say.error(
                f"`{url}` answers with `{self._say.clean(kind) or 'no content type'}`, not with a stream of events: "
                f"{self._say.words(response.text) or 'it is empty'}",
                "only servers that stream (`stream: true`) can be measured",
            )

    def _take(self, answer: Answer, event: str, data: str, url: str) -> None:
        """Add one event of a stream to its answer; events behind the end are ignored."""
        now = perf_counter()
        if answer.is_done:
            return
        answer.end_s = now - answer.sent
        if data.strip() == "[DONE]":
            answer.is_done = True
        elif data.strip():
            answer.num_bytes += len(data.encode())
            answer.feed(self._chunk(event, data, url), now)

    def _chunk(self, event: str, data: str, url: str) -> dict[str, Any]:
        """A chunk of an answer; errors come as `error`, as an event of that name, or as an object that is one."""
        if event == "error":
            raise self._say.error(f"the server broke off its answer: {self._say.words(data)}")
        chunk = self._json(data, url)
        if isinstance(chunk, dict) and (chunk.get("error") or chunk.get("object") == "error"):
            raise self._say.error(f"the server broke off its answer: {self._say.words(data)}")
        is_chunk = isinstance(chunk, dict) and (isinstance(chunk.get("choices"), list) or "usage" in chunk)
        if is_chunk or (isinstance(chunk, dict) and event != "message"):
            return dict(chunk)
        raise self._say.error(f"`{url}` streams something else than chunks: `{self._say.clean(data)[:60]}`")

    def _json(self, text: str, url: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            message = self._say.clean(text).strip()[:60]
            raise self._say.error(
                f"`{url}` answers with something that is not JSON: `{message}`", "is it an OpenAI-compatible server?"
            ) from None

    def _refusal(self, response: Response, url: str) -> EndpointError:
        return self._say.refusal(url, response.status_code, response.text, response.headers.get("location"))

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn errors of the connection into sentences."""
        import httpx2

        root = self.address.root
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            message = system_words(error) or self._say.clean(str(error)) or "it does not answer"
            if message == TOO_MANY_FILES:
                hint = "limit the open requests with --concurrency, or raise ulimit -n"
                raise self._say.error(f"no connection to `{root}`: {message}", hint) from error
            hint = "start the server, or check host and port" if self.proxy is None else "check the proxy"
            raise self._say.error(f"no server at `{root}`: {message}", hint, is_gone=True) from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            silence = f"the server was silent for {self._timeout_s:g} s"
            raise self._say.error(silence, "raise --endpoint-timeout, or check its log") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            message = self._say.clean(str(error)) or type(error).__name__
            raise self._say.error(f"the connection to `{root}` broke: {message}", "check the server's log") from error


@functools.cache
def _certificates() -> SSLContext:
    """The authorities that are trusted, which every connection of a process shares: reading them takes long."""
    import httpx2

    return httpx2.create_ssl_context()


def _transport(proxy: Proxy | None, num_connections: int | None) -> AsyncHTTPTransport:
    """The HTTP client. Connections are kept open, even between rare requests."""
    import httpx2

    limits = httpx2.Limits(
        max_connections=num_connections, max_keepalive_connections=num_connections, keepalive_expiry=_IDLE_SECONDS
    )
    try:
        if proxy is not None and not urlsplit(proxy.url).hostname:
            raise ValueError("it has no host")
        its_proxy = None if proxy is None else proxy.url
        return httpx2.AsyncHTTPTransport(verify=_certificates(), limits=limits, proxy=its_proxy)
    except ImportError:
        assert proxy is not None, "only a SOCKS proxy needs another package"
        raise UsageError(f"the {proxy} needs the package `socksio`", f"install it; {proxy.hint}") from None
    except (ValueError, httpx2.InvalidURL):
        assert proxy is not None, "only a proxy has an address of its own"
        hint = f"for example http://host:3128; {proxy.hint}"
        raise UsageError(f"the {proxy} is not a proxy's address", hint) from None
