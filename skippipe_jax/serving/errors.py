"""Errors of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skippipe_sched.errors import InputError, SkipPipeError

from skippipe_jax.errors import PeerError

INVALID = "invalid_request_error"
AGAIN_S = 1
"""Seconds after which a refused client may retry."""


class ApiError(SkipPipeError):
    """Refusal of a request: an HTTP status and the API's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ):
        """Keep the error for the client; `param` is the wrong parameter of the request."""
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts from which another process rebuilds the error."""
        return type(self), (self.status, str(self)), vars(self)

    @property
    def body(self) -> dict[str, Any]:
        """Body of the response."""
        return {"error": self.error}


class Unavailable(PeerError):
    """Decoding is impossible at the moment, as a stage is lost."""


def wrong(param: str, error: InputError) -> ApiError:
    """Return the error of a request with an invalid parameter."""
    return ApiError(400, f"{param}: {error.problem}. {error.remedy}.", param=param)


def queue_full() -> ApiError:
    """Return the error of a request when the queue is full."""
    return ApiError(
        429,
        "too many requests are waiting: try again later",
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": str(AGAIN_S)},
    )


def unavailable(why: str) -> ApiError:
    """Return the error of a request when hosts are missing."""
    headers = {"Retry-After": str(AGAIN_S)}
    return ApiError(503, why, kind="server_error", headers=headers)


def failed() -> ApiError:
    """Return the error of a request when the engine has failed."""
    return ApiError(500, "the engine has failed, and the server shuts down", kind="server_error")
