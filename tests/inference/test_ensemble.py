"""Several models as one, against their logits without caches, mixed by plain loops in float64."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from lm_eval.api.instance import Instance
from skippipe_sched.errors import InputError

from skippipe_jax.config import parse_config
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, document_starts
from skippipe_jax.data.tokenizer import ByteTokenizer, write_byte_tokenizer
from skippipe_jax.inference import decoding
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.decoding import Generator, Step, generate_tokens
from skippipe_jax.inference.domain_losses import evaluate_ensemble
from skippipe_jax.inference.ensemble import Ensemble, MixtureExecutor, _next_logits, averaged
from skippipe_jax.inference.harness_model import HarnessModel
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.scores import score
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.inference.token_sampling import sample
from skippipe_jax.training.metrics import CompilationCounter
from tests.harness import ensemble_by_hand as by_hand
from tests.harness.messages import expect_error
from tests.harness.partial_models import logits_of, random_model, save_run
from tests.inference.conftest import Command

BEGIN, END = ByteTokenizer.begin, ByteTokenizer.end
# Most caches have as many positions as the shorter context, so that programs are shared.
TIME, LENGTH, SLOTS = 32, 48, 2
MODEL = {"layers": 2, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 64}
# Of two sizes and cuts; one vocabulary is padded beyond the tokenizer.
SHAPES: list[dict[str, Any]] = [
    MODEL | {"width": 16, "vocabulary_size": 259, "stage_layers": [1, 1]},
    MODEL | {"width": 8, "vocabulary_size": 264, "context": LENGTH, "stage_layers": [2]},
]
STAGES = (2, 1)
PRIOR = np.array([0.3, 0.7])
WAYS = ["posterior", "prior", "top-1"]


@pytest.fixture(scope="module")
def experts() -> list[StagedModel]:
    configs = [parse_config({"model": own, "data": {"sequence_length": TIME}}) for own in SHAPES]
    return [
        random_model(config.model, stages, seed)
        for seed, (config, stages) in enumerate(zip(configs, STAGES, strict=True))
    ]


def ensemble_of(experts: list[StagedModel], mix: str) -> Ensemble:
    return Ensemble(experts, np.log(PRIOR), mix)


def distributions(experts: list[StagedModel], tokens: np.ndarray) -> np.ndarray:
    """Of each expert at each position of one sequence, over the larger vocabulary."""
    found = np.full((len(experts), len(tokens), 264), -np.inf)
    for own, expert in zip(found, experts, strict=True):
        logits = logits_of(expert, expert.default_order, tokens[None])[0]
        own[:, : logits.shape[-1]] = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return found


def mixed_by_hand(each: np.ndarray, tokens: np.ndarray, mix: str) -> np.ndarray:
    """The mixture at each position, whose posterior knows of all tokens up to it."""
    passed = np.take_along_axis(each[:, :-1], tokens[None, 1:, None], axis=-1)[..., 0]
    passed = np.pad(passed, ((0, 0), (0, 1)))
    by_place = by_hand.posteriors(passed, PRIOR, tokens == BEGIN)[:-1]
    found = np.zeros(each.shape[1:])
    for place, w in enumerate(by_place):
        if mix == "prior":
            w = PRIOR
        elif mix == "top-1":
            w = np.eye(2)[w.argmax()]
        with np.errstate(divide="ignore"):  # Tokens that no expert knows.
            found[place] = np.log(w @ np.exp(each[:, place]))
    return found


TEXT = np.array([BEGIN, *b"stage and node ", END, BEGIN, *b"path, plan", END], np.int32)


@pytest.mark.parametrize("mix", WAYS)
def test_tokens_are_drawn_from_the_mixture(mix: str, experts: list[StagedModel]):
    """The prompt holds two documents; weights of the second know nothing of the first."""
    ensemble, prompt = ensemble_of(experts, mix), TEXT[:20]
    how = Sampling(temperature=0.7, top_p=0.9, seed=3)
    found = list(generate_tokens(ensemble, prompt.tolist(), 16, how))
    tokens = np.array([*prompt, *found], np.int32)
    mixed = mixed_by_hand(distributions(experts, tokens), tokens, mix)
    for place, token in enumerate(found, len(prompt) - 1):
        key = jax.random.fold_in(jax.random.key(3), place)
        by = key[None], *(jnp.array([own]) for own in (0.7, 0.9, 0, 0.0))
        [expected] = sample(jnp.asarray(mixed[None, place], jnp.float32), *by)
        assert token == expected
    assert len(set(found)) > 3


def test_requests_of_a_mixture_get_what_they_get_alone(
    experts: list[StagedModel], monkeypatch: pytest.MonkeyPatch
):
    """Prompts come in parts, in the second of which another document may begin."""
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 16)
    ensemble, how = ensemble_of(experts, "posterior"), Sampling(temperature=0.7, top_p=0.9, seed=3)
    prompts = [TEXT[:count].tolist() for count in (20, 5, 26, 1, 17)]
    generator, found = Generator(ensemble.decoder(SLOTS, LENGTH)), [[] for _ in prompts]
    for count, prompt in enumerate(prompts, 10):
        generator.submit(DecodeRequest(prompt, count, how))
    while generator.is_busy:
        for number, _, drawn, *_ in generator.step():
            assert drawn is not None
            found[number].append(drawn.token)
    monkeypatch.undo()
    for count, (prompt, drawn) in enumerate(zip(prompts, found, strict=True), 10):
        alone, expected = Generator(ensemble.decoder(1, LENGTH)), []
        alone.submit(DecodeRequest(prompt, count, how))
        while alone.is_busy:
            expected += [own.drawn.token for own in alone.step() if own.drawn is not None]
        assert drawn == expected


@pytest.mark.parametrize(("field", "value"), [("scores_prompt", True), ("stages", (0,))])
def test_what_needs_a_single_model_is_refused_by_an_ensemble(
    field: str, value: Any, experts: list[StagedModel]
):
    generator = Generator(ensemble_of(experts, "prior").decoder(1, LENGTH))
    request = replace(DecodeRequest([1], 1, Sampling()), **{field: value})
    with pytest.raises(InputError, match="needs a single model, not an ensemble") as refusal:
        generator.submit(request)
    assert (refusal.value.field, refusal.value.value) == (field, value)


def test_tokens_of_an_ensemble_are_compiled_once(experts: list[StagedModel]):
    ensemble = Ensemble(experts)
    ensemble.generate([BEGIN, 1, 2], 40)
    with CompilationCounter() as counter:
        text = ensemble.generate("abcd", 42)
        assert counter.take().count == 0
    prompt = [BEGIN, *b"abcd"]
    assert text == ByteTokenizer().decode(ensemble.generate(prompt, 42))
    with pytest.raises(InputError, match="context is 48 tokens"):
        ensemble.generate("abcd", 44)


def test_a_token_is_scored_by_each_head_once(experts: list[StagedModel]):
    executor = MixtureExecutor(Ensemble(experts), SLOTS, LENGTH)
    step = Step(np.zeros((SLOTS, 1), np.int32), np.full((SLOTS, 1), 3, np.int32))
    given = executor._structures, "posterior", LENGTH
    streams = [own.run(step) for own in executor._executors]
    state = executor._parameters, executor._state, streams, step, executor._log_prior, BEGIN
    program = _next_logits.lower(given, *state).as_text()
    for expert in experts:
        size = expert.config.vocabulary_size
        assert len(re.findall(rf"dot_general.*-> tensor<[\dx]*{size}xf32>", program)) == 1


def packed() -> Batch:
    """Two rows, one of them of two documents and shorter; some targets do not count."""
    tokens = np.random.default_rng(0).integers(0, 256, (2, TIME), dtype=np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, ::5] = targets[1, 20:] = IGNORED_TARGET
    begins = np.zeros(tokens.shape, bool)
    begins[0, [0, 13]] = begins[1, 0] = True
    return {"tokens": tokens, "targets": targets, "begins": begins}


def test_losses_are_mixtures_of_those_of_the_experts(experts: list[StagedModel]):
    batch = packed()
    log_p = np.stack([expert.log_probabilities(batch) for expert in experts])
    wide, resets = log_p.astype(np.float64), document_starts(batch, BEGIN)
    expected = by_hand.mixed(wide, resets, np.tile(PRIOR, (2, 1)))
    found = ensemble_of(experts, "posterior").log_probabilities(batch)
    assert (found[batch["targets"] == IGNORED_TARGET] == 0).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mix", WAYS)
def test_the_harness_hears_of_the_mixture(mix: str, experts: list[StagedModel]):
    """What is given is not counted, but the posterior knows it."""
    model = HarnessModel(ensemble_of(experts, mix), batch_size=2)
    given = np.array([BEGIN, *b"given"], np.int32)
    likeliest = mixed_by_hand(distributions(experts, given), given, mix)[-1].argmax()
    letters = [chr(likeliest), "z"] if likeliest < 128 else ["y", "z"]
    asked = [*letters, " and more"]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=("given", word), idx=0)
        for word in asked
    ]
    for word, (nats, greedy) in zip(asked, model.loglikelihood(requests), strict=True):
        tokens = np.array([*given, *word.encode()], np.int32)
        mixed = mixed_by_hand(distributions(experts, tokens), tokens, mix)
        places = range(len(given) - 1, len(tokens) - 1)
        expected = sum(mixed[place, tokens[place + 1]] for place in places)
        assert nats == pytest.approx(expected, abs=1e-3)
        assert greedy == all(mixed[place].argmax() == tokens[place + 1] for place in places)


def test_averaged_parameters_are_means(experts: list[StagedModel]):
    first, other = experts[0], random_model(experts[0].config, STAGES[0], seed=7)
    mean = averaged([first, other])
    kernels = [m.parameters[1]["blocks"]["down"]["kernel"] for m in (first, other, mean)]
    np.testing.assert_allclose(kernels[2], (kernels[0] + kernels[1]) / 2, rtol=1e-6)
    same = averaged([first, first])
    jax.tree.map(np.testing.assert_array_equal, list(same.parameters), list(first.parameters))
    for unlike, field in (
        (experts[1], "model.vocabulary_size = 264"),
        (replace(first, config=replace(first.config, heads=1)), "model.heads = 1"),
        (random_model(replace(first.config, stage_layers=None), 1), "model.stage_layers"),
    ):
        with pytest.raises(InputError, match=field):
            averaged([first, unlike])


# Runs and commands.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two domains, and one with another tokenizer."""
    folder = tmp_path_factory.mktemp("experts")
    random = np.random.default_rng(0)
    mixture = []
    for name, words in (("letters", "abc"), ("digits", "123")):
        (folder / name).mkdir()
        for number in range(24):
            text = "".join(random.choice(list(words), 50))
            (folder / name / f"{number}.txt").write_text(f"{text} {number}")
        mixture.append({"source": "text", "path": str(folder / name)})
    data = {"source": "mixture", "mixture": mixture, "sequence_length": TIME, "held_out": 0.5}
    for number, (shape, stages) in enumerate(zip(SHAPES, STAGES, strict=True)):
        save_run(folder / f"run{number}", {"model": shape, "data": data}, stages)
    (folder / "tokens").mkdir()
    write_byte_tokenizer(folder / "tokens", "tokenizer")
    other = {"model": SHAPES[0], "data": data | {"tokenizer": str(folder / "tokens")}}
    save_run(folder / "other", other, STAGES[0])
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


BOTH = ["--run", "run0", "--run", "run1"]


def test_evaluation_tells_of_each_expert_and_of_all(command: Command, folder: Path):
    code, out, err = command("evaluate", *BOTH, "--sequences", "6", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    sources = [open_source(folder / name) for name in ("run0", "run1")]
    experts, data = [source.model() for source in sources], sources[0].config.data
    for domain in ("letters", "digits"):
        part = [score(expert, data, domain, "priors", 100) for expert in experts]
        log_p = np.stack([own.log_probabilities for own in part]).astype(np.float64)
        prior = by_hand.priors_of(log_p, part[0].resets, 0.3)[-1]
        np.testing.assert_allclose(found["priors"][domain], prior, atol=1e-9)
        scored = [score(expert, data, domain, "scores", 6) for expert in experts]
        for own, of_expert in zip(scored, found["experts"], strict=True):
            assert of_expert["domains"][domain]["loss"] == pytest.approx(own.loss)
        log_p = np.stack([own.log_probabilities for own in scored]).astype(np.float64)
        mixed = by_hand.mixed(log_p, scored[0].resets, np.tile(prior, (log_p.shape[1], 1)))
        loss = -mixed.sum() / scored[0].tokens
        # Acceptance: a millionth of a nat per token.
        assert abs(found["ensemble"]["domains"][domain]["loss"] - loss) < 1e-6
    assert [own["run"] for own in found["experts"]] == ["run0", "run1"]
    np.testing.assert_allclose(found["prior"], np.mean([*found["priors"].values()], axis=0))

    table = command("evaluate", *BOTH, "--sequences", "6")[1]
    assert f"{found['ensemble']['domains']['digits']['loss']:.4f}" in table
    assert f"{found['ensemble']['macro']:.4f}" in table
    # What it has written is a prior for others.
    (folder / "weights.json").write_text(out)
    asked = ["--sequences", "6", "--json", "--prior", "weights.json", "--mix", "prior"]
    again = json.loads(command("evaluate", *BOTH, *asked)[1])
    np.testing.assert_allclose(again["prior"], found["prior"])
    words = ["--prompt", "ab", "--max-new-tokens", 40, "--prior", "weights.json"]
    code, out, _ = command("generate", *BOTH, *words)
    weighed = Ensemble(experts, np.log(found["prior"]))
    assert (code, out) == (0, "ab" + weighed.generate("ab", 40, Sampling()) + "\n")


@pytest.mark.nightly
def test_domains_are_evaluated_as_the_ensemble_says(experts: list[StagedModel], folder: Path):
    data = open_source(folder / "run0").config.data
    names = ("one", "two")
    ensemble = replace(ensemble_of(experts, "posterior"), names=names)
    found = evaluate_ensemble(ensemble, [None, None], data, 5, "file").ensemble
    for domain in ("letters", "digits"):
        own = score(ensemble, data, domain, "scores", 5)
        assert found.domains[domain].loss == pytest.approx(own.loss, abs=1e-6)
    # The first sequence of an updated prior has a uniform one.
    uniform, decayed = (
        evaluate_ensemble(replace(ensemble, given_prior=None), [None] * 2, data, count, prior)
        for count, prior in ((1, "uniform"), (1, "decay"))
    )
    assert decayed.ensemble == uniform.ensemble
    assert not decayed.weights
    assert "prior" not in decayed.to_json()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("evaluate BOTH --keep-fraction 0.5", "--keep-fraction = '0.5': applies to one model"),
        ("evaluate BOTH --paths", "--paths = True: applies to one model"),
        ("evaluate BOTH --swaps", "--swaps = True: applies to one model"),
        ("evaluate BOTH --importance", "--importance = True: applies to one model"),
        ("evaluate BOTH --part priors", "--part = 'priors': applies to one model"),
        ("evaluate BOTH --step 0", "--step = 0: applies to one model"),
        ("evaluate BOTH --num-stages 1", "--num-stages = 1: the plan of a run sets"),
        ("evaluate BOTH --prior best", "--prior = 'best': is not a prior"),
        ("evaluate BOTH --mix best", "--mix = 'best': unknown name"),
        ("evaluate --run run0 --mix prior", "--mix = 'prior': applies to several"),
        ("evaluate --run run0 --run run0", "--run = 'run0': is named twice"),
        ("evaluate --run run0 --run other", "--run = 'other': its tokenizer"),
        ("evaluate BOTH --prior nowhere.json", "--prior = 'nowhere.json'"),
        ("evaluate BOTH --prior short.json", "...is not a list of 2 weights"),
        ("evaluate BOTH --prior none.json", "...must be greater than 0"),
        ("evaluate BOTH --prior less.json", "...does not add up to 1"),
        ("generate BOTH --prompt a --stage-order 0,1", "--stage-order = '0,1': applies to one"),
        ("generate BOTH --prompt a --scale share", "--scale = 'share': applies to one"),
        ("generate BOTH --prompt a --prior cached", "--prior = 'cached'"),
        ("generate BOTH --prompt a --max-new-tokens 47", "...context is 48 tokens"),
        ("lm-eval BOTH --tasks any --keep-fraction 0.5", "--keep-fraction = 0.5: applies to one"),
    ],
)
def test_what_several_models_cannot_is_refused(
    words: str, told: str, command: Command, folder: Path
):
    for file, weights in (("short", [1.0]), ("none", [0, 1]), ("less", [0.1, 0.1])):
        (folder / f"{file}.json").write_text(json.dumps({"prior": weights}))
    expect_error(command(*words.replace("BOTH", " ".join(BOTH)).split()), told)


def test_text_that_another_expert_has_trained_on_is_not_scored(command: Command, folder: Path):
    config = yaml.safe_load((folder / "run1" / "config.yaml").read_text())
    config["data"]["held_out"] = 0.25
    save_run(folder / "seen", config, STAGES[1])
    told = "data.held_out = 0.5: the held-out text would contain text that the run has"
    expect_error(command("evaluate", "--run", "run0", "--run", "seen"), told)
