"""A service of several processes whose hosts are killed answers all requests, and rightly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.serving import churn
from experiments.benchmarks.serving.clients import (
    ANSWERED,
    CANCELLED,
    FAILED,
    Answer,
    Asked,
    Clients,
    longest_pause_s,
    pauses_at,
)
from tests.test_benchmarks import report_of

STREAM = Asked((256, 65), 4, 0.0, 0, is_stream=True)


@pytest.mark.nightly
def test_half_of_the_hosts_and_of_the_stages_may_go(tmp_path: Path):
    sizes = ["--hosts", "6", "--requests", "200", "--pause-s", "0.1", "--sequences", "16"]
    report = report_of(tmp_path, "serving.churn", "--small", *sizes)
    assert report["failures"] == []
    requests, greedy = report["requests"], report["greedy"]
    assert requests["sent"] >= 200
    assert requests["answered"] + requests["cancelled"] == requests["sent"]
    assert greedy["equal"] + greedy.get("within_rounding", 0) == greedy["compared"] > 30
    assert 2 * len(report["faults"]) >= report["hosts"]
    assert len(report["back"]) == len(report["faults"])
    assert [len(level["stages"]) for level in report["levels"]] == [4, 3, 2, 4]
    assert report["levels"][0]["perplexity"] == report["levels"][-1]["perplexity"]


def event(**told: Any) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def token(**told: Any) -> bytes:
    return event(choices=[{"logprobs": {"tokens": ["a"]}, **told}])


OK = b"HTTP/1.1 200 OK\r\n\r\n"
BUSY = b"HTTP/1.1 429 Busy\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}"
LAST = token(skippipe={"stages": [0, 2]})
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("said", "asked", "outcome", "tokens"),
    [
        ([OK + 3 * token() + LAST + END], STREAM, ANSWERED, 4),
        ([BUSY, OK + 3 * token() + LAST + END], STREAM, ANSWERED, 4),
        ([OK + 3 * token() + LAST], STREAM, FAILED, 4),
        ([OK + token() + event(error="lost")], STREAM, FAILED, 1),
        ([b"HTTP/1.1 500 Error\r\nContent-Length: 2\r\n\r\n{}"], STREAM, FAILED, 0),
        ([b""], STREAM, FAILED, 0),
        ([OK + 4 * token() + END], replace(STREAM, cancel_tokens=2), CANCELLED, 2),
    ],
)
def test_clients_tell_what_became_of_a_request(
    said: list[bytes], asked: Asked, outcome: str, tokens: int
):
    left = [*said]

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    async def ask() -> Answer:
        async with await asyncio.start_server(attend, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            clients = Clients(host, port, 60.0)
            answer, task = clients.send(asked, "now")
            await task
        return answer

    answer = asyncio.run(ask())
    assert (answer.outcome, len(answer.names), answer.busy) == (outcome, tokens, len(said) - 1)
    assert left == []
    assert (answer.stages == (0, 2)) == (LAST in said[-1])
    assert sum(count for _, count in answer.pieces) == tokens


def answered(*moments_s: float) -> Answer:
    return Answer(STREAM, "now", 0.0, ANSWERED, pieces=[(at_s, 1) for at_s in moments_s])


def test_pauses_are_those_around_a_moment():
    answers = [answered(1.0, 2.0, 5.0), answered(1.5, 3.5), answered(3.1, 3.2), answered(2.9)]
    assert pauses_at(answers, 3.0) == {
        "streams": 2,
        "next_token_s": 0.5,
        "all_go_on_s": 2.0,
        "longest_pause_s": 3.0,
    }
    assert pauses_at(answers, 9.0) == {"streams": 0}
    assert longest_pause_s(answers[1:]) == 2.0
    assert longest_pause_s([]) == 0.0


def test_what_is_not_as_it_must_be_is_told():
    opened = {"descriptors": 9, "threads": 20, "resident_bytes": 100_000_000}
    grown = opened | {"descriptors": 14, "threads": 21}
    apart = {"apart": 0.02, "perplexity": 8.2, "without_service": 8.0}
    report: dict[str, Any] = {
        "levels": [apart, apart | {"apart": 0.0}],
        "front": {churn.ALL: opened, churn.AGAIN: grown},
        "greedy": {"different": []},
    }
    assert churn.counted([answered(1.0, 2.0)])["answered"] == 1
    assert churn.wrong_in(report, [answered(1.0, 2.0)]) == [
        "received 0 of 4 tokens",
        "perplexity 8.2, not 8.0",
        "descriptors of the front have grown to 14, above 13",
    ]
