"""Decoding with a cache against the model without one, sampling, and the command."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from skippipe_jax.config import parse_config
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.chat import encode_prompt
from skippipe_jax.data.tokenizer import ByteTokenizer
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.decoding import (
    Generator,
    KVPage,
    StageExecutor,
    Step,
    batch_sizes,
    generate_tokens,
    run_stage,
)
from skippipe_jax.inference.decoding import _logits as next_logits
from skippipe_jax.inference.partial import StageOrder, kept, parse_stage_order
from skippipe_jax.inference.staged_model import StagedModel, _apply, _logits, _loss, _scores
from skippipe_jax.inference.token_sampling import sample
from skippipe_jax.training.metrics import CompilationCounter
from tests.harness.messages import expect_error
from tests.harness.partial_models import logits_of, random_model, save_run
from tests.inference.conftest import Command

# Inner stages are alike, and caches of most tests have `LENGTH` positions: programs are shared.
LENGTH, SLOTS = 64, 3
SHAPES = {"width": 32, "layers": 7, "heads": 4, "kv_heads": 2, "ffn_width": 24, "context": LENGTH}
SHAPES |= {"stage_layers": [1, 2, 2, 2], "rope_scaling": {"original_context": 8}}
SECTIONS: dict[str, Any] = {"model": SHAPES, "data": {"sequence_length": 32}}
STAGES = 4
FULL: StageOrder = (0, 1, 2, 3)
GREEDY = Sampling(temperature=0.0)


def model_with(**shape: Any):
    return random_model(parse_config(SECTIONS | {"model": SHAPES | shape}).model, STAGES)


def along(order: StageOrder) -> StagedModel:
    return replace(model_with(), order=order)


def test_matrices_are_multiplied_as_precisely_as_in_training():
    model = model_with(matmul_precision="highest")
    structures, parameters = model.structures, model.parameters
    tokens = np.zeros((1, 16), np.int32)
    x = model.embed({"tokens": tokens, "targets": tokens})
    cache = [KVPage(*jnp.zeros((2, 2, 1, 2, 16, 8)))]
    for function, arguments in (
        (_apply, (structures[1], parameters[1], x)),
        (_loss, (structures[0], parameters[0], x, tokens)),
        (_scores, (structures[0], parameters[0], x, tokens)),
        (_logits, (structures[0], parameters[0], x)),
        (run_stage, (structures[1], parameters[1], cache, x, tokens, None, None)),
        (next_logits, (structures[0], parameters[0], x[:, :1])),
    ):
        products = re.findall(r"dot_general.*", function.lower(*arguments).as_text())
        assert products
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ({}, FULL),
        ({}, (0, 2, 1, 3)),
        ({}, (0, 3)),
        ({}, (0,)),
        ({"kv_heads": 1, "tied_head": True}, (0, 1, 3)),
        ({"kv_heads": 4, "rope_scaling": None}, (0, 2)),
    ],
)
def test_cached_logits_equal_uncached_ones(shape: dict[str, Any], order: StageOrder):
    """Sequences run side by side; each prompt comes in two padded parts."""
    model, prompt, total = model_with(**shape), 27, 40
    tokens = np.random.default_rng(1).integers(0, 259, (SLOTS, total), dtype=np.int32)
    expected = logits_of(model, order, tokens)
    executor = StageExecutor(model, order, SLOTS, LENGTH)
    for start, slot in itertools.product((0, 16), range(SLOTS)):
        span = tokens[slot : slot + 1, start : start + 16].copy()
        positions = np.arange(start, start + 16, dtype=np.int32)[None]
        positions[positions >= prompt] = LENGTH
        executor.prefill(Step(span, positions, slot))
    for place in range(prompt, total):
        one = tokens[:, place : place + 1]
        found = executor.next_logits(Step(one, np.full((SLOTS, 1), place, np.int32)))
        assert np.abs(found - expected[:, place]).max() < 1e-4
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("order", [FULL, (0, 2, 1)])
def test_greedy_tokens_are_the_likeliest(order: StageOrder):
    model, prompt = along(order), [256, 10, 20, 30]
    found = list(generate_tokens(model, prompt, 60, GREEDY))
    assert len(found) == 60
    logits = logits_of(model, order, np.array([prompt + found], np.int32))[0]
    assert found == logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()


TOKEN = st.integers(0, 258)
HOW = st.sampled_from([GREEDY, Sampling(0.9, 0.8, seed=5), Sampling(seed=6)])


def requests_of(prompt: list[int]) -> st.SearchStrategy[DecodeRequest]:
    counts, ends = st.integers(1, 24), st.sampled_from([frozenset(), frozenset([7])])
    return st.builds(DecodeRequest, st.just(prompt), counts, HOW, ends)


REQUESTS = st.lists(TOKEN, min_size=1, max_size=33).flatmap(requests_of)


@settings(max_examples=10)
@given(st.lists(st.tuples(REQUESTS, st.integers(0, 12)), min_size=1, max_size=6), st.data())
def test_requests_get_what_they_get_alone(asked: list[tuple[DecodeRequest, int]], data: Any):
    """Whoever enters and leaves meanwhile, and whatever has been in their slots before."""
    model = model_with()
    generator, found, done = Generator(model.decoder(SLOTS, LENGTH)), defaultdict(list), set()

    def take_step():
        for number, is_last, drawn, *_ in generator.step():
            assert number not in done
            assert drawn is not None
            found[number].append(drawn)
            done.update([number] if is_last else [])

    for request, steps in asked:
        generator.submit(request)
        for _ in range(steps):
            take_step()
    cancelled = data.draw(st.sampled_from([None, *range(len(asked))]))
    if cancelled is not None:
        generator.cancel(cancelled)
        done.add(cancelled)
    while generator.is_busy:
        take_step()
    assert done == set(range(len(asked)))
    for number, (request, _) in enumerate(asked):
        alone, expected = Generator(model.decoder(1, LENGTH)), []
        alone.submit(request)
        while alone.is_busy:
            expected += [decoded.drawn for decoded in alone.step()]
        assert found[number] == expected[: None if number != cancelled else len(found[number])]


@pytest.mark.parametrize(("prompt", "count"), [(0, 3), (3, 0), (30, 35)])
def test_a_request_that_fits_no_slot_is_refused(prompt: int, count: int):
    generator = Generator(model_with().decoder(1, 64))
    with pytest.raises(InputError, match=f"max_new_tokens = {count}.*prompt has {prompt} tokens"):
        generator.submit(DecodeRequest([1] * prompt, count, GREEDY))
    assert list(generate_tokens(model_with(), [1], 0, GREEDY)) == []


def test_a_request_that_is_cancelled_frees_its_slot():
    generator = Generator(model_with().decoder(1, 64))
    first, second = (generator.submit(DecodeRequest([256, 5], 50, GREEDY)) for _ in range(2))
    assert [own.request for own in generator.step()] == [first]
    generator.cancel(first)
    assert [own.request for own in generator.step()] == [second]
    generator.cancel(second)
    generator.cancel(second)
    assert not generator.is_busy
    assert generator.step() == []


@pytest.mark.nightly
def test_nothing_compiles_anew_as_sequences_come_and_go():
    model = model_with(width=40)
    generator = Generator(model.decoder(2, 64))
    generator.submit(DecodeRequest([256, *range(15)], 3, GREEDY))
    generator.submit(DecodeRequest([256, *range(30)], 3, Sampling()))
    with CompilationCounter() as counter:
        while generator.is_busy:
            generator.step()
        assert counter.take().count > 0
        for length in (1, 2, 9, 17, 25, 31):
            generator.submit(DecodeRequest([length] * length, 33, Sampling(0.5, 0.9, seed=length)))
        while generator.is_busy:
            generator.step()
        other = replace(model, order=(0, 3, 1))
        assert len(list(generate_tokens(other, [256, 5], 40, GREEDY))) == 40
        counter.take()
        assert len(list(generate_tokens(other, [256, *range(9)], 30, Sampling()))) == 30
        assert counter.take().count == 0


def test_draws_depend_on_the_seed_alone():
    model = model_with()
    drawn = [list(generate_tokens(model, [256, 5], 40, Sampling(seed=seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_end_mark_ends_the_text():
    model = model_with()
    tokens = list(generate_tokens(model, [256, 5], 40, GREEDY))
    end = tokens[7]
    assert list(generate_tokens(model, [256, 5], 40, GREEDY, end)) == (tokens[: tokens.index(end)])


@pytest.mark.parametrize(
    ("prompt", "count", "remedy"),
    [(4, 61, "Ask for 60 or fewer"), (64, 1, "Shorten the prompt"), (70, 1, "Shorten the prompt")],
)
def test_more_than_the_context_is_refused(prompt: int, count: int, remedy: str):
    with pytest.raises(InputError, match=f"context is 64 tokens.*{remedy}"):
        next(generate_tokens(model_with(), [1] * prompt, count, GREEDY))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))

    def shares(temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
        rows = jnp.broadcast_to(logits, (20_000, 4))
        keys = jax.random.split(jax.random.key(0), len(rows))
        how = (jnp.full(len(rows), own) for own in (temperature, top_p, top_k, min_p))
        drawn = jax.jit(sample)(rows, keys, *how)
        return np.bincount(drawn, minlength=4) / len(drawn)

    np.testing.assert_allclose(shares(1.0, 1.0), [0.5, 0.25, 0.15, 0.1], atol=0.02)
    squares = np.array([0.25, 0.0625, 0.0225, 0.01])
    np.testing.assert_allclose(shares(0.5, 1.0), squares / squares.sum(), atol=0.02)
    # The third is needed for 0.8, the fourth is not.
    np.testing.assert_allclose(shares(1.0, 0.8), np.array([50, 25, 15, 0]) / 90, atol=0.02)
    np.testing.assert_array_equal(shares(1.0, 0.3), [1, 0, 0, 0])
    np.testing.assert_array_equal(shares(0.0, 1.0), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(1.0, 1.0, top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.02)
    np.testing.assert_allclose(shares(1.0, 1.0, min_p=0.3), [5 / 9, 2.5 / 9, 1.5 / 9, 0], atol=0.02)
    # Of what is left, which is 0.9 of all, the first two make up 0.83.
    np.testing.assert_allclose(shares(1.0, 0.83, 3), [2 / 3, 1 / 3, 0, 0], atol=0.02)


def test_the_least_top_p_takes_the_likeliest_token():
    logits = jax.random.normal(jax.random.key(0), (500, 300)) * 3
    keys = jax.random.split(jax.random.key(1), len(logits))
    how = (jnp.full(len(logits), own) for own in (1.0, 1e-9, 0, 0.0))
    drawn = jax.jit(sample)(logits, keys, *how)
    np.testing.assert_array_equal(drawn, jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize(
    ("named", "order"),
    [(None, FULL), ("0,2,1", (0, 2, 1)), (" 0, 3", (0, 3)), ("0", (0,))],
)
def test_stages_are_those_named(named: str | None, order: StageOrder):
    assert parse_stage_order(named, None, STAGES, 0) == order


def test_a_share_of_the_stages_is_drawn_by_the_seed():
    drawn = {parse_stage_order(None, 0.5, STAGES, seed) for seed in range(30)}
    assert drawn == {way.stages for way in kept(STAGES, 0.5, 99, 0).variants}
    assert parse_stage_order(None, 0.5, STAGES, 3) == parse_stage_order(None, 0.5, STAGES, 3)


# The command.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("decoding") / "run"
    save_run(run, SECTIONS, STAGES)
    return run


def test_the_command_prints_prompt_and_text(
    run: Path, monkeypatch: pytest.MonkeyPatch, command: Command
):
    asked = ["generate", "--run", run, "--max-new-tokens"]
    settings = ["40", "--temperature", "0", "--stage-order", "0,2,1"]
    tokenizer, model = ByteTokenizer(), along((0, 2, 1))
    prompt = [tokenizer.begin, *tokenizer.encode("déf").tolist()]
    tokens = list(generate_tokens(model, prompt, 40, GREEDY, tokenizer.end))
    expected = 0, "déf" + tokenizer.decode(tokens) + "\n", "stages 0 2 1 of 4\n"
    assert command(*asked, *settings, "--prompt", "déf") == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("déf"))
    assert command(*asked, *settings, "--prompt", "-") == expected
    err = command(*asked, 40, "--keep-fraction", 0.5, "--prompt", "déf")[2]
    assert err.endswith(" of 4\n")


CHATS = {"source": "chat", "path": "gone", "packing": "documents", "sequence_length": 32}


def test_a_chat_prints_the_answer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
):
    model = save_run(tmp_path / "run", SECTIONS | {"data": CHATS}, STAGES)
    asked = ["generate", "--run", tmp_path / "run", "--temperature", 0, "--max-new-tokens"]
    tokenizer = ByteTokenizer()

    def answer(*texts: str) -> str:
        roles = ["user", "assistant"] * 2
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        prompt = encode_prompt(messages, tokenizer, "2026-11-22").tolist()
        tokens = list(generate_tokens(model, prompt, 2, GREEDY, tokenizer.end))
        return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]

    first = answer("abcdef")
    assert first
    assert command(*asked, 2, "--chat", "--prompt", "abcdef") == (0, first + "\n", "")
    code, out, err = command(*asked, 40, "--prompt", "ab")
    assert (code, out[:2]) == (0, "ab")
    assert err == "the model was trained on conversations: add --chat to get an answer\n"

    typed = io.StringIO("abcdef\nc\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    shown = f"> {first}\n> {answer('abcdef', first, 'c')}\n> \n"
    assert command(*asked, 2, "--chat") == (0, shown, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcdef\n"))
    assert command(*asked, 2, "--chat", "--prompt", "-") == (0, first + "\n", "")


def test_a_chat_ends_with_the_turn_by_the_template(tmp_path: Path, command: Command):
    """Each token of this tokenizer is a mark, so that one of them ends what the model says."""
    run, folder = tmp_path / "run", tmp_path / "run" / "tokenizer"
    folder.mkdir(parents=True)
    words = {f"<{number}>": number for number in range(259)}
    words_alone = Tokenizer(WordLevel(words, unk_token="<0>"))
    words_alone.add_special_tokens(["<0>", "<1>"])
    words_alone.pre_tokenizer = WhitespaceSplit()
    words_alone.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<0>", "bos_token": "<1>"}')
    save_run(run, SECTIONS | {"data": CHATS | {"tokenizer": "gone"}}, STAGES)

    def said(end: str) -> list[str]:
        template = (
            "{% for m in messages %} {{ m.content }}"
            f"{{{{ ' {end}' if m.role == 'assistant' }}}}{{% endfor %}}"
        )
        (folder / "chat_template.jinja").write_text(template)
        words = ["--prompt", "<7> <8>", "--max-new-tokens", 40, "--temperature", 0]
        code, out, _ = command("generate", "--run", run, "--chat", *words)
        assert code == 0
        return out.split()

    prompt, model = [7, 8], model_with()
    expected = [f"<{n}>" for n in generate_tokens(model, prompt, 40, GREEDY, 0)]
    assert said("<0>") == expected
    assert len(expected) > 3
    assert said(expected[3]) == expected[: expected.index(expected[3])]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--prompt a --chat", "--chat = True...was not trained on conversations"),
        ("", "--prompt = None: is missing...--chat on a terminal"),
        ("--chat", "--prompt = None: is missing"),
        ("--prompt abc --max-new-tokens 64", "--max-new-tokens = 64...context is 64...60 or fewer"),
        ("--prompt abc --max-new-tokens 0", "--max-new-tokens = 0"),
        ("--prompt caf\udce9", "--prompt = 'caf...not UTF-8"),
        ("--prompt -", "--prompt = '-'...not UTF-8"),
        ("--prompt abc --temperature -1", "--temperature = -1.0"),
        ("--prompt abc --top-p 0", "--top-p = 0.0: must be greater than 0"),
        ("--prompt abc --stage-order 1,2", "--stage-order = '1,2'...Start with 0"),
        ("--prompt abc --stage-order 0,4", "--stage-order = 4...at most 3"),
        ("--prompt abc --stage-order 0,1,1", "--stage-order = '0,1,1'...twice"),
        ("--prompt abc --stage-order all", "--stage-order = 'all'...Write 0,1,3"),
        ("--prompt abc --keep-fraction 0", "--keep-fraction = 0.0"),
        ("--prompt abc --step 4", "...checkpoints = 4...one of the steps [5]"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    words: str, told: str, run: Path, monkeypatch: pytest.MonkeyPatch, command: Command
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    expect_error(command("generate", "--run", run, *words.split()), told)


def test_few_sequences_run_few_rows(monkeypatch: pytest.MonkeyPatch):
    assert [batch_sizes(slots) for slots in (1, 3, 6, 16)] == [[1], [1, 3], [1, 4, 6], [1, 4, 16]]
    generator, rows = Generator(model_with().decoder(SLOTS, LENGTH)), list[int]()
    next_logits = generator.decoder.next_logits

    def noted(step: Step) -> Any:
        rows.append(len(step.tokens))
        return next_logits(step)

    monkeypatch.setattr(generator.decoder, "next_logits", noted)
    for count in (5, 1, 2):
        generator.submit(DecodeRequest([256], count, GREEDY))
    while generator.is_busy:
        generator.step()
    assert rows == [3, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("lengths", "limit", "shapes"),
    [
        ((17, 15, 14), None, [(3, 16)]),
        ((40, 33, 30), None, [(3, 64)]),
        ((33, 2, 3), None, [(1, 32), (1, 16), (1, 16)]),  # Most of a joint step would be padding.
        ((17, 15, 14), 128, [(1, 16), (1, 16), (1, 16)]),
    ],
)
def test_prompts_of_like_length_run_side_by_side(
    lengths: tuple[int, ...],
    limit: int | None,
    shapes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
):
    generator, ran = Generator(model_with().decoder(SLOTS, LENGTH), limit), list[tuple[int, ...]]()
    prefill = generator.decoder.prefill

    def noted(step: Step, *targets: Any) -> Any:
        ran.append(step.tokens.shape)
        return prefill(step, *targets)

    monkeypatch.setattr(generator.decoder, "prefill", noted)
    for length in lengths:
        generator.submit(DecodeRequest([256, *[5] * (length - 1)], 1, GREEDY))
    while generator.is_busy:
        generator.step()
    assert ran == shapes
