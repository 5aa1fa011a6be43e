"""HTTP routes of a service: authentication, request bodies and error responses."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from skippipe_sched.errors import SHOWN_CHARACTERS
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from skippipe_jax import log
from skippipe_jax.data.tokenizer import MARKS
from skippipe_jax.serving.choices import ChoicePiece
from skippipe_jax.serving.engine import Engines
from skippipe_jax.serving.errors import ApiError
from skippipe_jax.serving.metrics import Metrics
from skippipe_jax.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from skippipe_jax.serving.service import Job, Served

MAX_BODY_BYTES = 4 << 20
"""Largest body of a request."""
MAX_DROPPED_BYTES = 16 * MAX_BODY_BYTES
"""Bytes of a larger body that are read and dropped, so that the client reads the error."""
BODY_S = 60.0
"""Seconds within which a client must send a body."""
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client has disconnected, as in nginx."""

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class App:
    """Handlers of all routes."""

    def __init__(
        self,
        served: Served,
        engines: Engines,
        metrics: Metrics,
        created: int,
        keys: tuple[str, ...] = (),
        hosts: Callable[[], list[dict[str, Any]]] = list,
    ):
        """Serve a model to clients with one of `keys`, or to all without keys.

        `created` is the model's time in seconds of the epoch; `hosts` describes the stage hosts.
        """
        self._hosts = hosts
        self._served, self._engines, self._metrics = served, engines, metrics
        self._created, self._keys = created, [key.encode() for key in keys]
        # Marks without texts in the tokenizer get the texts that an export gives them.
        self._marks = served.tokenizer.special_tokens or MARKS

    def starlette(self) -> Starlette:
        """Return the application, which starts and stops the engine threads."""

        @asynccontextmanager
        async def running(_: Starlette) -> AsyncIterator[None]:
            self._engines.start()
            yield
            await asyncio.to_thread(self._engines.stop)

        def route(path: str, handler: Handler, method: str = "GET") -> Route:
            guarded = path not in ("/health", "/ready", "/metrics")
            return Route(path, self._with_errors(handler, guarded=guarded), methods=[method])

        routes = [
            route("/health", self._health),
            route("/ready", self._health),
            route("/metrics", self._show_metrics),
            route("/status", self._status),
            route("/v1/models", self._models),
            route("/v1/models/{name:path}", self._model),
            route("/v1/completions", partial(self._answer, kind=CompletionRequest), "POST"),
            route("/v1/chat/completions", partial(self._answer, kind=ChatRequest), "POST"),
            route("/tokenizer_info", self._tokenizer_info),
            route("/tokenize", self._tokenize, "POST"),
            route("/detokenize", self._detokenize, "POST"),
        ]
        handlers = {HTTPException: self._no_route}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=running)

    def _with_errors(self, handler: Handler, *, guarded: bool) -> Handler:
        """Wrap a handler: check the key if `guarded`, and turn an `ApiError` into a response."""

        async def answer(request: Request) -> Response:
            try:
                if guarded:
                    self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return self._refuse(request, error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)

        return answer

    def _check_key(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        has_key = [hmac.compare_digest(token.strip().encode(), key) for key in self._keys]
        if self._keys and not (any(has_key) and scheme.lower() == "bearer"):
            message = "the API key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", kind="authentication_error")

    def _refuse(self, request: Request, error: ApiError) -> Response:
        self._metrics.refused(error.status)
        client = request.client.host if request.client else "?"
        line = f"{client} {request.method} {request.url.path}: {error.status}, {error}"
        log.info(line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}...")
        return _json(error.body, error.status, error.headers)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        api_error = ApiError(
            error.status_code, f"{error.detail}: {request.url.path}", headers=headers
        )
        return self._refuse(request, api_error)

    # Health and metrics.

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self._engines.error is None else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _status(self, _: Request) -> Response:
        served, load = self._served, self._engines.load()
        hosts = await asyncio.to_thread(self._hosts)
        return _json({"model": served.name, "stages": served.stages, **load, "hosts": hosts})

    # The model.

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name:
            message = f"the model {name!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "skippipe",
            "max_model_len": served.context,
            "skippipe": {"stages": list(range(served.stages))},
        }

    # Answers.

    async def _answer(
        self, request: Request, kind: type[CompletionRequest | ChatRequest]
    ) -> Response:
        parsed = parse(await _body(request), kind)
        # Tokenizing a long prompt must not delay the streams of other clients.
        job = await asyncio.to_thread(Job, parsed, self._served, self._engines.capacity)
        sequences = self._engines.submit(job.requests)
        pieces = job.pieces(sequences, self._engines, self._metrics)
        if parsed.stream:
            return _Stream(job.events(pieces), lambda: self._engines.cancel(sequences))
        gathered = await _unless_disconnected(request, _gathered(pieces))
        return _json(job.answer(gathered))

    # The tokenizer, under vLLM's names: the evaluation harness reads the context length here.

    async def _tokenizer_info(self, _: Request) -> Response:
        marks = dict.fromkeys(MARKS) | dict(self._marks)
        return _json(marks | {"chat_template": self._served.tokenizer.chat_template})

    async def _tokenize(self, request: Request) -> Response:
        parsed = parse(await _body(request), TokenizeRequest)
        tokenizer = self._served.tokenizer
        begin = [tokenizer.begin] if parsed.add_special_tokens else []
        marks = {"bos_token": tokenizer.begin, "eos_token": tokenizer.end}
        mark = next((marks[name] for name in marks if self._marks.get(name) == parsed.prompt), None)
        encoded = await asyncio.to_thread(tokenizer.encode, parsed.prompt)
        tokens = [*begin, *(map(int, encoded) if mark is None else [mark])]
        return _json(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._served.context}
        )

    async def _detokenize(self, request: Request) -> Response:
        tokens = parse(await _body(request), DetokenizeRequest).tokens
        if any(not 0 <= token < self._served.vocabulary_size for token in tokens):
            most = self._served.vocabulary_size - 1
            raise ApiError(400, f"tokens: each must be 0 to {most}", param="tokens")
        return _json({"prompt": self._served.tokenizer.decode(tokens)})


class _Stream(StreamingResponse):
    """Response of server-sent events; calls `on_end` however it ends, even before the first."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events, self._on_end = events, on_end

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._on_end()


async def _gathered(pieces: AsyncIterator[ChoicePiece]) -> list[ChoicePiece]:
    async with aclosing(pieces):  # type: ignore[type-var]
        return [piece async for piece in pieces]


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, or cancel it when the client disconnects.

    Raises:
        ClientDisconnect: if the client has disconnected.
    """
    task = asyncio.create_task(work)
    # The body has been read, so the next message can only be the disconnect.
    disconnected = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnected.cancel()
        task.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _body(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: if its content type is not JSON, or it is too large or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send Content-Type: application/json")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BODY_BYTES:
                    body += chunk
                elif size > MAX_DROPPED_BYTES:
                    break
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s") from error
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )
