"""A run goes on under another plan, with its model cut otherwise, as the same run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skippipe_sched.problem.plan import Plan

from skippipe_jax import Run
from skippipe_jax.config import Config, load_config
from skippipe_jax.data.batches import Batch, TrainingBatches
from skippipe_jax.storage.checkpoint import open_checkpoint
from skippipe_jax.storage.recording import recorded_steps
from skippipe_jax.storage.run_dir import PLAN, RunDir
from tests.harness import oracle
from tests.harness.messages import refusal
from tests.harness.partial_models import evaluate_run
from tests.harness.training_runs import (
    MODEL,
    OPTIMIZER,
    SMALL_CASE,
    arrays_of_checkpoint,
    by_name,
    settings,
    train_alone,
    write_config,
)

MOVE, STEPS = 5, 10
CASE = SMALL_CASE | {
    "locations": ["Belgium", "Iowa", "Oregon"],
    "memory": 3,
    "rules": {"max_swaps": 1, "max_swap_distance": 1, "max_jump": 2},
}
BEFORE = CASE | {"nodes": 4, "stages": [2, 1, 1], "microbatches_per_data_node": 3}
AFTER = CASE | {"stages": [2, 1], "microbatches_per_data_node": 4}
# So many that the 5 times 6 microbatches before the move and the 5 times 8 after it are an epoch.
TEXT_BYTES = 4870


def load(path: Path, run: Path, steps: int, case: Any, **changes: Any) -> Config:
    words = settings(run_dir=run, train__steps=steps, plan__case=json.dumps(case), **changes)
    return load_config(path, words[1::2])


def stage_paths(plan: Plan) -> list[list[int]]:
    return [[plan.stage_of[node] for node in path] for path in plan.microbatches]


def iterations(batches: TrainingBatches, first: int, plan: Plan) -> list[list[Batch]]:
    """The batches of the iterations of a phase, which begins with microbatch `first`."""
    sent = len(plan.microbatches)
    return [[batches[first + i * sent + m] for m in range(sent)] for i in range(MOVE)]


@pytest.mark.nightly
def test_a_moved_run_equals_the_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A run of 5 steps on 3 stages, of which paths skip one, goes on with 5 more on 2."""
    path = write_config(
        tmp_path,
        model=MODEL | {"layers": 6},
        # So large that an update depends on how large a gradient is, not only on its direction.
        optimizer=OPTIMIZER | {"clip_norm": 0.5, "epsilon": 1e-2},
        plan={"method": "balanced"},
        checkpoint={"every": MOVE},
        trace=f"every {MOVE}",
    )
    (tmp_path / "text").write_bytes((tmp_path / "text").read_bytes()[:TEXT_BYTES])
    run = tmp_path / "run"
    train_alone(load(path, run, MOVE, BEFORE))
    before, loss_before = RunDir(run).plan(), evaluate_run(run, MOVE, 4).loss
    config = load(path, run, STEPS, AFTER)
    train_alone(config, resume=True)
    after = RunDir(run).plan()
    assert_as_the_oracle(run, config, before, after)
    out = capsys.readouterr().out
    move = f"plan changed after step {MOVE}: 3 stages on 4 nodes -> 2 stages on 3 nodes"
    assert f"{move}; predicted iteration " in out
    assert RunDir(run).config() == config
    assert len(after.stages) == 2
    # What was recorded under the plan before was drawn by it, and does not meet the other.
    assert recorded_steps(run) == [STEPS]
    for step in (MOVE, STEPS):
        assert (run / "timelines" / f"{step:08d}.svg").exists()
    # The checkpoint before the move is of the same model.
    assert open_checkpoint(run, MOVE).record.stage_layers == (2,) * 3
    assert open_checkpoint(run, STEPS).record.stage_layers == (3,) * 2
    assert evaluate_run(run, MOVE, 4).loss == loss_before


def assert_as_the_oracle(run: Path, config: Config, before: Plan, after: Plan) -> None:
    batches = TrainingBatches(config.data)
    moved = MOVE * len(before.microbatches)
    phases = [
        oracle.Phase((2,) * 3, stage_paths(before), iterations(batches, 0, before)),
        oracle.Phase((3,) * 2, stage_paths(after), iterations(batches, moved, after)),
    ]
    parameters, losses = oracle.train_by(config.model, config.optimizer, phases, config.seed, STEPS)
    found = arrays_of_checkpoint(run, STEPS)
    for stage, of_stage in enumerate(parameters):
        truth = by_name({"parameters": of_stage})
        error = oracle.relative_error({name: found[stage][name] for name in truth}, truth)
        assert error < 2e-5, f"stage {stage}: {error}"
    lines = Run(run).metrics
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a configuration, and of a run of two stages that it has trained."""
    folder = tmp_path_factory.mktemp("move")
    path = write_config(folder, plan={"method": "balanced"})
    train_alone(load(path, folder / "run", 1, SMALL_CASE))
    return folder


def test_the_same_cut_in_other_words_changes_nothing(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = shutil.copytree(small / "run", tmp_path / "run")
    plan = (run / PLAN).read_bytes()
    cut = {"model__stage_layers": [2, 2]}
    train_alone(load(small / "config.yaml", run, 2, SMALL_CASE, **cut), resume=True)
    told = "resuming with model.stage_layers = [2, 2], previously None"
    assert told in capsys.readouterr().out
    assert (run / PLAN).read_bytes() == plan
    assert open_checkpoint(run).step == 2


MORE = SMALL_CASE | {"microbatches_per_data_node": 3}  # Of which the plan would be another.


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        (SMALL_CASE | {"stages": [1, 1, 1]}, {}, "model.layers"),
        (SMALL_CASE | {"nodes": 4}, {}, "case.stages"),
        (SMALL_CASE, {"model__stage_layers": [1, 1, 2]}, "model.stage_layers"),
        (MORE, {"model__ffn_width": 32}, "model.ffn_width"),
        (MORE, {"seed": 1}, "seed"),
    ],
)
def test_a_move_that_cannot_be_leaves_the_run_as_it_is(
    small: Path, case: Any, changes: dict[str, Any], field: str
):
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}

    before = contents()
    with refusal(f"{field} = "):
        train_alone(load(small / "config.yaml", small / "run", 2, case, **changes), resume=True)
    assert contents() == before
