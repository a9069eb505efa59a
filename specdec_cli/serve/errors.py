"""Errors as OpenAI's clients expect them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any, Final

from specdec_cli.engine.jobs.bridge import OWN_FAULTS
from specdec_cli.errors import QueueFull, SpecdecError, Unavailable

INVALID: Final = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that becomes the answer to a request.

    Args:
        status: HTTP status.
        message: one sentence, the value in backticks.
        param: the request's field that is wrong (`messages[0].content`), or None.
        code: a word for programs, such as `model_not_found`, or None.
        type: OpenAI's class of error; follows from the status if not given.
        headers: HTTP headers beside the body, such as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, INVALID if status < 500 else "server_error")
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON document of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ClientGoneError(ApiError):
    """A client disconnected before its answer; the error appears in the log only.

    Args:
        before: what it did not wait for.
    """

    def __init__(self, before: str) -> None:
        super().__init__(499, f"the client disconnected before {before}", code="client_gone")


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names a field; the message follows the field's name, as in `temperature must be …`."""
    return ApiError(400, message if param is None else f"`{param}` {message}", param=param, code=code)


def unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    """A 404 for a model that is not served."""
    known = ", ".join(f"`{name}`" for name in served)
    return ApiError(
        404, f"the model `{name}` does not exist; served here: {known}", param="model", code="model_not_found"
    )


def as_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Any exception as an answer: wrong use and a grammar that leads nowhere are 400, a full queue 429, the rest 500.

    Args:
        error: what was raised.
        param: the field to name where the error knows none.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull | Unavailable):
        status, code = (429, "queue_full") if isinstance(error, QueueFull) else (503, error.code)
        retry = {"Retry-After": str(error.retry_after_seconds)}
        return ApiError(status, _sentence(error), code=code, headers=retry)
    if isinstance(error, OWN_FAULTS):
        return ApiError(400, _sentence(error), param=param)
    if isinstance(error, SpecdecError):
        return ApiError(500, _sentence(error), code="run_error")
    return ApiError(500, f"the server failed: `{type(error).__name__}`", code="internal_error")


def _sentence(error: SpecdecError) -> str:
    return error.message if error.hint is None else f"{error.message}; {error.hint}"
