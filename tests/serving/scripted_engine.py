"""An engine without a model, whose answers a test decides, and servers in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from skippipe_jax.data.tokenizer import ByteTokenizer
from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest, ScoredToken
from skippipe_jax.serving.server import Server, listen
from skippipe_jax.serving.service import Served

TOKENIZER = ByteTokenizer()
NAME = "scripted"
PATIENCE_S = 20.0


def served(context: int = 256, **changes: object) -> Served:
    """A model of bytes, of three stages."""
    given = {
        "name": NAME,
        "tokenizer": TOKENIZER,
        "context": context,
        "stages": 3,
        "vocabulary_size": TOKENIZER.vocabulary_size,
        "turn_end": None,
        "converses": True,
        "today": "2026-11-26",
    }
    return Served(**given | changes)  # type: ignore[arg-type]


def answer_of(text: str) -> list[int]:
    """The tokens of an answer that ends by itself."""
    return [*map(int, TOKENIZER.encode(text)), TOKENIZER.end]


class ScriptedEngine:
    """Answers each request by what `script` says, a token in each step."""

    def __init__(self, script: Callable[[DecodeRequest], Sequence[int]], slots: int = 4):
        self.script, self.slots = script, slots
        self.cancelled: list[int] = []
        self.seen: list[DecodeRequest] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.failure: Exception | None = None
        self._left: dict[int, tuple[DecodeRequest, list[int]]] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def submit(self, request: DecodeRequest, number: int) -> None:
        self.seen.append(request)
        self._left[number] = request, [*self.script(request)][: request.max_new_tokens]

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self._left.pop(number, None)

    def close(self) -> None:
        self.may_go_on.set()

    def step(self, on_wait: Callable[[], None] = lambda: None) -> list[Decoded]:
        on_wait()
        if self.failure is not None:
            raise self.failure
        if not self.may_go_on.wait(0.01):
            return []
        decoded = []
        for number in list(self._left)[: self.slots]:
            request, tokens = self._left[number]
            is_first = len(tokens) == min(len([*self.script(request)]), request.max_new_tokens)
            prompt = ()
            if is_first and request.scores_prompt:
                prompt = tuple(scored(token) for token in request.prompt[1:])
            token = scored(tokens.pop(0)) if tokens else None
            decoded.append(Decoded(number, not tokens, token, prompt))
            if not tokens:
                del self._left[number]
        return decoded


def scored(token: int) -> ScoredToken:
    """A token with probabilities that tell which token it is."""
    return ScoredToken(token, -token / 100, ((token, -token / 100), (65, -9.0)))


@contextlib.contextmanager
def serving(
    engine: Any, what: Served | None = None, most_waiting: int = 256, keys: tuple[str, ...] = ()
) -> Iterator[str]:
    """Serve in a thread; yields the address, as URL."""
    listening, what = listen("127.0.0.1", 0, keys), served() if what is None else what
    server = Server(what, [engine], most_waiting=most_waiting, drain_s=5, keys=keys)
    failures = []

    def answer() -> None:
        try:
            server.answer(listening)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    eventually(lambda: server.started or not thread.is_alive())
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        if failures and failures[0] is not getattr(engine, "failure", None):
            raise failures[0]


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
