"""Gated runs compute what the oracle does, draw stages evenly, and go on where they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.paper import study_text
from experiments.paper.gates import (
    GatedRun,
    Phase,
    Training,
    batches,
    blocks_of,
    drawn_stages,
    optimizer_config,
)
from skippipe_jax.data.batches import Batch
from tests import oracle

RUN = GatedRun(
    blocks=6,
    steps=4,
    phases=(Phase(0.0, 4), Phase(0.5, 4, 0.5)),
    scaled_start=False,
    learning_rate=3e-2,
)
TEXT = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)


def trained(run: GatedRun, steps: int) -> tuple[Training, list[float]]:
    training = Training(run)
    losses = [training.train_step(batches(run, TEXT, step)) for step in range(steps)]
    return training, losses


def test_gates_equal_the_oracle_along_the_same_stages():
    training, losses = trained(RUN, 4)
    phases = []
    for step in range(4):
        rows = batches(RUN, TEXT, step)
        rng = np.random.default_rng([RUN.seed, 2, step])
        partial = drawn_stages(rng, RUN.skipping(step), 4, RUN.stages).tolist()
        paths = partial + [list(range(RUN.stages))] * (len(rows) - len(partial))
        iteration = [Batch(tokens=own[:, :-1], targets=own[:, 1:]) for own in rows]
        phases.append(oracle.Phase((1,) * 6, paths, [iteration]))
    expected, of_oracle = oracle.train_by(RUN.model, optimizer_config(RUN), phases, RUN.seed, 4)
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
    run = replace(RUN, phases=(), grown_from=4, grown_at=0.5)
    whole, losses = trained(run, 4)
    for stopped in (1, 2, 3):
        first, _ = trained(run, stopped)
        first.save(tmp_path / "state.npz")
        later = Training(run)
        later.restore(tmp_path / "state.npz")
        assert later.step == stopped
        again = [later.train_step(batches(run, TEXT, step)) for step in range(stopped, 4)]
        assert again == losses[stopped:]
        jax.tree.map(np.testing.assert_array_equal, later.parameters, whole.parameters)
    assert jax.tree.leaves(whole.parameters["blocks"])[0].shape[0] == 6


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
