"""Local updates equal their definition, and a run of them is saved, stopped and resumed whole."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.averaging import quickest_averaging_s

from skippipe_jax.config import (
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    load_config,
    parse_config,
)
from skippipe_jax.config.recipe import AVERAGED
from skippipe_jax.data.batches import Batch, TrainingBatches
from skippipe_jax.program.schedule import best_plan, timeline_of
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, SQUARED_NORM, TOKENS, skips_update
from skippipe_jax.runtime.totals import Outcome
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import saved_steps
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.trainer import Trainer
from tests import oracle
from tests.multihost.processes import started_processes
from tests.multihost.test_training_hosts import WORKER
from tests.program.test_compiler import plan_of
from tests.program.test_schedule import train_here
from tests.runtime.test_oracle import (
    BATCH,
    CLIPPING,
    ITERATIONS,
    NOT_CLIPPING,
    OPTIMIZER,
    TIME,
    TOLERANCE,
    WAYS,
    Way,
    models,
    plans,
    random_batches,
    run,
)
from tests.training_runs import (
    Arrays,
    arrays_of_checkpoint,
    assert_same_bits,
    by_name,
    steps_done,
    virtual_devices,
    write_config,
)

PATIENCE_S = 120.0

# Stages of two, one and three nodes; a path swaps, one skips, and none visits node 5.
PLAN = plan_of([[0, 1], [2], [3, 4, 5]], [[0, 2, 4], [1, 3, 2], [0, 3]])
MODEL = ModelConfig(
    vocabulary_size=11, width=8, layers=3, heads=2, kv_heads=1, ffn_width=12, context=TIME
)
FREE = dataclasses.replace(OPTIMIZER, clip_norm=NOT_CLIPPING)


def assert_equals_the_oracle(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batches: list[list[Batch]],
    devices: int,
    way: Way,
    every: int,
) -> tuple[Runtime, list[Outcome]]:
    runtime, outcomes = run(
        plan, model, optimizer, batches, devices, way, average_parameters_every=every
    )
    given = plan.stages, plan.microbatches, batches
    expected, losses = oracle.train_apart(model, optimizer, *given, 0, ITERATIONS, every)
    # Each node is a replica, whatever the devices.
    assert sorted(runtime.states) == list(range(len(plan.case.nodes)))
    for node, state in runtime.states.items():
        error = oracle.relative_error(state.parameters, expected[node])
        assert error < TOLERANCE, f"node {node}: {error}"
    found = [float(outcome.totals[LOSS] / outcome.totals[TOKENS]) for outcome in outcomes]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
    return runtime, outcomes


def replicas(runtime: Runtime, stage: int) -> list[Arrays]:
    return [by_name(runtime.states[node].to_save()) for node in runtime.topology.plan.stages[stage]]


@pytest.mark.timeout(900)  # Most of it is compiling: every example is another model.
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_local_updates_equal_the_oracle(data: st.DataObject):
    plan = data.draw(plans())
    model = data.draw(models(len(plan.stages)))
    batches = random_batches(plan, seed=data.draw(st.integers(0, 99)))
    clip_norm = data.draw(st.sampled_from([CLIPPING, NOT_CLIPPING]))
    assert_equals_the_oracle(
        plan,
        model,
        dataclasses.replace(OPTIMIZER, clip_norm=clip_norm),
        batches,
        data.draw(st.sampled_from([1, 3])),
        data.draw(st.sampled_from(WAYS)),
        data.draw(st.integers(1, ITERATIONS)),
    )


@pytest.mark.parametrize(("devices", "way"), [(1, 1), (2, 0), (3, 2)])
def test_replicas_differ_until_they_average(devices: int, way: int):
    batches = random_batches(PLAN, seed=3)
    for every, agree in ((ITERATIONS, True), (2, False)):
        runtime, _ = assert_equals_the_oracle(PLAN, MODEL, FREE, batches, devices, WAYS[way], every)
        for stage in (0, 2):
            first, *others = replicas(runtime, stage)
            for other in others:
                if agree:
                    assert_same_bits(other, first)
                else:
                    assert any(np.any(other[name] != first[name]) for name in first)


def test_a_skipped_update_is_skipped_by_all_and_replicas_average_after_it():
    first, second, third = random_batches(PLAN, seed=1)
    _, [outcome] = run(PLAN, MODEL, FREE, [second], 1, WAYS[1], average_parameters_every=2)
    norm = float(np.sqrt(outcome.totals[SQUARED_NORM]) * BATCH * TIME / outcome.totals[TOKENS])
    guarded = dataclasses.replace(OPTIMIZER, clip_norm=CLIPPING, skip_above_norm=0.999 * norm)
    batches = [first, second, third]
    _, outcomes = assert_equals_the_oracle(PLAN, MODEL, guarded, batches, 1, WAYS[2], 2)
    skipped = {bool(skips_update(guarded, each.totals, BATCH * TIME)) for each in outcomes}
    assert skipped == {True, False}


def test_the_mean_of_local_gradients_is_the_gradient():
    """After one iteration the first moments are as if gradients were averaged, the second more."""
    batches = random_batches(PLAN, seed=2)[:1]
    moments = []
    for every in (None, 1):
        runtime, _ = run(PLAN, MODEL, FREE, batches, 1, WAYS[1], average_parameters_every=every)
        moments.append([by_name(state) for state in runtime.owned_stages().values()])
    for averaged, local in zip(*moments, strict=True):
        for name, array in averaged.items():
            if "/mu/" in name:
                np.testing.assert_allclose(local[name], array, rtol=1e-4, atol=1e-8)
            if "/nu/" in name:
                assert np.all(local[name] >= 0.999 * array - 1e-12)
    # Of the stage with a single replica nothing is averaged.
    assert oracle.relative_error(moments[1][1], moments[0][1]) < 1e-5
    assert oracle.relative_error(moments[1][2], moments[0][2]) > 1e-2


# Runs.

STEPS, EVERY, LONG = 6, 3, 12
STAGES = ((0, 1), (2,), (3, 4, 5))
MICROBATCHES = ((0, 2, 4), (1, 3, 2), (0, 3), (1, 2, 5))


def config_in(folder: Path, **sections: Any) -> Path:
    plan = plan_of(
        [list(nodes) for nodes in STAGES],
        [list(path) for path in MICROBATCHES],
        locations=["Belgium", "Iowa"],
        links="gcp12",
        forward_s=0.01,
        path_length=3,
        rules={"max_swaps": 1, "max_swap_distance": 1, "max_jump": 1},
    )
    plan.save(folder / "plan.json")
    given: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "plan": {"file": str(folder / "plan.json")},
        "model": {
            "width": 16,
            "layers": 6,
            "heads": 2,
            "kv_heads": 2,
            "ffn_width": 24,
            "context": 32,
        },
        "recipe": {"average_parameters_every": EVERY},
        "train": {"steps": STEPS},
        "checkpoint": {"every": 2 * EVERY},
        "optimizer": {
            "learning_rate": 3e-2,
            "warmup_steps": 1,
            "decay_steps": 100,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "epsilon": 1e-2,
        },
    }
    return write_config(folder, **given | sections)


@pytest.mark.parametrize(
    ("host_of_node", "network", "execution", "runtime"),
    [
        ([0, 0, 1, 1, 1, 0], {"averaging": "ring"}, "ready-first", "independent"),
        # Here the sum over all hosts, and over two stages, is between the same two devices.
        ([0, 1, 0, 0, 0, 1], {"averaging": "collective"}, "strict", "distributed"),
    ],
    ids=["ring", "collective"],
)
def test_hosts_average_parameters_together(
    tmp_path: Path, host_of_node: list[int], network: dict[str, Any], execution: str, runtime: str
):
    path = config_in(
        tmp_path,
        cluster={"host_of_node": host_of_node, "runtime": runtime},
        network=network | {"deadline_s": 60},
        execution=execution,
        validation={"every": EVERY, "sequences": 4},
    )
    hosts = max(host_of_node) + 1
    with started_processes(tmp_path / "hosts") as processes:
        command = (WORKER, tmp_path / "replicas", "--config", path)
        processes.start_hosts(hosts, *command, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * hosts, processes.outputs()

    config = load_config(path)
    batches, sent = TrainingBatches(config.data), len(MICROBATCHES)
    iterations = [[batches[step * sent + m] for m in range(sent)] for step in range(STEPS)]
    expected, losses = oracle.train_apart(
        config.model,
        config.optimizer,
        STAGES,
        MICROBATCHES,
        iterations,
        config.seed,
        STEPS,
        EVERY,
    )
    for stage, nodes in enumerate(STAGES):
        files = [tmp_path / "replicas" / f"stage{stage}_node{node:03}.npz" for node in nodes]
        found = [dict(np.load(file)) for file in files]
        truth = by_name({"parameters": expected[nodes[0]]})
        error = oracle.relative_error({name: found[0][name] for name in truth}, truth)
        assert error < 2e-5, f"stage {stage}: {error}"
        for other in found[1:]:
            assert_same_bits(other, found[0])
    lines = run_folder.read_metrics(tmp_path / "run")
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=0, atol=1e-5)
    assert [line["validation_loss"] is not None for line in lines] == [False, False, True] * 2
    assert_metrics_tell_of_averaging(tmp_path / "run", lines)


def assert_metrics_tell_of_averaging(run_dir: Path, lines: list[dict[str, Any]]) -> None:
    """Bytes and predicted seconds of iterations with averaging and of those without."""
    plan = run_folder.saved_plan(run_dir)
    apart, averaging = lines[0], lines[EVERY - 1]
    for line in lines:
        kind = averaging if line["step"] % EVERY == 0 else apart
        for key in ("bytes_sent", "bytes_per_link", "predicted_seconds"):
            assert line[key] == kind[key]
    assert apart["predicted_seconds"] == plan.predicted.pipeline_s or plan.predicted.pipeline_s == 0
    more = averaging["predicted_seconds"] - apart["predicted_seconds"]
    heavier = dataclasses.replace(
        plan.case, stage_bytes=tuple(AVERAGED * size for size in plan.case.stage_bytes)
    )
    longest_s = max(quickest_averaging_s(heavier, s, nodes) for s, nodes in enumerate(plan.stages))
    assert more == pytest.approx(longest_s)
    # Nodes 0 and 1 pass on half of stage 0 twice, and nothing else goes from one to the other.
    assert "0-1" not in apart["bytes_per_link"]
    arrays = arrays_of_checkpoint(run_dir, STEPS)[0]
    numbers = sum(a.size for name, a in arrays.items() if name.startswith("parameters/"))
    assert averaging["bytes_per_link"]["0-1"] == AVERAGED * 4 * numbers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed, and of its configuration."""
    folder = tmp_path_factory.mktemp("whole")
    train_here(config_in(folder, train={"steps": LONG}))
    return folder


def assert_same_run(run_dir: Path, whole: Path) -> None:
    for found, expected in zip(
        arrays_of_checkpoint(run_dir, LONG),
        arrays_of_checkpoint(whole / "run", LONG),
        strict=True,
    ):
        assert_same_bits(found, expected)
    lines, others = map(run_folder.read_metrics, (run_dir, whole / "run"))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]


class Stops(Callback):
    """Tells the run to stop when its second iteration is under way."""

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 1:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_told_to_stop_averages_first(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
):
    config = load_config(config_in(tmp_path, train={"steps": LONG}))
    ending = Trainer(config, [Stops()]).run()
    # It is told to all with the iteration after that, and known when the next one has begun.
    assert (ending.step, ending.cut_short_by) == (6, signal.SIGTERM)
    assert "asked to stop: ends when replicas have averaged" in capsys.readouterr().out
    assert steps_done(tmp_path / "run") == 6
    assert saved_steps(tmp_path / "run") == [6]
    train_here(tmp_path / "config.yaml", resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_a_run_in_two_parts_is_one_run(tmp_path: Path, whole: Path):
    config = config_in(tmp_path)
    train_here(config, f"train.steps={3 * EVERY}")
    assert saved_steps(tmp_path / "run")[-1] == 3 * EVERY
    train_here(config, f"train.steps={LONG}", resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_a_run_goes_on_with_averaged_gradients(tmp_path: Path):
    """And under stages that are cut in another way, since what is saved is one model."""
    config = config_in(tmp_path)
    train_here(config)
    case = {
        "nodes": 2,
        "locations": ["here"],
        "links": [],
        "activation_bytes": 1e5,
        "stage_bytes": 1e5,
        "forward_s": 0.005,
        "stages": [1, 1],
        "path_length": 2,
        "microbatches_per_data_node": 4,
        "memory": 2,
    }
    other = ["plan.file=null", f"plan.case={case}", "plan.method=balanced"]
    train_here(config, *other, "recipe.average_parameters_every=null", "train.steps=8", resume=True)
    lines = run_folder.read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss"] < lines[0]["loss"]


# What is refused, and what is planned.


@pytest.mark.parametrize(
    ("sections", "field", "also"),
    [
        ({"train": {"steps": 101}}, "train.steps", "recipe.average_parameters_every = 10"),
        ({"checkpoint": {"every": 25}}, "checkpoint.every", "average_parameters_every = 10"),
        ({"validation": {"every": 5}}, "validation.every", "average_parameters_every = 10"),
        (
            {"network": {"averaging_dtype": "bfloat16"}},
            "network.averaging_dtype",
            "average_parameters_every = 10",
        ),
        (
            {"recovery": {"lost_stage": "buddy"}},
            "recovery.lost_stage",
            "every = 10 replicas differ",
        ),
        (
            {"recipe": {"average_parameters_every": 0}},
            "recipe.average_parameters_every",
            "at least 1",
        ),
    ],
)
def test_what_needs_equal_replicas_when_they_differ_is_refused(
    sections: dict[str, Any], field: str, also: str
):
    given = {"recipe": {"average_parameters_every": 10}, "train": {"steps": 100}}
    with pytest.raises(InputError) as caught:
        parse_config(given | sections)
    assert caught.value.field == field
    assert also in caught.value.problem


def test_the_planner_weighs_what_an_iteration_averages_in_the_mean():
    links = [["a", "b", 1, 0.02], ["b", "c", 1, 0.5], ["a", "c", 1, 0.1]]
    case = parse_case(
        {
            "nodes": 6,
            "locations": ["a", "b", "c"],
            "links": links,
            "activation_bytes": 4e6,
            "stage_bytes": 2e8,
            "forward_s": 0.1,
            "stages": [2, 2, 2],
            "path_length": 3,
            "microbatches_per_data_node": 2,
            "memory": 2,
        }
    )

    gradients, rarely = (
        best_plan([case], "full", Search(0, 1.0), RecipeConfig(average_parameters_every=every))
        for every in (None, 1000)
    )
    assert rarely.case is case
    assert rarely.predicted.pipeline_s < gradients.predicted.pipeline_s
    assert rarely.predicted.averaging_s > gradients.predicted.averaging_s
    # A plan of a case, like any other.
    assert rarely.predicted.iteration_s == timeline_of(rarely, 1).iteration_s
    apart, averaging = (timeline_of(rarely, averaged) for averaged in (0, AVERAGED))
    assert apart.iteration_s == apart.pipeline_s == rarely.predicted.pipeline_s
    longest_s = max(AVERAGED * 2e8 / bandwidth(case, nodes) for nodes in rarely.stages)
    assert averaging.iteration_s == pytest.approx(apart.iteration_s + longest_s, rel=0.01)


def bandwidth(case: Case, nodes: tuple[int, ...]) -> float:
    """Of the slower direction between two nodes."""
    _, matrix = case.link_matrices
    a, b = nodes
    return float(min(matrix[a, b], matrix[b, a]))
