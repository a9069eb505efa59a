"""One client's connection: uvicorn's own, with deadlines for those who begin to speak and never end."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.respond import compact

HEAD_SECONDS = 20.0
"""How long the head of a request may take, from the connection or from its first byte on."""
LINGER_SECONDS = 2.0
"""How long a client that was answered before its body ended may take to read that."""


class Connection(H11Protocol):
    """Speaks HTTP/1.1; a head that does not come is a 408, and nobody's body is read after the answer."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_head()

    def handle_events(self) -> None:
        """Act on what was received; a whole head ends its deadline."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()

    def on_response_complete(self) -> None:
        """An answer is out; what the client still sends of its body is of no use."""
        super().on_response_complete()
        if self._is_answered_early():
            self.loop.call_later(LINGER_SECONDS, self._end_early)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._forget_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's form."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _is_answered_early(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _end_early(self) -> None:
        if self._is_answered_early():
            self.transport.abort()

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        said = f"the head of the request did not come within `{HEAD_SECONDS:g}` seconds"
        self._refuse(ApiError(408, said, code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request, and end the connection."""
        body = compact(error.body())
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            phrase = HTTPStatus(error.status).phrase.encode()
            answer = h11.Response(status_code=error.status, headers=head, reason=phrase)
            events = (answer, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
