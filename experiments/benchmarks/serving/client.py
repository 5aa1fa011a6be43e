"""A client of a service, which measures in a process of its own, on the host where it is started.

    python -m experiments.benchmarks.serving.client

Each line of stdin is a `Question` as JSON, and is answered by a line with the `Answer` to each of
its requests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Question:
    """Requests that are sent to a port at once.

    Attributes:
        port: of the service, on this host.
        model: its name.
        prompts: the tokens of each request's prompt.
        tokens: how many are drawn of each, the likeliest ones, whatever ends a text.
    """

    port: int
    model: str
    prompts: Sequence[Sequence[int]]
    tokens: int


@dataclass(frozen=True)
class Answer:
    """A stream of tokens.

    Attributes:
        arrivals: how many tokens had come, and when, in seconds from the question on; tokens that
            end no character come with those that do.
        text: what they say.
    """

    arrivals: Sequence[tuple[int, float]]
    text: str


Asks = Callable[[Question], Sequence[Answer]]
"""A function that answers questions, here or on another host."""


def ask(question: Question) -> list[Answer]:
    """Send all requests at once; return the answers once all have ended.

    Raises:
        RuntimeError: if one is refused.
    """
    with ThreadPoolExecutor(len(question.prompts)) as threads:
        began_s = time.perf_counter()
        return [*threads.map(lambda prompt: _answer(question, prompt, began_s), question.prompts)]


def _answer(question: Question, prompt: Sequence[int], began_s: float) -> Answer:
    body: dict[str, Any] = {
        "model": question.model,
        "prompt": list(prompt),
        "max_tokens": question.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,  # They come with the tokens, which are counted so.
    }
    with closing(HTTPConnection("127.0.0.1", question.port, timeout=PATIENCE_S)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        # Read later: on a machine that it shares with the service, a client has to take little.
        received = [(time.perf_counter() - began_s, line) for line in response]
    if response.status != HTTPStatus.OK:
        said = b"".join(line for _, line in received)
        raise RuntimeError(f"unexpected answer of the service: {response.status} {said!r}")
    return _read(received)


def _read(received: Sequence[tuple[float, bytes]]) -> Answer:
    """Return the answer whose lines came each at a time.

    Raises:
        RuntimeError: if it is not whole, or an error.
    """
    count, arrivals, text = 0, list[tuple[int, float]](), ""
    for at_s, line in received:
        told = line.strip().removeprefix(b"data: ")
        if told == b"[DONE]":
            return Answer(arrivals, text)
        if not told:
            continue
        event = json.loads(told)
        if "choices" not in event:
            raise RuntimeError(f"the service sent an error: {event}")
        [choice] = event["choices"]
        count += len(choice["logprobs"]["tokens"])
        arrivals.append((count, at_s))
        text += choice["text"]
    raise RuntimeError("the service closed the connection before the end of an answer")


def seconds_per_token(answers: Sequence[Answer]) -> float:
    """Return the seconds in which each of some sequences gets a token while all of them run [s].

    Raises:
        RuntimeError: if they have too few tokens to tell.
    """
    begins_s = max(own.arrivals[0][1] for own in answers)
    ends_s = min(own.arrivals[-1][1] for own in answers)
    rates = []
    for own in answers:
        meanwhile = [one for one in own.arrivals if begins_s <= one[1] <= ends_s]
        if len(meanwhile) < 2:
            raise RuntimeError("the sequences do not overlap in time: increase --tokens")
        (before, from_s), (after, until_s) = meanwhile[0], meanwhile[-1]
        rates.append((after - before) / (until_s - from_s))
    return len(rates) / sum(rates)


def main() -> int:
    """Answer one question after another, until stdin ends; return the exit code."""
    for line in sys.stdin:
        print(json.dumps([asdict(own) for own in ask(Question(**json.loads(line)))]), flush=True)
    return 0


def as_line(question: Question) -> str:
    """Write a question as `main` reads it."""
    return json.dumps(asdict(question))


if __name__ == "__main__":
    sys.exit(main())
