"""Gated runs compute what the oracle does; the studies of recipes, before any of them trains."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched import fields

from experiments.paper import recipe_continued, recipe_paths, recipe_quick, study_text
from experiments.paper.gates import (
    LENGTH,
    TOKENS,
    GatedRun,
    Phase,
    Training,
    batches,
    blocks_of,
    drawn_stages,
    optimizer_config,
)
from experiments.paper.jobs import plan_of
from skippipe_jax.config import load_config, parse_config
from skippipe_jax.data.batches import Batch
from tests.harness import oracle

RUN = GatedRun(
    blocks=4,
    stages=4,
    steps=4,
    phases=(Phase(0.0, 3), Phase(0.5, 3, 0.5)),
    scaled_start=False,
    learning_rate=3e-2,
)
TEXT = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)


def trained(run: GatedRun, steps: int) -> tuple[Training, list[float]]:
    training = Training(run)
    losses = [training.train_step(batches(run, TEXT, step)) for step in range(steps)]
    return training, losses


def test_gates_equal_the_oracle_along_the_same_stages():
    """In an iteration of each phase."""
    run = replace(RUN, steps=2)
    training, losses = trained(run, run.steps)
    phases = []
    for step in range(run.steps):
        rows = batches(run, TEXT, step)
        rng = np.random.default_rng([run.seed, 2, step])
        partial = drawn_stages(rng, run.skipping(step), 3, run.stages).tolist()
        paths = partial + [list(range(run.stages))] * (len(rows) - len(partial))
        iteration = [Batch(tokens=own[:, :-1], targets=own[:, 1:]) for own in rows]
        phases.append(oracle.Phase((1,) * run.stages, paths, [iteration]))
    rule = optimizer_config(run)
    expected, of_oracle = oracle.train_by(run.model, rule, phases, run.seed, run.steps)
    np.testing.assert_allclose(losses, of_oracle, rtol=0, atol=1e-5)
    for stage, own in enumerate(expected):
        chosen = jax.tree.map(
            lambda leaf, stage=stage: leaf[stage : stage + 1], training.parameters["blocks"]
        )
        assert oracle.relative_error(chosen, own["blocks"]) < 2e-5
    assert oracle.relative_error(training.parameters["embedding"], expected[0]["embedding"]) < 2e-5


@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 40),
    stages=st.integers(3, 8),
    data=st.data(),
)
def test_every_inner_stage_is_visited_equally_often(
    seed: int, count: int, stages: int, data: st.DataObject
):
    visited = data.draw(st.integers(2, stages))
    drawn = drawn_stages(np.random.default_rng(seed), count, visited, stages)
    assert drawn.shape == (count, visited)
    assert np.all(drawn[:, 0] == 0)
    assert np.all(np.diff(drawn) > 0)
    visits = np.bincount(drawn[:, 1:].ravel(), minlength=stages)[1:]
    assert np.ptp(visits) <= 1


@pytest.mark.nightly
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path):
    run = replace(RUN, phases=(), grown_from=3, grown_at=0.5)
    whole, losses = Training(run), []
    for step in range(4):
        whole.save(tmp_path / f"{step}.npz")
        losses.append(whole.train_step(batches(run, TEXT, step)))
    for stopped in (1, 2, 3):
        later = Training(run)
        later.restore(tmp_path / f"{stopped}.npz")
        assert later.step == stopped
        again = [later.train_step(batches(run, TEXT, step)) for step in range(stopped, 4)]
        assert again == losses[stopped:]
        jax.tree.map(np.testing.assert_array_equal, later.parameters, whole.parameters)
    assert jax.tree.leaves(whole.parameters["blocks"])[0].shape[0] == 4


@pytest.mark.parametrize(
    ("phases", "expected"),
    [((), 20.0), ((Phase(0.0, 4),), 20 * 2 / 3), ((Phase(0.0, 4), Phase(0.5, 6, 0.0)), 20 * 5 / 6)],
)
def test_compute_counts_the_blocks_that_run(phases: tuple[Phase, ...], expected: float):
    assert GatedRun(steps=20, phases=phases).compute() == pytest.approx(expected)
    grown = GatedRun(steps=20, grown_from=8, grown_at=0.5)
    assert grown.compute() == pytest.approx(20 * 5 / 6)


def test_a_module_and_its_tests_belong_to_one_part():
    standard = study_text.STANDARD
    for module, files in {
        "json": ["json/decoder.py", "test/test_json/test_decode.py"],
        "bisect": ["bisect.py", "test/test_bisect.py", "_bisect.py"],
    }.items():
        assert {study_text.module_of(standard / file) for file in files} == {module}
    parts = {study_text.part_of(module) for module, _ in study_text.standard_library()}
    assert parts == {*study_text.PARTS}


def test_blocks_of_stages():
    assert blocks_of([0, 2], 3).tolist() == [0, 1, 2, 6, 7, 8]


def test_the_quick_study_lists_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["recipe_quick", "--list", "--folder", str(tmp_path)])
    assert recipe_quick.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(recipe_quick.ARMS)
    assert all(line.endswith("not trained") for line in listed)
    assert not list(tmp_path.iterdir())


def test_runs_of_the_quick_study_differ_in_their_paths_alone(tmp_path: Path):
    committed = load_config(recipe_quick.CONFIG)
    jobs = recipe_quick.Study(tmp_path).tasks()
    full, partial, recipe = [
        parse_config({**job.config, "run_dir": committed.run_dir}) for job in jobs
    ]
    assert recipe == committed
    assert committed.recipe.preset == "quality"
    assert partial.recipe == full.recipe != recipe.recipe
    assert full.plan != partial.plan == recipe.plan
    assert len({job.digest for job in jobs}) == 3
    same = fields.load_yaml(recipe_quick.CONFIG, "config").keys() - {"plan", "recipe", "run_dir"}
    assert all(job.config[key] == jobs[0].config[key] for key in same for job in jobs)


@pytest.mark.nightly
def test_runs_that_go_on_begin_with_the_trained_weights_and_take_the_time_of_full(tmp_path: Path):
    study = recipe_continued.Study(tmp_path)
    tasks = {task.name: (arm, task) for _, arm, _, task in study.runs()}
    assert len(tasks) == 2 * 5 * 5
    assert len({task.digest for _, task in tasks.values()}) == len(tasks)
    for arm, task in tasks.values():
        assert task.start is not None
        assert task.needs == (task.start.name,)
        assert task.start.text == study_text.GENERAL
        assert task.start.run.seed == task.run.seed
        assert not task.start.run.phases
        assert (arm == "full") == (task.run.steps == recipe_continued.GOES_ON.steps)
    one, _ = trained(RUN, 1)
    one.save(tmp_path / "state.npz")
    other = Training(replace(RUN, seed=1))
    other.start_from(tmp_path / "state.npz")
    jax.tree.map(np.testing.assert_array_equal, other.parameters, one.parameters)
    assert other.step == 0
    moments = jax.tree.leaves(other.state)
    assert not any(np.any(leaf) for leaf in moments)


def test_domains_are_left_out_of_the_general_text():
    texts = {
        text: {document for _, document in study_text.documents_of(text) if document}
        for text in (study_text.ALL, study_text.GENERAL, *study_text.DOMAINS)
    }
    everything, general, windows, documentation = texts.values()
    assert general < everything
    assert windows < everything
    # Some files of Python 3.12 are alike in several packages: a few lines that start a program.
    assert all(len(own) < 1000 for own in general & (windows | documentation))
    for domain in study_text.DOMAINS:
        parts = {study_text.part_of(name) for name, _ in study_text.documents_of(domain)}
        assert parts == {*study_text.PARTS}


def test_the_trainer_is_told_what_gates_do(tmp_path: Path):
    for arm in recipe_paths.ARMS:
        run = recipe_paths.gated_run(arm)
        tree = recipe_paths.config_of(arm, tmp_path)
        config = parse_config({**tree, "run_dir": str(tmp_path)})
        plan = plan_of(tree)
        assert config.model == run.model
        assert config.optimizer == optimizer_config(run)
        assert len(plan.microbatches) * config.data.microbatch_size * LENGTH == TOKENS
        assert len(plan.stages) == run.stages
        phases = config.recipe.in_steps(run.steps).phases or ()
        for step in (0, run.steps - 1):
            is_full = any(phase.skipping == 0 and phase.from_step <= step for phase in phases)
            visited = run.stages if is_full else len(plan.microbatches[0])
            assert visited == (run.phase(step).visited if run.skipping(step) else run.stages)
