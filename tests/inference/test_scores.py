"""Log-probabilities of tokens, their files, and losses by domain."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, parse_config
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, document_starts, held_out_batches
from skippipe_jax.data.tokenizer import ByteTokenizer
from skippipe_jax.inference.domain_losses import evaluate_domains
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.scores import Scores, require_same_text, score
from skippipe_jax.inference.staged_model import StagedModel, _scores
from tests.harness.messages import refusal
from tests.harness.partial_models import evaluate_run, logits_of, random_model, save_run

LENGTH = 24


def sections(folder: Path) -> dict[str, Any]:
    """A configuration whose text is of two domains."""
    for name, letters in (("prose", "abc "), ("code", "xyz()\n")):
        (folder / name).mkdir()
        random = np.random.default_rng(len(letters))
        for number in range(30):
            text = "".join(random.choice(list(letters), 20 + number))
            (folder / name / f"{number}").write_text(text)
    mixture = [
        {"source": "text", "path": str(folder / "prose"), "weight": 3},
        {"source": "text", "path": str(folder / "code"), "name": "CODE"},
    ]
    shapes = {"width": 16, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
    data = {"source": "mixture", "mixture": mixture, "sequence_length": LENGTH, "held_out": 0.4}
    return {"model": shapes, "data": data | {"microbatch_size": 3}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return parse_config(sections(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def model(config: Config) -> StagedModel:
    return random_model(config.model, 3)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_log_probabilities_are_those_of_the_logits_and_sum_to_the_loss(config, model, packing):
    data = replace(config.data, packing=packing)
    for order in (None, (0, 2)):
        for batch in held_out_batches(data, 4):
            found = model.log_probabilities(batch, order)
            counted = batch["targets"] != IGNORED_TARGET
            assert found.dtype == np.float32
            assert found.shape == counted.shape
            assert (found[counted] < 0).all()
            assert not found[~counted].any()
            assert not np.signbit(found[~counted]).any()
            mean = found.sum(dtype=np.float64) / counted.sum()
            assert -mean == pytest.approx(model.loss(batch, order), abs=1e-5)
            if packing == "windows":
                logits = logits_of(model, order or (0, 1, 2), batch["tokens"])
                logits -= logits.max(axis=-1, keepdims=True)
                logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
                targets = np.maximum(batch["targets"], 0)[..., None]
                expected = np.take_along_axis(logits, targets, axis=-1)[..., 0]
                np.testing.assert_allclose(found[counted], expected[counted], atol=2e-5)


def test_documents_of_one_sequence_do_not_see_each_other(config, model):
    data = replace(config.data, packing="documents", sequence_length=32)
    batch = next(held_out_batches(data, 8))
    assert "begins" in batch
    found = model.log_probabilities(batch)
    row, place = np.argwhere(batch["begins"][:, 1:])[0] + (0, 1)
    behind = slice(place, None)
    other = copy.deepcopy(batch)
    other["tokens"][row, :place] = 7
    np.testing.assert_allclose(
        model.log_probabilities(other)[row, behind], found[row, behind], atol=1e-6
    )
    without: Batch = {"tokens": batch["tokens"], "targets": batch["targets"]}
    assert abs(model.log_probabilities(without)[row, behind] - found[row, behind]).max() > 1e-3


def test_scores_do_not_depend_on_how_they_are_computed(config, model, tmp_path):
    every = [
        score(model, replace(config.data, microbatch_size=size), "CODE", "scores", 7)
        for size in (1, 3, 20)
    ]
    for own in every:
        assert own.text == every[0].text
        assert own.log_probabilities.shape == own.counted.shape == own.resets.shape == (7, LENGTH)
        np.testing.assert_allclose(own.log_probabilities, every[0].log_probabilities, atol=1e-5)
    require_same_text(dict(zip("abc", every, strict=True)))


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_scores_tell_which_targets_count_and_where_documents_start(config, model, packing):
    data = replace(config.data, packing=packing)
    found = score(model, data, "prose", "priors", 1000)
    batches = list(held_out_batches(data, 1, part="priors", domain="prose"))
    joined = {key: np.concatenate([one[key] for one in batches]) for key in ("tokens", "targets")}
    assert (found.counted == (joined["targets"] != IGNORED_TARGET)).all()
    starts = [document_starts(one, ByteTokenizer.begin) for one in batches]
    assert (found.resets == np.concatenate(starts)).all()
    assert found.tokens == found.counted.sum()
    losses = [model.loss(one) for one in batches]
    tokens = [int((one["targets"] != IGNORED_TARGET).sum()) for one in batches]
    assert found.loss == pytest.approx(np.average(losses, weights=tokens), abs=1e-5)


@pytest.mark.parametrize("content", [b"", b"no scores", None])
def test_what_holds_no_scores_is_refused(tmp_path, content):
    path = tmp_path / "file"
    if content is None:
        with path.open("wb") as file:
            np.savez(file, counted=np.ones(3, bool))
    else:
        path.write_bytes(content)
    for one in (path, tmp_path / "missing"):
        with pytest.raises(InputError, match="cannot be read as scores"):
            Scores.load(one)


def test_scores_of_other_text_or_another_tokenizer_are_refused(config, model):
    mine = score(model, config.data, "prose", "scores", 4)
    require_same_text({"mine": mine})
    others = [
        score(model, config.data, "CODE", "scores", 4),
        score(model, config.data, "prose", "priors", 4),
        score(model, config.data, "prose", "scores", 3),
        score(model, replace(config.data, shuffle_seed=1), "prose", "scores", 4),
        score(model, replace(config.data, sequence_length=16), "prose", "scores", 4),
    ]
    for other in others:
        with pytest.raises(InputError, match="another text") as caught:
            require_same_text({"mine": mine, "other": other})
        assert caught.value.value == "other"
    with pytest.raises(InputError, match="tokenizer differs from that of mine"):
        require_same_text({"mine": mine, "other": replace(mine, tokenizer="another")})


def test_a_model_is_not_scored_on_what_it_does_not_take(config, model):
    with refusal("data.sequence_length = ...longer than the model's context of 32"):
        score(model, replace(config.data, sequence_length=33), "prose", "all", 4)
    other = replace(model, tokenizer_name="bytes")
    other.__dict__["tokenizer"] = type("Other", (ByteTokenizer,), {"digest": "other"})()
    with refusal("data.tokenizer = ...is not the model's tokenizer"):
        score(other, config.data, "prose", "all", 4)


def test_no_array_has_the_vocabulary_for_all_tokens(config, model, monkeypatch):
    """With chunks of a few tokens, nothing that large is in the compiled program."""
    monkeypatch.setattr("skippipe_jax.models.cross_entropy.tokens_of_chunk", lambda *_: 8)
    # A batch of a size that no other test has, so that the program is a new one.
    batch = next(held_out_batches(config.data, 6))
    x = model.run((0, 1, 2), batch)
    lowered = _scores.lower(model.structures[0], model.parameters[0], x, batch["targets"])
    text = lowered.compile().as_text()
    assert text is not None
    vocabulary = config.model.vocabulary_size
    assert f"[8,{vocabulary}]" in text
    for shape in (f"[144,{vocabulary}]", f"[6,24,{vocabulary}]", f"[18,8,{vocabulary}]"):
        assert shape not in text


def test_means_over_domains_and_over_tokens(config, model):
    data = replace(config.data, packing="documents")
    for part in ("all", "priors", "scores"):
        found = evaluate_domains(model, data, part, 1000)
        assert list(found.domains) == ["prose", "CODE"]
        losses = [own.loss for own in found.domains.values()]
        assert found.macro == pytest.approx(sum(losses) / 2, abs=1e-12)
        total = np.zeros(2)
        for batch in held_out_batches(data, 5, part=part):
            counted = int((batch["targets"] != IGNORED_TARGET).sum())
            total += model.loss(batch) * counted, counted
        assert found.micro == pytest.approx(total[0] / total[1], abs=1e-5)
        assert sum(own.tokens for own in found.domains.values()) == total[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(folder / "run", sections(folder), 3)
    return folder / "run"


def test_evaluate_reports_domains(run, command):
    of_run = evaluate_run(run, None, 9)
    for arguments, part in (([], "all"), (["--part", "scores"], "scores")):
        asked = ["evaluate", "--run", run, "--sequences", 9, *arguments]
        found = json.loads(command(*asked, "--json")[1])
        if part == "all":
            assert (found["loss"], found["tokens"]) == (of_run.loss, of_run.tokens)
        else:
            assert found["loss"] != of_run.loss
        assert found["part"] == part
        domains = found["domains"]
        assert list(domains) == ["prose", "CODE"]
        for own in domains.values():
            assert own["tokens"] == 9 * LENGTH
            assert own["perplexity"] == math.exp(own["loss"])
        assert found["macro"] == pytest.approx(found["micro"])
        lines = command(*asked)[1].splitlines()[1:]
        cells = [line.split() for line in lines]
        heading = "domain" if part == "all" else "domain (scores)"
        assert lines[0].startswith(f"{heading} ")
        for name, row in zip(domains, cells[1:3], strict=True):
            own = domains[name]
            assert row == [name, f"{own['loss']:.4f}", f"{own['perplexity']:.3f}", "216"]
        assert cells[3][:3] == ["macro", "mean", f"{found['macro']:.4f}"]
        assert cells[4][:3] == ["micro", "mean", f"{found['micro']:.4f}"]
        assert cells[4][-1] == "432"


def test_a_part_of_one_source_is_evaluated_without_domains(run, command):
    changes = {"source": "text", "path": run.parent / "prose", "mixture": "null"}
    words = [word for key in changes for word in ("--set", f"data.{key}={changes[key]}")]
    single = ["evaluate", "--run", run, *words, "--json", "--part"]
    parts = [json.loads(command(*single, part)[1]) for part in ("priors", "scores")]
    assert parts[0]["loss"] != parts[1]["loss"]
    assert not {"domains", "part"} & {*parts[0]}


@pytest.mark.parametrize("key", ["held_out=0.3", "shuffle_seed=5"])
def test_a_domain_that_the_run_has_read_is_divided_as_the_run_did(run, key):
    prose, code = (str(run.parent / name) for name in ("prose", "code"))
    alone = ["data.source=text", "data.mixture=null", f"data.{key}"]
    for path in (prose, code):
        with refusal(f"data.{key.split('=')[0]} = ...that the run has trained on"):
            open_source(run, overrides=[*alone, f"data.path={path}"])
    open_source(run, overrides=[*alone, f"data.path={run.parent / 'elsewhere'}"])
