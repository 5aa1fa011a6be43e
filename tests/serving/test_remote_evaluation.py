"""Validation loss through a service is that of the model itself; what goes wrong is one line."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.data.batches import IGNORED_TARGET, Batch
from skippipe_jax.data.rows import PackedDocuments, TokenizedDocuments, cut_documents
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.remote_model import texts_of
from skippipe_jax.interop.conversion import to_huggingface
from skippipe_jax.serving import errors
from skippipe_jax.serving.model import open_engine
from tests.commands.conftest import command as command  # a fixture
from tests.commands.examples import Command, Result, expect_one_error
from tests.harness.partial_models import save_run
from tests.harness.ports import free_port
from tests.serving.scripted_engine import ScriptedEngine, served, serving

LENGTH = 62  # With it, a cache is one page, and less is compiled.
MODEL = {
    "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_width": 24, "context": LENGTH + 1,
}  # fmt: skip
WORDS = ["stage", "node", "path", "plan", "microbatch", "host"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and conversations, and a run of three stages that has divided the texts."""
    folder = tmp_path_factory.mktemp("evaluated")
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        (folder / name).write_text(" ".join(rng.choice(WORDS, 500)))
    lines = []
    for _ in range(40):
        roles = ("user", "assistant") * int(rng.integers(1, 3))
        messages = [{"role": role, "content": rng.choice(WORDS)[:3]} for role in roles]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    data = {
        "source": "text", "path": str(folder / "one"), "sequence_length": LENGTH, "held_out": 0.4,
        "microbatch_size": 3,
    }  # fmt: skip
    save_run(folder / "run", {"model": MODEL, "data": data}, 3)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return folder / "run"


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    source = open_source(run)
    what, engine = open_engine("tiny", source.model(), source.config.data, 3, None)
    with serving(engine, what) as url:
        yield f"{url}/v1"


def evaluate(command: Command, *arguments: str) -> Result:
    """What the command leaves, without the lines of the service in the same process."""
    found = command("evaluate", *arguments)
    lines = found.err.splitlines(keepends=True)
    return replace(found, err="".join(own for own in lines if not own.startswith("127.0.0.1 ")))


def evaluated(command: Command, *arguments: str) -> dict[str, Any]:
    found = evaluate(command, *arguments, "--json")
    assert (found.code, found.err) == (0, "")
    return json.loads(found.out)


def losses_in(found: Any) -> Iterator[float]:
    """All losses and perplexities of a result, in the order in which they are told."""
    if isinstance(found, dict):
        for key, value in found.items():
            if isinstance(value, float):
                yield value if "perplexity" not in key else np.log(value)
            yield from losses_in(value)
    if isinstance(found, list):
        for one in found:
            yield from losses_in(one)


def mixture_of(folder: Path) -> list[str]:
    """The arguments that evaluate on two domains."""
    sources = [{"source": "text", "path": str(folder / name)} for name in ("one", "two")]
    given = {"source": "mixture", "path": "null", "mixture": json.dumps(sources)}
    return [word for key, own in given.items() for word in ("--set", f"data.{key}={own}")]


ASKED = {
    "all stages": ([], 1),
    "one sequence": (["--sequences", "1"], 1),
    "some stages": (["--keep-fraction", "0.67,0.3", "--importance"], 4),
    "packed documents": (["--set", "data.packing=documents", "--sequences", "5"], 1),
    "conversations": (
        [
            *("--set", "data.source=chat", "--set", "data.path={folder}/chat.jsonl"),
            *("--set", "data.packing=documents", "--keep-fraction", "0.67"),
        ],
        3,
    ),
    "domains": (["--sequences", "12", "{mixture}"], 1),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_service_tells_what_the_model_itself_does(
    name: str, folder: Path, run: Path, url: str, command: Command
):
    given, orders = ASKED[name]
    arguments = ["--run", str(run)]
    for one in given:
        own = mixture_of(folder) if one == "{mixture}" else [one.replace("{folder}", str(folder))]
        arguments += own
    expected = evaluated(command, *arguments)
    found = evaluated(command, *arguments, "--url", url)
    used = found.pop("used")
    assert len(used) == orders
    assert all(own["asked"] == own["used"] for own in used)
    assert {**found, "step": 5}.keys() == expected.keys()
    assert found["tokens"] == expected["tokens"]
    np.testing.assert_allclose([*losses_in(found)], [*losses_in(expected)], atol=1e-4)


@st.composite
def packed_rows(draw: st.DrawFn) -> Batch:
    """Rows of documents, with targets that are learnt or not; some rows only fill up."""
    length = draw(st.integers(1, 12))
    documents = draw(st.lists(st.integers(1, 2 * length), min_size=1, max_size=5))
    sizes = np.array(documents)
    tokens = np.arange(sizes.sum()) + 1  # Each is another, so that all are told apart.
    learnt = np.array(draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
    text = TokenizedDocuments(tokens, np.cumsum(sizes), learnt)
    rows = PackedDocuments(text, cut_documents(text, length, "split"), length)
    shape = len(rows) + draw(st.integers(0, 2)), length
    tokens, begins = np.zeros(shape, np.int32), np.zeros(shape, bool)
    targets = np.full(shape, IGNORED_TARGET, np.int32)
    for row in range(len(rows)):
        rows.fill(row, tokens[row], targets[row], begins[row])
    return {"tokens": tokens, "targets": targets, "begins": begins}


@given(packed_rows())
def test_each_target_is_asked_for_once_behind_what_its_position_sees(batch: Batch):
    assert "begins" in batch
    expected = Counter[tuple[int, int, tuple[int, ...]]]()
    for row, place in np.argwhere(batch["targets"] != IGNORED_TARGET).tolist():
        start = np.flatnonzero(batch["begins"][row, : place + 1])[-1]
        seen = batch["tokens"][row, start : place + 1].tolist()
        expected[row, place, (*seen, int(batch["targets"][row, place]))] += 1
    found = Counter[tuple[int, int, tuple[int, ...]]]()
    for row, start, tokens in texts_of(batch):
        assert batch["targets"][row, start + len(tokens) - 2] == tokens[-1]
        for place in range(start, start + len(tokens) - 1):
            if batch["targets"][row, place] != IGNORED_TARGET:
                found[row, place, tuple(tokens[: place - start + 2])] += 1
    assert found == expected


def test_an_export_of_the_model_names_the_text_too(
    folder: Path, run: Path, url: str, tmp_path: Path, command: Command
):
    to_huggingface(run, tmp_path / "hf")
    text = ["--set", "data.source=text", "--set", f"data.path={folder / 'two'}"]
    asked = ["--hf", str(tmp_path / "hf"), *text, "--set", f"data.sequence_length={LENGTH}"]
    expected, found = (evaluated(command, *asked, *more) for more in ([], ["--url", url]))
    assert found["tokens"] == expected["tokens"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)


# What goes otherwise than asked for, by servers that a test scripts.

Answer = tuple[int, Any]
"""Status and body of an answer; None closes the connection without one."""


def of_service(path: str, asked: Any) -> Answer | None:
    """What a service of three stages answers that has nothing to compute."""
    if path == "/v1/models":
        stages = {"stages": [0, 1, 2]}
        return 200, {"data": [{"id": "tiny", "max_model_len": 999, "skippipe": stages}]}
    if path == "/tokenize":
        return 200, {"tokens": [*asked["prompt"].encode()]}
    return scored([None, *[-1.0] * (len(asked["prompt"]) - 1)], asked)


def scored(scores: list[float | None], asked: Any) -> Answer:
    """Return an answer with these log-probabilities, by the stages that were asked for."""
    used = {"stages": asked["skippipe_keep"]}
    return 200, {"choices": [{"logprobs": {"token_logprobs": scores}, "skippipe": used}]}


@contextmanager
def scripted(script: Callable[[str, Any], Answer | None]) -> Iterator[str]:
    """A server that answers by a script, of a path and what is asked; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            answer = script(self.path, json.loads(self.rfile.read(length) or "null"))
            if answer is None:
                return
            status, body = answer
            self.send_response(status)
            self.send_header("Retry-After", str(RETRY_S))
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 100

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


RETRY_S = 77


def with_completions(answer: Callable[[Any], Answer | None]) -> Callable[..., Answer | None]:
    return lambda path, asked: (
        answer(asked) if path == "/v1/completions" else of_service(path, asked)
    )


def test_stages_that_the_service_has_used_instead_are_told(run: Path, command: Command):
    numbers = itertools.count()

    def answer(asked: Any) -> Answer | None:
        answered = of_service("/v1/completions", asked)
        assert answered is not None
        # Every third request finds the host of stage 1 lost.
        if next(numbers) % 3 == 0:
            answered[1]["choices"][0]["skippipe"]["stages"] = [0, 2]
        return answered

    given = ["--run", str(run), "--url"]
    with scripted(with_completions(answer)) as url:
        told = evaluate(command, *given, url, "--sequences", "12")
        found = evaluated(command, *given, url, "--sequences", "12")
    assert found["loss"] == 1.0
    assert found["used"] == [
        {"asked": [0, 1, 2], "used": [0, 1, 2], "requests": 8},
        {"asked": [0, 1, 2], "used": [0, 2], "requests": 4},
    ]
    assert told.out.splitlines()[-4:] == [
        f"computed by tiny at {url}",
        "stages requested  used   requests",
        "0 1 2             0 1 2         8",
        "0 1 2             0 2           4",
    ]


def test_who_finds_no_room_waits_as_long_as_told_and_asks_again(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    prompts = Counter[tuple[int, ...]]()
    waited: list[float] = []
    wait = threading.Event.wait

    def recorded(event: threading.Event, timeout_s: float | None = None) -> bool:
        if timeout_s != RETRY_S:
            return wait(event, timeout_s)
        waited.append(timeout_s)
        return event.is_set()

    def answer(asked: Any) -> Answer | None:
        prompts[tuple(asked["prompt"])] += 1
        if prompts[tuple(asked["prompt"])] < 3:
            return 429, {"error": {"message": "try again later"}}
        return of_service("/v1/completions", asked)

    monkeypatch.setattr(threading.Event, "wait", recorded)
    with scripted(with_completions(answer)) as url:
        found = evaluated(command, "--run", str(run), "--url", url, "--sequences", "5")
    assert found["tokens"] == 5 * LENGTH
    assert found["used"] == [{"asked": [0, 1, 2], "used": [0, 1, 2], "requests": 5}]
    assert [*prompts.values()] == [3] * 5
    assert waited == [RETRY_S] * 10


def test_a_service_with_little_room_answers_all_in_the_end(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(errors, "AGAIN_S", 0)
    engine = ScriptedEngine(lambda request: [], slots=1)
    with serving(engine, served(), most_waiting=1) as url:
        found = evaluated(command, "--run", str(run), "--url", f"{url}/v1", "--sequences", "9")
    scored = [token for request in engine.seen for token in request.prompt[1:]]
    assert found["tokens"] == len(scored) == 9 * LENGTH
    assert found["loss"] == pytest.approx(np.mean(scored) / 100)


def test_the_key_is_that_of_the_first_line(run: Path, tmp_path: Path, command: Command):
    (tmp_path / "keys").write_text("right\nother\n")
    (tmp_path / "wrong").write_text("wrong\n")
    (tmp_path / "none").write_text("\n")
    asked = ["--run", str(run), "--sequences", "1"]
    engine = ScriptedEngine(lambda request: [])
    with serving(engine, served(), keys=("right",)) as url:
        asked += ["--url", f"{url}/v1"]
        key = ["--api-key-file", str(tmp_path / "keys")]
        assert evaluated(command, *asked, *key)["tokens"] == LENGTH
        wants = ["--api-key-file", "requires one of its API keys"]
        wrong = ["--api-key-file", str(tmp_path / "wrong")]
        expect_one_error(evaluate(command, *asked, *wrong), *wants, "wrong")
        expect_one_error(evaluate(command, *asked), *wants, "None")
        empty = ["--api-key-file", str(tmp_path / "none")]
        expect_one_error(
            evaluate(command, *asked, *empty), "--api-key-file", "does not contain valid API keys"
        )


REFUSED: dict[str, tuple[Callable[..., Answer | None], list[str]]] = {
    "no such route": (lambda *_: (404, b"<html>"), ["is not a SkipPipe service", "status 404"]),
    "another service": (lambda *_: (200, {"data": [{"id": "gpt"}]}), ["is not a SkipPipe service"]),
    "no JSON": (lambda *_: (200, b"hello"), ["is not a SkipPipe service"]),
    "silence": (lambda *_: None, ["no service answers at this address"]),
    "several models": (lambda *_: (200, {"data": []}), ["0 models"]),
    "other tokens": (
        lambda path, asked: (
            (200, {"tokens": [1]}) if path == "/tokenize" else of_service(path, asked)
        ),
        ["tokenizer of the served model, tiny"],
    ),
    "vocabulary": (
        with_completions(
            lambda _: (400, {"error": {"message": "tokens are 0 to 99", "param": "prompt"}})
        ),
        ["status 400: tokens are 0 to 99", "Give --run or --hf of the served model"],
    ),
    "the end": (with_completions(lambda _: None), ["the service has ended"]),
    "a proxy": (with_completions(lambda _: (502, b"<html>")), ["with status 502. Read"]),
    "too few": (
        with_completions(lambda asked: scored([None], asked)),
        ["one probability for each token"],
    ),
    "no number": (
        with_completions(lambda asked: scored([None] * len(asked["prompt"]), asked)),
        ["loss = nan: is that of the model of --url along stages [0", "training had diverged"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_that_is_none_is_one_line(name: str, run: Path, command: Command):
    script, words = REFUSED[name]
    with scripted(script) as url:
        result = evaluate(command, "--run", str(run), "--url", url, "--sequences", "20")
    expect_one_error(result, "--url", *words)


def test_sequences_that_are_too_long_for_the_service_are_refused(run: Path, command: Command):
    engine = ScriptedEngine(lambda request: [])
    with serving(engine, served(LENGTH - 4)) as url:
        asked = ["--run", str(run), "--url", f"{url}/v1"]
        words = [f"the context is {LENGTH - 4} tokens", f"--set data.sequence_length={LENGTH - 4}"]
        expect_one_error(evaluate(command, *asked), "--url", *words)
        shorter = ["--set", f"data.sequence_length={LENGTH - 4}", "--sequences", "2"]
        assert evaluated(command, *asked, *shorter)["tokens"] == 2 * (LENGTH - 4)


def test_stages_in_an_order_that_is_not_served_are_refused(run: Path, url: str, command: Command):
    result = evaluate(command, "--run", str(run), "--url", url, "--swaps")
    expect_one_error(
        result, "--url", "must be in increasing order", "runs stages in increasing order"
    )


def test_an_engine_that_fails_in_between_is_one_line(run: Path, command: Command):
    def script(_: DecodeRequest) -> Sequence[int]:
        if len(engine.seen) == 10:
            engine.failure = RuntimeError("a host is lost")
        return []

    engine = ScriptedEngine(script)
    with serving(engine, served()) as url:
        result = evaluate(command, "--run", str(run), "--url", f"{url}/v1")
    expect_one_error(result, "--url", "evaluate again")


def test_where_nobody_listens_is_no_service(run: Path, command: Command):
    url = f"http://127.0.0.1:{free_port()}/v1"
    result = evaluate(command, "--run", str(run), "--url", url)
    expect_one_error(
        result, "--url", url, "no service answers at this address", "skippipe serve prints"
    )


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://127.0.0.1/v1", "http:///v1", "http://[::1/v1", "http://a:b/v1",
     "http://a:99999/v1", "http://key@a/v1", "http://a/v1?x"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str, run: Path, command: Command):
    result = evaluate(command, "--run", str(run), "--url", url)
    expect_one_error(result, "--url", url, "is not the address of a service")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "{url}", "--step", "5"], ["--step = 5", "which a server runs"]),
        (["--url", "{url}", "--num-stages", "3"], ["--num-stages = 3", "which a server runs"]),
        (["--url", "{url}", "--scale", "0.5"], ["--scale = '0.5'", "which a server runs"]),
        (["--url", "{url}", "--set", "model.attention=auto"], ["--set", "model.attention"]),
        (["--url", "{url}", "--run", "{run}"], ["--url", "several are given"]),
        (["--url", "{url}", "--set", "data.held_out=0.3"], ["data.held_out", "has trained on"]),
        (["--api-key-file", "keys"], ["--api-key-file", "Add --url"]),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: list[str], words: list[str], run: Path, url: str, command: Command
):
    given = [own.replace("{url}", url).replace("{run}", str(run)) for own in arguments]
    expect_one_error(evaluate(command, "--run", str(run), *given), *words)


@pytest.mark.parametrize("answer", [{"hosts": 1}, [], {"stages": 3, "hosts": [{}]}])
def test_what_is_no_service_of_ours_has_no_status(answer: Any, command: Command):
    with scripted(lambda path, asked: (200, answer)) as url:
        expect_one_error(command("status", url), "ADDRESS", "is not a SkipPipe service")
