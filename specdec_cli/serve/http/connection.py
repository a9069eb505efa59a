"""HTTP on one connection: uvicorn's with h11, with our form of error for bytes that are no HTTP."""

from __future__ import annotations

import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec_cli.serve.errors import ApiError


class HttpConnection(H11Protocol):
    """A connection, which closes after a request that cannot be read."""

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer is under way; `msg` is uvicorn's."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = ApiError(400, f"the request is no valid HTTP: {sys.exception() or msg}", code="invalid_http")
            body = json.dumps(error.body(), separators=(",", ":")).encode()
            length = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
