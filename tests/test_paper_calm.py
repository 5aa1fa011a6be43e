"""The paper's runs as jobs, and the study of how far chance moves them."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.paper import calm, jobs
from experiments.paper.campaign import Campaign, Run
from skippipe_jax.config import parse_config
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.training.initial_weights import open_initial_weights
from tests.harness.paper_results import made_up


def test_a_job_is_done_once_its_training_is_summed_up(tmp_path: Path):
    config = Campaign(tmp_path, quick=True).config(Run("full", 0))
    job = jobs.Job(
        name="one", digest="1", config=config, results=tmp_path, folder=tmp_path, command="",
        flags="--xla_cpu_max_isa=AVX2",
    )  # fmt: skip
    flags = job.environment()["XLA_FLAGS"]
    assert flags == f"{jobs.ONE_THREAD['XLA_FLAGS']} {job.flags}"
    assert not job.is_done()
    training, summing_up = (command() for command in job.commands())
    assert (training[0], summing_up[0]) == ("skippipe_jax.train", "experiments.paper.summary")
    given = dict(itertools.pairwise(summing_up))
    found = replace(made_up(1.5), digest=given["--digest"])
    Path(given["--output"]).write_text(json.dumps(asdict(found)))
    assert job.is_done()
    assert job.found().startswith("held-out loss 1.5000")
    assert not replace(job, digest="2").is_done()


def test_first_weights_are_drawn_as_a_run_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the same program, whose key is the seed's and whose first layer is the stage's."""

    class Functions:
        @staticmethod
        def initialize(key: jax.Array, first_layer: int) -> tuple[Any, int]:
            return jax.random.key_data(key).tolist(), first_layer

    monkeypatch.setattr(calm, "functions_of_run", lambda _, stages: [Functions] * stages)
    config = parse_config(Campaign(tmp_path, quick=True).config(Run("full", 7)))
    weights = calm.drawn_weights(config, 6)
    key = jax.random.key_data(jax.random.key(7)).tolist()
    assert [weights(stage) for stage in range(6)] == [(key, 2 * stage) for stage in range(6)]


def test_first_weights_change_by_as_much_as_they_are_told(tmp_path: Path):
    tree = Campaign(tmp_path, quick=True).config(Run("full", 7))
    config, random = parse_config(tree), np.random.default_rng(0)
    shapes = stage_shapes(config.model, 6)
    given = jax.tree.map(lambda own: random.normal(size=own.shape).astype(own.dtype), shapes)
    for name, changed_by, draw in (("as_they_are", 0.0, 1), ("one", 1e-6, 1), ("two", 1e-6, 2)):
        calm.write_weights(config.model, 6, given.__getitem__, changed_by, draw, tmp_path / name)

    def read(name: str) -> list[np.ndarray]:
        # As a run does that begins from them.
        begun = parse_config(tree | {"init_from": f"hf:{tmp_path / name}"})
        assert begun.model == config.model
        weights = open_initial_weights(begun)
        assert weights is not None
        return jax.tree.leaves(
            [weights.load_stage(own, 2 * stage) for stage, own in enumerate(shapes)]
        )

    for own, other in zip(read("as_they_are"), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(own, other)
    one, two, unchanged = (
        np.concatenate([leaf.ravel() for leaf in leaves]).astype(np.float64)
        for leaves in (read("one"), read("two"), jax.tree.leaves(given))
    )
    for changed in (one, two):
        assert np.std(changed / unchanged - 1) == pytest.approx(1e-6, rel=0.05)
    assert np.std(one / two - 1) == pytest.approx(math.sqrt(2) * 1e-6, rel=0.05)


def test_the_study_repeats_the_campaigns_runs(tmp_path: Path):
    study = calm.Study(tmp_path, instructions=["AVX2", "SSE4_2"])
    runs = study.tasks()
    assert len(runs) == 5 + 5 + 3 + 2
    assert len({job.name for job in runs}) == len({job.digest for job in runs}) == len(runs)
    control, skipping, former = (study.repetitions(own) for own in calm.REPEATED)
    for arm, repetitions in (("full", control), ("skip33", skipping)):
        run = Run(arm, 0)
        assert repetitions[0].digest == study.campaign.digest(run)
        assert repetitions[0].config == study.campaign.config(run)
        for job in repetitions[1:]:
            differing = dict(job.config)
            assert differing.pop("init_from").startswith("hf:")
            assert differing == study.campaign.config(run)
    for job in former:
        model = dict(control[0].config["model"])
        assert job.config["model"] == model | {"initial_deviation": 0.02}
        assert job.config["train"] == control[0].config["train"]
    flags = [job.flags for job in study.on_instructions().values()]
    assert flags == ["--xla_cpu_max_isa=AVX2", "--xla_cpu_max_isa=SSE4_2"]


def test_first_weights_that_are_there_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    study = calm.Study(tmp_path, instructions=[])
    drawn: list[int] = []

    def write(*given: Any) -> None:
        *_, draw, target = given
        target.mkdir()
        drawn.append(draw)

    monkeypatch.setattr(calm, "write_weights", write)
    monkeypatch.setattr(jobs, "train", lambda *_: None)
    for _ in range(2):
        study.train()
    assert drawn == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_the_spread_of_repetitions():
    campaign = made_up(1.5)
    figures = calm.figures_of(
        {
            "full": [campaign, made_up(1.502), made_up(1.504)],
            "skip33": [made_up(1.6)],
        },
        {"SSE4_2": made_up(1.51), "AVX2": made_up(1.5)},
        {"full": campaign, "skip33": made_up(1.7)},
    )
    own = figures["repetitions"]["full"]
    assert (own["greatest_minus_least"], own["deviation"]) == pytest.approx((0.004, 0.002))
    assert figures["repetitions"]["skip33"]["deviation"] is None
    assert figures["instructions"]["greatest_minus_least"] == pytest.approx(0.01)
    assert figures["equals_the_campaign"] == {"full": True, "skip33": False}
    text = calm.table(figures)
    assert "1.5000 1.5020 1.5040: 0.0040 from least to greatest, deviation 0.0020" in text
    assert "full with instructions SSE4_2, AVX2" in text
    assert "full unchanged is the campaign's run" in text
    assert "skip33 unchanged is not the campaign's run" in text


def test_instructions_are_those_that_the_processor_has(tmp_path: Path):
    told = tmp_path / "cpuinfo"
    told.write_text("processor : 0\nflags\t\t: fpu sse4_2 avx avx2 avx512\n\nprocessor : 1\n")
    assert calm.available(told) == ["SSE4_2", "AVX2"]
    assert calm.available(tmp_path / "none") == []


def test_the_committed_study_says_that_the_recipe_is_calm(tmp_path: Path):
    study = calm.Study(tmp_path)
    committed = json.loads(study.result.read_text())
    assert committed["digest"] == study.digest()
    repeated = committed["repetitions"]
    assert {name: len(own["loss"]) for name, own in repeated.items()} == {
        own.name: own.times for own in calm.REPEATED
    }
    for own in (repeated["full"], repeated["skip33"], committed["instructions"]):
        losses = [*own["loss"].values()] if isinstance(own["loss"], dict) else own["loss"]
        assert max(losses) - min(losses) == pytest.approx(own["greatest_minus_least"], abs=1e-5)
        assert own["greatest_minus_least"] < 0.01
    assert committed["equals_the_campaign"] == {"full": True, "skip33": True}
