"""The API over HTTP, whose answers a script decides: formats, errors, streams, cancellation."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from skippipe_sched.errors import TemporaryError

from skippipe_jax.serving import app, server
from tests.commands.conftest import command as command  # a fixture
from tests.commands.examples import Command
from tests.serving.scripted_engine import (
    NAME,
    PATIENCE_S,
    TOKENIZER,
    ScriptedEngine,
    answer_of,
    eventually,
    served,
    serving,
)

ANSWER = "Grüße, 3 € 😀!"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: answer_of(ANSWER))


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return client_of(url)


def client_of(url: str, key: str = "none", **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, **settings)


def metrics_of(url: str) -> dict[str, float]:
    """The values of samples without labels other than the model's, or with them in the name."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[".".join([sample.name, *labels])] = sample.value
    return found


def test_a_completion_and_its_stream_say_the_same(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": NAME, "prompt": ["a", "b"], "max_tokens": 50, "n": 2}
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == [ANSWER] * 4
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    length = len(answer_of(ANSWER))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 4 * length)
    texts, last = dict.fromkeys(range(4), ""), None
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert "\ufffd" not in choice.text
    assert texts == dict.fromkeys(range(4), ANSWER)
    assert last is not None
    assert last.usage == whole.usage


def test_a_conversation_and_its_stream_say_the_same(client: openai.OpenAI, engine: ScriptedEngine):
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    whole = client.chat.completions.create(model=NAME, messages=messages)
    assert whole.choices[0].message.content == ANSWER
    written = TOKENIZER.decode(engine.seen[-1].prompt)
    assert written == "<|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\n"
    # As much as there is room for.
    assert engine.seen[-1].max_new_tokens == 256 - len(engine.seen[-1].prompt)
    text, reasons = "", []
    for chunk in client.chat.completions.create(model=NAME, messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text == ANSWER
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])


def test_a_stop_ends_an_answer_before_it(client: openai.OpenAI, engine: ScriptedEngine):
    asked: dict[str, Any] = {
        "model": NAME,
        "prompt": "a",
        "max_tokens": 50,
        "stop": ["xyz", "€ 😀"],
    }
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Grüße, 3 ", "stop")
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Grüße, 3 "
    short = client.completions.create(model=NAME, prompt="a", max_tokens=3)
    assert (short.choices[0].text, short.choices[0].finish_reason) == ("Gr\ufffd", "length")
    on = client.completions.create(
        model=NAME, prompt="a", max_tokens=50, extra_body={"ignore_eos": True}
    )
    assert engine.seen[-1].ends == frozenset()
    assert on.choices[0].finish_reason == "length"


def test_echo_tells_of_the_prompt_as_of_what_follows(client: openai.OpenAI):
    whole = client.completions.create(model=NAME, prompt="aé", max_tokens=2, echo=True, logprobs=1)
    [choice] = whole.choices
    assert choice.text == "aéGr"
    told = choice.logprobs
    assert told is not None
    tokens = [*"aé".encode(), *b"Gr"]
    assert told.tokens == ["a", "token_id:195", "token_id:169", "G", "r"]
    assert told.token_logprobs == [-token / 100 for token in tokens]
    assert told.text_offset == [0, 1, 1, 2, 3]
    assert told.top_logprobs is not None
    assert told.top_logprobs[3] == {"G": -0.71, "A": -9.0}
    # Of tokens, nothing is known of what comes before the first.
    of_tokens = client.completions.create(
        model=NAME, prompt=[97, 98], max_tokens=0, echo=True, logprobs=0
    )
    told = of_tokens.choices[0].logprobs
    assert told is not None
    assert (told.tokens, told.token_logprobs) == (["a", "b"], [None, -0.98])


def test_probabilities_of_a_conversation(client: openai.OpenAI):
    messages: Any = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [own.token for own in told.content[:3]] == ["G", "r", "token_id:195"]
    assert told.content[0].bytes == [71]
    assert [own.token for own in told.content[0].top_logprobs] == ["G", "A"]
    streamed = [
        own
        for chunk in client.chat.completions.create(**asked, top_logprobs=2, stream=True)
        for own in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert streamed == told.content


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine):
    answer = client.completions.create(
        model=NAME,
        prompt="a",
        n=2,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        seed=-5,
        extra_body={
            "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "skippipe_keep": [0, 2],
        },
    )  # fmt: skip
    first, second = (own.sampling for own in engine.seen[-2:])
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.25, 7, 0.1)
    assert (first.presence_penalty, first.frequency_penalty) == (1.0, -1.0)
    assert first.repetition_penalty == 1.5
    assert second.seed == first.seed + 1
    assert engine.seen[-1].stages == (0, 2)
    assert answer.choices[0].model_extra == {"skippipe": {"stages": [0, 2]}}
    client.completions.create(model=NAME, prompt="a", seed=3, extra_body={"skippipe_keep": 0.67})
    stages = engine.seen[-1].stages
    assert stages is not None
    assert len(stages) == 2
    client.completions.create(model=NAME, prompt="a")
    client.completions.create(model=NAME, prompt="a")
    assert engine.seen[-1].sampling.seed != engine.seen[-2].sampling.seed


def test_models(client: openai.OpenAI):
    [model] = client.models.list().data
    assert model.id == NAME
    assert client.models.retrieve(NAME).model_extra == {
        "max_model_len": 256,
        "skippipe": {"stages": [0, 1, 2]},
    }
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


# Each: path, body, status, and words of the message.
REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("completions", "{", 400, "not JSON"),
    "no object": ("completions", "[]", 400, "not a JSON object"),
    "deep": ("completions", "[" * 100_000, 400, "not JSON"),
    "no prompt": ("completions", {}, 400, "prompt"),
    "mixed prompt": ("completions", {"prompt": ["a", 3]}, 400, "prompt"),
    "empty prompt": ("completions", {"prompt": []}, 400, "prompt"),
    "no such token": ("completions", {"prompt": [259]}, 400, "0 to 258"),
    "unknown parameter": ("completions", {"prompt": "a", "tools": []}, 400, "tools"),
    "text for a number": ("completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
    "beyond the context": ("completions", {"prompt": "a", "max_tokens": 255}, 400, "context"),
    "long prompt": ("completions", {"prompt": "a" * 300}, 400, "context"),
    "long conversation": (
        "chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}, 400, "context"
    ),
    "10 MB": ("completions", {"prompt": "a" * 10_000_000}, 413, "4,194,304 bytes"),
    "unknown model": ("completions", {"model": "gpt-9", "prompt": "a"}, 404, "gpt-9"),
    "no stage": ("completions", {"prompt": "a", "skippipe_keep": [0, 3]}, 400, "skippipe_keep"),
    "stage order": ("completions", {"prompt": "a", "skippipe_keep": [0, 2, 1]}, 400, "increasing"),
    "share": ("completions", {"prompt": "a", "skippipe_keep": 1.5}, 400, "skippipe_keep"),
    "temperature": ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    "infinite": ("completions", {"prompt": "a", "temperature": 1e300}, 400, "temperature"),
    "min_p": ("completions", {"prompt": "a", "min_p": 1.5}, 400, "min_p"),
    "penalty": ("completions", {"prompt": "a", "presence_penalty": -3}, 400, "presence_penalty"),
    "likeliest": ("completions", {"prompt": "a", "top_k": 1 << 40}, 400, "top_k"),
    "nothing asked": ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "too many": ("completions", {"prompt": ["a"] * 100, "n": 100}, 400, "the capacity is"),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "image_url",
    ),
    "no route": ("embeddings", {}, 404, "/v1/embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_an_error_of_the_api_and_a_line(
    name: str, url: str, capfd: pytest.CaptureFixture[str]
):
    path, body, status, words = REFUSED[name]
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=30)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"]
    [line] = capfd.readouterr().err.splitlines()
    assert f"/v1/{path}: {status}" in line
    assert len(line) <= 200


def test_what_is_no_json_by_its_type_is_refused(url: str):
    # So no page in a browser can ask without a question to the server before.
    assert httpx.post(f"{url}/v1/completions", content=b'{"prompt": "a"}').status_code == 415
    assert httpx.get(f"{url}/v1/completions").status_code == 405


def test_only_who_has_a_key_is_answered(engine: ScriptedEngine):
    with serving(engine, keys=("first", "second")) as url:
        for key in ("first", "second"):
            assert client_of(url, key).models.list().data
        for key in ("third", "firs", ""):
            with pytest.raises(openai.AuthenticationError) as caught:
                client_of(url, key or "x").completions.create(model=NAME, prompt="a")
            assert caught.value.code == "invalid_api_key"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 200


def test_metrics_have_vllms_names(url: str, client: openai.OpenAI):
    before = metrics_of(url)
    client.completions.create(model=NAME, prompt="abc", max_tokens=4)
    after = metrics_of(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 4  # And the begin mark.
    assert grown["vllm:generation_tokens_total"] == 4
    assert grown["vllm:request_success_total.length"] == 1
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 3
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


# Who waits, goes, and ends.


@pytest.fixture
def endless() -> ScriptedEngine:
    """An engine whose answers do not end by themselves, and that goes on when it is told."""
    engine = ScriptedEngine(lambda request: [97] * 1000, slots=1)
    engine.may_go_on.clear()
    return engine


def test_where_too_many_wait_others_are_told_to_come_again(endless: ScriptedEngine):
    with serving(endless, most_waiting=1) as url:
        client = client_of(url, max_retries=0)
        ask = lambda: client.completions.create(model=NAME, prompt="a", max_tokens=2)  # noqa: E731
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        eventually(lambda: metrics_of(url)["vllm:num_requests_waiting"] == 1)
        assert metrics_of(url)["vllm:num_requests_running"] == 1
        with pytest.raises(openai.RateLimitError) as caught:
            ask()
        assert int(caught.value.response.headers["retry-after"]) > 0
        endless.may_go_on.set()
        for thread in asking:
            thread.join()
        assert ask().choices[0].text == "aa"


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_that_has_gone_asked_for_is_cancelled(endless: ScriptedEngine, stream: bool):
    with serving(endless) as url:
        body = json.dumps({"prompt": "a", "max_tokens": 200, "stream": stream, "n": 2})
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        eventually(lambda: metrics_of(url)["vllm:num_requests_waiting"] == 1)
        if stream:
            connection.getresponse().close()
        connection.close()
        eventually(lambda: len(endless.cancelled) == 2)
        found = metrics_of(url)
        assert found["vllm:num_requests_running"] == 0
        assert found["vllm:request_success_total.abort"] == 2


def test_answers_that_have_begun_are_finished_before_the_end(endless: ScriptedEngine):
    answers = []
    with serving(endless) as url:
        client = client_of(url, max_retries=0)

        def ask() -> None:
            answers.append(client.completions.create(model=NAME, prompt="a", max_tokens=3))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: bool(endless.seen))
        threading.Timer(0.5, endless.may_go_on.set).start()
    asking.join()
    assert answers[0].choices[0].text == "aaa"
    with pytest.raises(openai.APIConnectionError):
        ask()


def test_where_the_engine_fails_all_are_told_and_the_server_ends(endless: ScriptedEngine):
    with serving(endless) as url:
        client = client_of(url, max_retries=0)
        endless.failure = RuntimeError("out of memory")
        with pytest.raises(openai.InternalServerError, match="engine has failed"):
            client.completions.create(model=NAME, prompt="a", max_tokens=3)


def test_connections_that_say_nothing_are_closed(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "IDLE_S", 0.4)
    with serving(engine) as url:
        address = urlsplit(url).hostname, urlsplit(url).port
        idle = [socket.create_connection(address) for _ in range(1000)]
        # One that sends a little now and then is not idle, but does not ask either.
        idle[-1].sendall(b"GET /health HTTP/1.1\r\n")
        time.sleep(0.3)
        with contextlib.suppress(ConnectionError):  # On a slow machine it is closed by now.
            idle[-1].sendall(b"Host: x\r\n")
        began_s = time.monotonic()
        for connection in idle:
            connection.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
            connection.close()
        assert time.monotonic() - began_s < 10
        assert client_of(url).models.list().data


def test_a_head_without_an_end_is_not_kept(url: str):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /health HTTP/1.1\r\nCookie: ")
        for _ in range(8):
            with contextlib.suppress(ConnectionError):  # It is closed in the middle of that.
                connection.sendall(b"x" * (1 << 16))
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 12):  # Why, and then the end.
                pass
    assert client_of(url).models.list().data


def test_a_client_of_http_1_0_gets_events_without_chunks(url: str):
    address = urlsplit(url)
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 3, "stream": True})
    head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), PATIENCE_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        received = b""
        while piece := connection.recv(1 << 12):
            received += piece
    head, _, events = received.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head
    assert [event[:6] for event in events.split(b"\n\n")[:-1]] == [b"data: "] * (
        events.count(b"\n\n")
    )
    assert events.endswith(b"data: [DONE]\n\n")


def test_a_body_that_does_not_come_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "BODY_S", 0.2)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408
    connection.close()


def test_a_model_that_has_learnt_no_conversations_says_so(engine: ScriptedEngine):
    messages: Any = [{"role": "user", "content": "x"}]
    with serving(engine, served(converses=False)) as url:
        with pytest.raises(openai.BadRequestError) as caught:
            client_of(url).chat.completions.create(model=NAME, messages=messages)
        assert caught.value.param == "messages"


def test_status_is_shown_of_a_service(engine: ScriptedEngine, tmp_path: Path, command: Command):
    (tmp_path / "key").write_text("one\n")
    with serving(engine, keys=("one", "two")) as url:
        refused = command("status", url)
        assert refused.code == 2
        words = "the service answered with status 401. Give a key of the service by --api-key-file"
        assert words in refused.err
        for address in (url, f"{url}/v1"):
            shown = command("status", address, "--api-key-file", str(tmp_path / "key"))
            assert shown.out.splitlines()[0] == (
                "scripted: 0 of 4 slots in use, 0 sequences waiting; no host holds stages 0, 1, 2"
            )
        asked = command("status", url, "--api-key-file", str(tmp_path / "key"), "--json")
        assert json.loads(asked.out) == {
            **{"model": "scripted", "stages": 3, "running": 0, "waiting": 0, "slots": 4},
            "hosts": [],
        }
    gone = command("status", url)
    assert gone.code == TemporaryError.exit_code
    assert "no service answers at this address" in gone.err
