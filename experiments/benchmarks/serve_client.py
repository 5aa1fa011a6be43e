"""A client of a service, which measures in a process of its own, on the host where it is started.

    python -m experiments.benchmarks.serve_client

Each line of stdin is a `Question` as JSON; the answer is a line, too: the seconds until all of its
requests are answered, and their texts.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

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


class Asks(Protocol):
    """What answers questions, here or on another host."""

    def __call__(self, question: Question) -> tuple[float, list[str]]:
        """Return the seconds until all requests are answered, and their texts."""
        ...


def ask(question: Question) -> tuple[float, list[str]]:
    """Send all requests at once; return the seconds until all are answered, and their texts.

    Raises:
        RuntimeError: if one is refused.
    """
    with ThreadPoolExecutor(len(question.prompts)) as threads:
        began_s = time.perf_counter()
        texts = [*threads.map(lambda prompt: _completed(question, prompt), question.prompts)]
        return time.perf_counter() - began_s, texts


def _completed(question: Question, prompt: Sequence[int]) -> str:
    body: dict[str, Any] = {
        "model": question.model,
        "prompt": list(prompt),
        "max_tokens": question.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", question.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the service answers {answer.status}: {content.decode()}")
    return json.loads(content)["choices"][0]["text"]


def seconds_per_token(
    asks: Asks, port: int, model: str, prompts: Sequence[Sequence[int]], tokens: int, first: int
) -> tuple[float, list[str]]:
    """Measure the seconds in which each of some sequences gets a token, once all run [s].

    That is the difference between answers of `first` tokens, and of `tokens` more, divided by
    these: prompts do not count. The texts are those of the long answers.
    """
    short_s, _ = asks(Question(port, model, prompts, first))
    long_s, texts = asks(Question(port, model, prompts, first + tokens))
    return (long_s - short_s) / tokens, texts


def main() -> int:
    """Answer one question after another, until stdin ends; return the exit code."""
    for line in sys.stdin:
        print(json.dumps(ask(Question(**json.loads(line)))), flush=True)
    return 0


def as_line(question: Question) -> str:
    """Write a question as `main` reads it."""
    return json.dumps(asdict(question))


if __name__ == "__main__":
    sys.exit(main())
