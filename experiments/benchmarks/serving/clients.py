"""Clients of a service: what they ask, when they give up, what they got, and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skippipe_jax.data.rows import TokenArray
from skippipe_jax.inference.partial import StageOrder

ANSWERED, CANCELLED, FAILED = "answered", "cancelled", "failed"
STREAMED, GREEDY, CANCELS, PARTIAL = 0.5, 0.5, 0.15, 0.2
"""Shares of the requests that are drawn: streamed, greedy, given up, and along fewer stages."""
LONGEST_GIVEN_UP_S = 1.0
OK, TOO_MANY = 200, 429


@dataclass(frozen=True)
class Asked:
    """A request, and what its client does.

    Attributes:
        prompt: its tokens.
        new_tokens: how many are drawn.
        temperature: 0 is greedy.
        seed: of the draws.
        is_stream: whether tokens are sent one by one.
        keep: the stages that are asked for; None is all.
        cancel_tokens: after so many tokens of a stream its client closes the connection; None is
            never.
        cancel_s: the same of an answer that comes whole, in seconds.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int
    is_stream: bool
    keep: StageOrder | None = None
    cancel_tokens: int | None = None
    cancel_s: float | None = None

    def body(self) -> bytes:
        """Return the body of its HTTP request: a completion with the names of its tokens."""
        asked: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": self.is_stream,
        }
        if self.keep is not None:
            asked["skippipe_keep"] = self.keep
        return json.dumps(asked).encode()


@dataclass
class Answer:
    """The outcome of a request.

    Attributes:
        asked: the request.
        phase: during which it was sent.
        sent_s: when, by `time.monotonic`.
        outcome: `answered`, `cancelled`, `failed`, or nothing as long as it is open.
        why: it failed.
        names: of the tokens that came.
        pieces: when tokens came, by `time.monotonic`, and how many; one if they came whole.
        stages: those that ran for all of its tokens, as the service says.
        busy: how often the service had no room.
        has_begun: is set with the third piece of a stream, and at its end.
    """

    asked: Asked
    phase: str
    sent_s: float
    outcome: str = ""
    why: str = ""
    names: list[str] = field(default_factory=list)
    pieces: list[tuple[float, int]] = field(default_factory=list)
    stages: StageOrder | None = None
    busy: int = 0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)


class Requests:
    """Draws requests by a seed; prompts are parts of a text."""

    def __init__(self, text: TokenArray, begin: int, stages: int, context: int, seed: int):
        """Draw from a text of tokens, for a model of so many stages and so long a context."""
        self._text, self._begin, self._stages, self._context = text, begin, stages, context
        self._random = random.Random(seed)

    def drawn(self) -> Asked:
        """Draw a request of any kind."""
        draw, longest = self._random, self._context // 4
        new = draw.randint(4, longest)
        is_stream, cancels = draw.random() < STREAMED, draw.random() < CANCELS
        keep = None
        if draw.random() < PARTIAL:
            inner = range(1, self._stages)
            keep = (0, *sorted(draw.sample(inner, draw.randint(0, len(inner) - 1))))
        return Asked(
            self._prompt(draw.randint(4, longest)),
            new,
            0.0 if draw.random() < GREEDY else 0.8,
            draw.randrange(1 << 31),
            is_stream,
            keep,
            draw.randint(1, new - 1) if cancels and is_stream else None,
            draw.uniform(0.0, LONGEST_GIVEN_UP_S) if cancels and not is_stream else None,
        )

    def long_stream(self) -> Asked:
        """Draw a greedy stream that takes long, in the middle of which a host may be killed."""
        return Asked(self._prompt(16), self._context // 2, 0.0, 0, is_stream=True)

    def pause_s(self, mean_s: float) -> float:
        """Draw for how long the next request is waited for."""
        return self._random.expovariate(1 / mean_s)

    def _prompt(self, length: int) -> tuple[int, ...]:
        start = self._random.randrange(self._text.size - length)
        return (self._begin, *map(int, self._text[start : start + length - 1]))


class Clients:
    """Sends requests to a service, each over a connection of its own.

    Attributes:
        answers: of all requests so far, in the order in which they were sent.
    """

    def __init__(self, host: str, port: int, patience_s: float):
        """Ask the service there; an answer that takes longer than `patience_s` has failed."""
        self._host, self._port, self._patience_s = host, port, patience_s
        self.answers: list[Answer] = []

    def send(self, asked: Asked, phase: str) -> tuple[Answer, asyncio.Task[None]]:
        """Send a request; the task ends when it is answered, given up, or has failed."""
        answer = Answer(asked, phase, time.monotonic())
        self.answers.append(answer)
        return answer, asyncio.create_task(self._settle(answer))

    def ask(self, asked: Sequence[Asked]) -> list[Answer]:
        """Send requests at once; return the answers once all have ended.

        Raises:
            RuntimeError: if one has failed.
        """

        async def settled() -> list[Answer]:
            sent = [self.send(one, "") for one in asked]
            await asyncio.gather(*(task for _, task in sent))
            return [answer for answer, _ in sent]

        answers = asyncio.run(settled())
        if failed := [own.why for own in answers if own.outcome != ANSWERED]:
            raise RuntimeError(f"the service did not answer: {failed[0]}")
        return answers

    async def _settle(self, answer: Answer) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                while (again_s := await self._exchange(answer)) is not None:
                    answer.busy += 1
                    await asyncio.sleep(again_s)
        except TimeoutError:
            answer.outcome, answer.why = FAILED, f"no answer in {self._patience_s:g} s"
        # What the service does wrong is a result, and ends no measurement.
        except (OSError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
            answer.outcome, answer.why = FAILED, repr(error)
        answer.has_begun.set()

    async def _exchange(self, answer: Answer) -> float | None:
        """Send a request once; return after how many seconds it is to be sent again, if it is."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            body = answer.asked.body()
            # An answer by HTTP/1.0 is not cut in chunks, and ends with its connection.
            head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if answer.asked.cancel_s is None:
                return await self._read(answer, reader)
            try:
                async with asyncio.timeout(answer.asked.cancel_s):
                    return await self._read(answer, reader)
            except TimeoutError:
                answer.outcome = CANCELLED
                return None
        finally:
            writer.close()

    async def _read(self, answer: Answer, reader: asyncio.StreamReader) -> float | None:
        status = int((await reader.readuntil()).split()[1])
        headers = {}
        while line := (await reader.readuntil()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if status == OK and answer.asked.is_stream:
            await self._read_stream(answer, reader)
            return None
        content = await reader.readexactly(int(headers["content-length"]))
        if status == TOO_MANY:
            return float(headers["retry-after"])
        if status == OK:
            _take(answer, json.loads(content))
            answer.outcome = ANSWERED
        else:
            answer.outcome, answer.why = FAILED, f"{status} {content.decode(errors='replace')}"
        return None

    async def _read_stream(self, answer: Answer, reader: asyncio.StreamReader) -> None:
        while True:
            event = (await reader.readuntil(b"\n\n")).strip().removeprefix(b"data: ")
            if event == b"[DONE]":
                answer.outcome = ANSWERED
                return
            told = json.loads(event)
            if "error" in told:
                answer.outcome, answer.why = FAILED, str(told["error"])
                return
            _take(answer, told)
            if len(answer.pieces) == 3:
                answer.has_begun.set()
            most = answer.asked.cancel_tokens
            if most is not None and len(answer.names) >= most:
                answer.outcome = CANCELLED
                return


def _take(answer: Answer, told: dict[str, Any]) -> None:
    [choice] = told["choices"]
    names = choice["logprobs"]["tokens"]
    answer.names += names
    answer.pieces.append((time.monotonic(), len(names)))
    if "skippipe" in choice:
        answer.stages = tuple(choice["skippipe"]["stages"])


def seconds_per_token(answers: Sequence[Answer]) -> float:
    """Return the seconds in which each of some streams gets a token while all of them run [s].

    Raises:
        RuntimeError: if they have too few tokens to tell.
    """
    begins_s = max(own.pieces[0][0] for own in answers)
    ends_s = min(own.pieces[-1][0] for own in answers)
    rates = []
    for own in answers:
        meanwhile = [one for one in own.pieces if begins_s <= one[0] <= ends_s]
        if len(meanwhile) < 2:
            raise RuntimeError("the sequences do not overlap in time: increase --tokens")
        tokens = sum(count for _, count in meanwhile[1:])
        rates.append(tokens / (meanwhile[-1][0] - meanwhile[0][0]))
    return len(rates) / sum(rates)


def pauses_at(answers: Sequence[Answer], at_s: float) -> dict[str, Any]:
    """Return what streams that were under way at a moment saw of it, in seconds.

    `next_token_s` is when the first of them got its next token, `all_go_on_s` when the last did,
    and `longest_pause_s` is the longest time between the tokens before and after the moment.
    """
    gaps = [
        (before, after) for answer in answers for before, after in _gaps(answer)
        if before <= at_s < after
    ]  # fmt: skip
    found: dict[str, Any] = {"streams": len(gaps)}
    if gaps:
        found["next_token_s"] = round(min(after - at_s for _, after in gaps), 4)
        found["all_go_on_s"] = round(max(after - at_s for _, after in gaps), 4)
        found["longest_pause_s"] = round(max(after - before for before, after in gaps), 4)
    return found


def longest_pause_s(answers: Sequence[Answer]) -> float:
    """Return the longest time between two tokens of a stream, in seconds."""
    gaps = [after - before for answer in answers for before, after in _gaps(answer)]
    return round(max(gaps, default=0.0), 4)


def _gaps(answer: Answer) -> Iterator[tuple[float, float]]:
    return itertools.pairwise(at_s for at_s, _ in answer.pieces)
