"""A run goes on under another plan, with its model cut otherwise, as the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Plan

from skippipe_jax import Run
from skippipe_jax.config import Config, load_config
from skippipe_jax.data.batches import Batch, TrainingBatches
from skippipe_jax.storage.checkpoint import open_checkpoint
from skippipe_jax.storage.loading import load_data_state
from skippipe_jax.storage.recording import recorded_steps
from skippipe_jax.storage.run_dir import PLAN, RunDir
from skippipe_jax.training.planning import plan_of
from tests.harness import oracle
from tests.harness.partial_models import evaluate_run
from tests.harness.training_runs import (
    Arrays,
    arrays_of_checkpoint,
    by_name,
    settings,
    train_alone,
    write_config,
)

MOVE, STEPS = 10, 20
CASE = {
    "locations": ["Belgium", "Iowa", "Oregon"],
    "links": "gcp12",
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "memory": 3,
    "rules": {"max_swaps": 1, "max_swap_distance": 1, "max_jump": 2},
}
BEFORE = CASE | {
    "nodes": 9,
    "stages": [2, 2, 1, 2, 1, 1],
    "path_length": 4,
    "microbatches_per_data_node": 3,
}
AFTER = CASE | {
    "nodes": 7,
    "stages": [2, 2, 1, 2],
    "path_length": 3,
    "microbatches_per_data_node": 4,
}
# So many that the 10 times 6 microbatches before the move and the 10 times 8 after it are an epoch.
TEXT_BYTES = 5015


class Moved(NamedTuple):
    """A run of 10 steps on 6 stages, which goes on with 10 more on 4."""

    config: Path
    run: Path

    def truth(self) -> tuple[list[Arrays], list[float]]:
        """What the oracle makes of all of it: parameters of stages, and losses of steps."""
        config = load(self.config, self.run, MOVE)
        before = RunDir(self.run).plan()
        after = plan_of(load(self.config, self.run, 1, AFTER), Path())
        batches = TrainingBatches(config.data)
        phases = [
            oracle.Phase(
                config.model.stage_partition(len(before.stages)),
                stage_paths(before),
                iterations(batches, 0, before),
            ),
            oracle.Phase(
                (3, 3, 3, 3),
                stage_paths(after),
                iterations(batches, MOVE * len(before.microbatches), after),
            ),
        ]
        parameters, losses = oracle.train_by(
            config.model, config.optimizer, phases, config.seed, STEPS
        )
        return [by_name({"parameters": stage}) for stage in parameters], losses


def load(path: Path, run: Path, steps: int, case: Any = BEFORE, **changes: Any) -> Config:
    return load_config(path, arguments(run, steps, case, **changes)[1::2])


def arguments(run: Path, steps: int, case: Any, **changes: Any) -> list[str]:
    return settings(run_dir=run, train__steps=steps, plan__case=json.dumps(case), **changes)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    folder = tmp_path_factory.mktemp("move")
    path = write_config(
        folder,
        model={
            "width": 16,
            "layers": 12,
            "heads": 2,
            "kv_heads": 1,
            "ffn_width": 24,
            "context": 16,
        },
        data={
            "source": "text",
            "path": str(folder / "text"),
            "sequence_length": 16,
            "microbatch_size": 2,
        },
        optimizer={
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "decay_steps": 100,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            # So large that an update depends on how large a gradient is, not only on its direction.
            "epsilon": 1e-2,
        },
        plan={"method": "balanced"},
        checkpoint={"every": MOVE},
        trace=f"every {MOVE}",
    )
    (folder / "text").write_bytes((folder / "text").read_bytes()[:TEXT_BYTES])
    train_alone(load(path, folder / "run", MOVE))
    return Moved(path, folder / "run")


def stage_paths(plan: Plan) -> list[list[int]]:
    return [[plan.stage_of[node] for node in path] for path in plan.microbatches]


def iterations(batches: TrainingBatches, first: int, plan: Plan) -> list[list[Batch]]:
    """The batches of ten iterations, the first of which begins with microbatch `first`."""
    sent = len(plan.microbatches)
    return [[batches[first + i * sent + m] for m in range(sent)] for i in range(MOVE)]


@pytest.fixture
def run(moved: Moved, tmp_path: Path) -> Path:
    return shutil.copytree(moved.run, tmp_path / "run")


def assert_as_the_oracle(run: Path, moved: Moved) -> None:
    found = arrays_of_checkpoint(run, STEPS)
    parameters, losses = moved.truth()
    for stage, truth in enumerate(parameters):
        error = oracle.relative_error({name: found[stage][name] for name in truth}, truth)
        assert error < 2e-5, f"stage {stage}: {error}"
    lines = Run(run).metrics
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_a_moved_run_equals_the_oracle(moved: Moved, run: Path, capsys: pytest.CaptureFixture[str]):
    loss_before = evaluate_run(run, MOVE, 4).loss
    config = load(moved.config, run, STEPS, AFTER)
    train_alone(config, resume=True)
    assert_as_the_oracle(run, moved)
    out = capsys.readouterr().out
    move = f"plan changed after step {MOVE}: 6 stages on 9 nodes -> 4 stages on 7 nodes"
    assert f"{move}; predicted iteration " in out
    assert RunDir(run).config() == config
    assert len(RunDir(run).plan().stages) == 4
    # What was recorded under the plan before was drawn by it, and does not meet the other.
    assert recorded_steps(run) == [STEPS]
    for step in (MOVE, STEPS):
        assert (run / "timelines" / f"{step:08d}.svg").exists()
    # The checkpoint before the move is of the same model.
    assert open_checkpoint(run, MOVE).record.stage_layers == (2,) * 6
    assert open_checkpoint(run, STEPS).record.stage_layers == (3,) * 4
    assert evaluate_run(run, MOVE, 4).loss == loss_before


def test_what_a_moved_run_has_read_is_an_epoch(moved: Moved):
    config = load(moved.config, moved.run, STEPS)
    assert load_data_state(open_checkpoint(moved.run))["microbatches"] == MOVE * 6
    batches = TrainingBatches(config.data)
    total = MOVE * 6 + MOVE * 8
    rows = [row.tobytes() for number in range(total) for row in batches[number]["tokens"]]
    assert len(set(rows)) == len(rows)
    again = [
        row.tobytes() for number in range(total, 2 * total) for row in batches[number]["tokens"]
    ]
    assert sorted(again) == sorted(rows)


def test_the_same_cut_in_other_words_changes_nothing(
    moved: Moved, run: Path, capsys: pytest.CaptureFixture[str]
):
    plan = (run / PLAN).read_bytes()
    train_alone(load(moved.config, run, MOVE + 1, model__stage_layers=[2] * 6), resume=True)
    assert "resuming with model.stage_layers = [2, 2, 2, 2, 2, 2], previously None" in (
        capsys.readouterr().out
    )
    assert (run / PLAN).read_bytes() == plan
    assert open_checkpoint(run).step == MOVE + 1


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        (AFTER | {"stages": [2, 2, 1, 1, 1]}, {}, "model.layers"),
        (AFTER | {"nodes": 8}, {}, "case.stages"),
        (BEFORE, {"model__stage_layers": [3] * 4}, "model.stage_layers"),
        (AFTER, {"model__ffn_width": 32}, "model.ffn_width"),
        (AFTER, {"seed": 1}, "seed"),
    ],
)
def test_a_move_that_cannot_be_leaves_the_run_as_it_is(
    moved: Moved, case: Any, changes: dict[str, Any], field: str
):
    before = contents(moved.run)
    with pytest.raises(InputError) as caught:
        train_alone(load(moved.config, moved.run, STEPS, case, **changes), resume=True)
    assert caught.value.field == field
    assert contents(moved.run) == before


def contents(folder: Path) -> Sequence[tuple[Path, bytes]]:
    return [(path, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]
