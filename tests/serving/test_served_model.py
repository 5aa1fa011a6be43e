"""A model that is served says what it says by itself, to clients and to the harness."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import scipy.special
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from skippipe_sched.errors import TEMPORARY_EXIT_CODE

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.inference.harness_model import HarnessModel
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.serving.model import open_engine
from skippipe_jax.training.metrics import CompilationCounter
from tests.commands.conftest import command as command  # a fixture
from tests.commands.examples import Command, expect_one_error
from tests.harness.partial_models import logits_of, save_run
from tests.serving.scripted_engine import PATIENCE_S, serving

SECTIONS: dict[str, Any] = {
    "model": {
        "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_width": 24, "context": 128,
    },
    "data": {"sequence_length": 32, "source": "chat", "path": "chat.jsonl", "packing": "documents"},
}  # fmt: skip
NAME = "tiny"
# The harness's decorator hides what these take.
Completions: Any = LocalCompletionsAPI
Conversations: Any = LocalChatCompletion


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    save_run(folder, SECTIONS, 3)
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> StagedModel:
    return open_source(run).model()


@pytest.fixture(scope="module")
def url(run: Path, model: StagedModel) -> Iterator[str]:
    what, engine = open_engine(NAME, model, open_source(run).config.data, 3, None)
    with serving(engine, what) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def tokens_of(choice: Any) -> list[str]:
    return choice.logprobs.tokens


def names(tokens: Sequence[int]) -> list[str]:
    """The names by which tokens of bytes are told."""
    return [chr(own) if own < 128 else f"token_id:{own}" for own in tokens]


def test_many_at_a_time_get_what_each_gets_alone_and_nothing_compiles(
    client: openai.OpenAI, model: StagedModel
):
    orders = [(0, 1, 2), (0, 2), (0,)]
    asked = [
        (prompt, order, Sampling(temperature, 0.9, seed))
        for seed, prompt in enumerate(("a", "four words of text", "x" * 70))
        for order in orders
        for temperature in (0.0, 0.8)
    ]
    expected = [
        model.generate([256, *prompt.encode()], 24, order, how) for prompt, order, how in asked
    ]

    def ask(one: tuple[str, tuple[int, ...], Sampling]) -> list[str]:
        prompt, order, how = one
        answer = client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=24,
            temperature=how.temperature,
            top_p=how.top_p,
            seed=how.seed,
            logprobs=0,
            extra_body={"skippipe_keep": list(order)},
        )
        [choice] = answer.choices
        assert choice.model_extra == {"skippipe": {"stages": list(order)}}
        told = tokens_of(choice)
        return told[:-1] if choice.finish_reason == "stop" else told

    with CompilationCounter() as counter, concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, asked))
        client.completions.create(
            model=NAME, prompt="z" * 90, echo=True, logprobs=3, frequency_penalty=1.0
        )
        assert counter.take().count == 0
    assert found == [names(own) for own in expected]


def test_probabilities_are_those_of_the_model(client: openai.OpenAI, model: StagedModel):
    prompt = [256, *b"What are words?"]
    [choice] = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=5, temperature=0.0, echo=True, logprobs=2
    ).choices
    told = choice.logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    drawn = model.generate(prompt, 5, sampling=Sampling(temperature=0.0))
    whole = [*prompt, *drawn]
    logits = logits_of(model, (0, 1, 2), np.array([whole], np.int32))[0]
    logs = scipy.special.log_softmax(logits, axis=-1)
    expected = [logs[place, token] for place, token in enumerate(whole[1:])]
    assert told.token_logprobs[0] is None
    np.testing.assert_allclose(told.token_logprobs[1:], expected, atol=1e-4)  # type: ignore[arg-type]
    for place, likeliest in enumerate(told.top_logprobs[1:]):
        assert max(likeliest.values()) == pytest.approx(logs[place].max(), abs=1e-4)


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI, model: StagedModel):
    prompt = [256, *b"aab"]
    [choice] = client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=20,
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logprobs=0,
        extra_body={"repetition_penalty": 1.1, "ignore_eos": True},
    ).choices
    number = {name: token for token, name in enumerate(names(range(259)))}
    tokens = [number[name] for name in tokens_of(choice)]
    all_logits = logits_of(model, (0, 1, 2), np.array([[*prompt, *tokens]], np.int32))[0]
    counts, in_prompt = np.zeros(259), np.zeros(259, bool)
    in_prompt[prompt] = True
    for logits, token in zip(all_logits[len(prompt) - 1 :], tokens, strict=False):
        known = in_prompt | (counts > 0)
        punished = np.where(known, np.where(logits > 0, logits / 1.1, logits * 1.1), logits)
        assert token == (punished - 0.3 * counts - 0.5 * (counts > 0)).argmax()
        counts[token] += 1


def asked_of_harness(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def test_the_harness_finds_by_the_api_what_it_finds_without(
    url: str, run: Path, model: StagedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    asked = {"model": NAME, "base_url": f"{url}/v1/completions", "max_length": 128}
    by_api = Completions(**asked, add_bos_token=True)
    alone = HarnessModel(model)
    pairs = [("\x01a", "b"), ("words of", " text"), ("", "yes"), ("2 + 2 =", " 4")]
    given = [asked_of_harness("loglikelihood", *pair) for pair in pairs]
    # It sends the tokens without the mark with which each text begins here.
    begin = "<|begin_of_text|>"
    assert by_api.tokenizer.encode(begin) == [256]
    monkeypatch.setattr(by_api, "tok_encode", _marked(by_api.tok_encode))
    found = by_api.loglikelihood(given)
    for (value, is_greedy), (expected, is_greedy_alone) in zip(
        found, alone.loglikelihood(given), strict=True
    ):
        assert value == pytest.approx(expected, abs=1e-3)
        assert is_greedy == is_greedy_alone
    settings = {"until": ["q"], "max_gen_toks": 12}
    texts = [asked_of_harness("generate_until", text, settings) for text in ("a", "words")]
    plain = Completions(**asked, tokenized_requests=False)
    assert plain.generate_until(texts) == alone.generate_until(texts)


def _marked(encode: Any) -> Any:
    def tok_encode(string: Any, *given: Any, **named: Any) -> Any:
        found = encode(string, *given, **named)
        return [256, *found] if isinstance(string, str) else [[256, *own] for own in found]

    return tok_encode


def test_the_harness_converses(url: str, monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    chat = Conversations(
        model=NAME, base_url=f"{url}/v1/chat/completions", eos_string="<|end_of_text|>"
    )
    messages: Any = [{"role": "user", "content": "Hello"}]
    history = chat.apply_chat_template(messages)
    settings = {"until": [], "max_gen_toks": 12}
    [text] = chat.generate_until([asked_of_harness("generate_until", history, settings)])
    answer = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0.0, max_tokens=12
    )
    assert text == answer.choices[0].message.content


@pytest.mark.nightly
def test_the_command_serves_until_it_is_told_to_end(run: Path, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "skippipe_jax", "serve", "--run", f"{run}@5", "--port", "0"),
            *("--max-num-seqs", "1", "--max-model-len", "64", "--api-key-file", str(keys)),
            *("--served-model-name", NAME),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("compiling the programs of the service")
        line = process.stderr.readline()
        url = line.split()[-1]
        assert line == f"serving {NAME} at {url}\n"
        client = openai.OpenAI(base_url=url, api_key="secret")
        [shown] = client.models.list().data
        assert (shown.id, shown.model_extra and shown.model_extra["max_model_len"]) == (NAME, 64)
        assert client.completions.create(model=NAME, prompt="a", max_tokens=3).usage
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        told = process.stderr.read().splitlines()
        assert told == ["SIGTERM: finishing the answers in progress", "service stopped"]
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "nowhere"], ["nowhere"]),
        (["--run", "{run}@last"], ["--run", "'last' is not a step"]),
        (["--run", "{run}@77"], ["77"]),
        (["--run", "{run}", "--host", "0.0.0.0"], ["--host", "--api-key-file"]),
        (["--run", "{run}", "--api-key-file", "nowhere"], ["--api-key-file", "nowhere"]),
        (["--run", "{run}", "--max-model-len", "129"], ["--max-model-len = 129", "128 tokens"]),
        (["--run", "{run}", "--max-num-seqs", "1000000000"], ["--max-num-seqs", "GB are free"]),
        (["--run", "{run}", "--max-waiting", "-1"], ["--max-waiting"]),
        (["--run", "{run}", "--drain-timeout", "soon"], ["--drain-timeout = 'soon'", "30s"]),
        (
            ["--run", "{run}", "--coordinator", "127.0.0.1:1", "--host-id", "0"],
            ["--hosts = 1", "all hosts"],
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_a_line(
    arguments: list[str], words: list[str], run: Path, command: Command
):
    given = [argument.replace("{run}", str(run)) for argument in arguments]
    expect_one_error(command("serve", *given, "--port", "0"), *words)


def test_a_port_that_is_taken_is_refused_by_a_line(run: Path, url: str, command: Command):
    port = url.rpartition(":")[2]
    result = command("serve", "--run", str(run), "--port", port)
    expect_one_error(result, "--port", "listening on", code=TEMPORARY_EXIT_CODE)


def test_a_package_that_the_command_needs_is_named(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "starlette", None)
    result = command("serve", "--run", str(run))
    expect_one_error(result, "command = 'serve': needs the package starlette", "[serve]")
