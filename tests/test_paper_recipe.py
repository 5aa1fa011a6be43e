"""The studies of recipes: what their runs are, before any of them trains."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from skippipe_sched import fields

from experiments.paper import recipe_continued, recipe_paths, recipe_quick, study_text
from experiments.paper.gates import LENGTH, TOKENS, Training, optimizer_config
from experiments.paper.jobs import plan_of
from skippipe_jax.config import load_config, parse_config
from tests.test_paper_gates import RUN, trained


def test_the_quick_study_lists_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["recipe_quick", "--list", "--folder", str(tmp_path)])
    assert recipe_quick.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(recipe_quick.ARMS)
    for line, arm in zip(listed, recipe_quick.ARMS, strict=True):
        assert line.startswith(arm)
        assert line.endswith("not trained")
    assert not list(tmp_path.iterdir())


def test_runs_of_the_quick_study_differ_in_their_paths_alone(tmp_path: Path):
    committed = load_config(recipe_quick.CONFIG)
    jobs = [recipe_quick.job_of(arm, tmp_path) for arm in recipe_quick.ARMS]
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
    study = recipe_continued.Study(tmp_path, quick=False)
    tasks = {task.name: (arm, task) for _, arm, _, task in study.tasks()}
    assert len(tasks) == 2 * 5 * 5
    assert len({task.digest for _, task in tasks.values()}) == len(tasks)
    for arm, task in tasks.values():
        assert task.start is not None
        assert task.needs == (task.start.name,)
        assert task.start.text == study_text.GENERAL
        assert task.start.run.seed == task.run.seed
        assert not task.start.run.phases
        assert (arm == "full") == (task.run.steps == study.goes_on.steps)
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
