"""A run that is validated, profiled and tracked: what it leaves, also where it was resumed."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
import wandb
from skippipe_sched.errors import InputError
from tensorboardX.proto import event_pb2

from skippipe_jax import Run
from skippipe_jax.cli.main import main
from skippipe_jax.cluster.ending import RunFailed
from skippipe_jax.config import Config, LogConfig, load_config, parse_config
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, TrainingBatches
from skippipe_jax.reporting.page import report
from skippipe_jax.storage.checkpoint import committed_steps
from skippipe_jax.storage.run_dir import BEST, METRICS, VALIDATION, RunDir
from skippipe_jax.training.callbacks.base import RunView
from skippipe_jax.training.callbacks.trackers import flatten_scalars, trackers_of_leader
from skippipe_jax.training.validation import is_out_of_patience
from tests.harness.partial_models import evaluate_run
from tests.harness.processes import started_processes
from tests.harness.step_metrics import metrics_of
from tests.harness.training_runs import (
    MODEL,
    SMALL_CASE,
    arrays_of_checkpoint,
    assert_same_bits,
    settings,
    train_alone,
    virtual_devices,
    write_config,
)

PLAN = {"method": "balanced", "case": SMALL_CASE | {"nodes": 4, "stages": [2, 1, 1]}}
THREE_STAGES = MODEL | {"layers": 6}
# Not a multiple of what one microbatch holds for each of the two data nodes.
SEQUENCES = 10
# Saved at 3 and 6, validated at 2, 4 and 6, and both where a part of the run ends.
WATCHED: dict[str, Any] = {
    "checkpoint": {"every": 3, "keep": 1},
    "validation": {"every": 2, "sequences": SEQUENCES},
    "log": {"tensorboard": True, "profile_steps": [2]},
}


def train_here(config: Path, run_dir: Path, resume: bool = False, **changes: Any) -> None:
    changed = settings(run_dir=run_dir, **changes)[1::2]
    train_alone(load_config(config, changed), resume=resume)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in which nothing is watched."""
    return write_config(tmp_path_factory.mktemp("config"), plan=PLAN, model=THREE_STAGES)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after step 5 and was resumed to step 6."""
    folder = tmp_path_factory.mktemp("watched")
    config = write_config(folder, plan=PLAN, model=THREE_STAGES, **WATCHED)
    train_here(config, folder / "run", train__steps=5)
    train_here(config, folder / "run", resume=True, train__steps=6)
    return folder / "run"


# Validation.


def test_the_held_out_loss_is_that_of_evaluation(watched: Path):
    lines = Run(watched).metrics
    losses = {line["step"]: line["validation_loss"] for line in lines}
    assert [step for step, loss in losses.items() if loss is not None] == [2, 4, 5, 6]
    records = (watched / VALIDATION).read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [2, 4, 5, 6], "each once"
    for step in committed_steps(watched):
        assert losses[step] == pytest.approx(evaluate_run(watched, step, SEQUENCES).loss, rel=1e-6)
    assert losses[6] != losses[4]


def test_the_best_checkpoint_is_noted(watched: Path):
    best = json.loads((watched / BEST).read_text())
    losses = {line["step"]: line["validation_loss"] for line in Run(watched).metrics}
    assert best == {"step": 6, "validation_loss": losses[6]}
    assert losses[6] < losses[4]


@pytest.mark.parametrize(
    ("losses", "patience", "over"),
    [
        ({}, 1, False),
        ({2: 3.0, 4: 2.0}, 1, False),
        ({2: 3.0, 4: 2.0, 6: 2.0}, 1, True),
        ({2: 3.0, 4: 2.0, 6: 2.5, 8: 2.1}, 2, True),
        ({2: 3.0, 4: 2.0, 6: 2.5, 8: 1.9}, 2, False),
    ],
)
def test_patience_ends_with_so_many_validations_after_the_best(
    losses: dict[int, float], patience: int, over: bool
):
    assert is_out_of_patience(losses, patience) == over


def test_a_run_that_stops_early_says_why_and_does_not_go_on_when_it_is_resumed(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """No update is made, so the first validation is the best."""
    arguments = ["train", "--config", str(config)]
    arguments += settings(
        run_dir=tmp_path / "run",
        optimizer__skip_above_norm=1e-6,
        train__steps=20,
        checkpoint__every=1,
        validation={"every": 1, "sequences": SEQUENCES, "patience": 2},
    )
    lines = []
    for more in ([], ["--resume"]):
        assert main([*arguments, *more]) == 0
        out = capfd.readouterr().out
        lines.append(next(line for line in out.splitlines() if line.startswith("stopped early")))
        assert "best checkpoint (--step best): step 1," in out
    steps = [line["step"] for line in Run(tmp_path / "run").metrics]
    best = Run(tmp_path / "run").best
    assert (best, steps) == (1, [1, 2, 3])
    assert lines[0] == lines[1]
    assert "no improvement in 2 validations after step 1 (validation loss" in lines[0]


@pytest.mark.nightly
def test_all_hosts_stop_early_after_the_same_step(config: Path, tmp_path: Path):
    with started_processes(tmp_path) as processes:
        processes.start_hosts(
            2,
            *("-m", "skippipe_jax.train", "--config", config),
            *settings(
                run_dir=tmp_path / "run",
                optimizer__learning_rate=1e-12,
                train__steps=1000,
                validation={"every": 1, "sequences": SEQUENCES, "patience": 1},
            ),
            **virtual_devices(1),
        )
        assert processes.exit_codes(120.0) == [0] * 2, processes.outputs()
    steps = len(Run(tmp_path / "run").metrics)
    assert f"finished {steps} steps" in processes.output(0)
    assert committed_steps(tmp_path / "run") == [steps]


@pytest.mark.nightly
def test_three_hosts_validate_as_one(config: Path, tmp_path: Path):
    """Host 2 has no data node; the others have one each."""
    run_dir = tmp_path / "run"
    with started_processes(tmp_path) as processes:
        processes.start_hosts(
            3,
            *("-m", "skippipe_jax.train", "--config", config),
            *settings(
                run_dir=run_dir,
                cluster__host_of_node=[0, 1, 2, 1],
                train__steps=2,
                validation__every=1,
                validation__sequences=SEQUENCES,
                # What is rounded on the wire is exact in validation.
                network__activation_dtype="bfloat16",
            ),
            **virtual_devices(1),
        )
        assert processes.exit_codes(120.0) == [0] * 3, processes.outputs()
    losses = [line["validation_loss"] for line in Run(run_dir).metrics]
    assert losses[1] == pytest.approx(evaluate_run(run_dir, 2, SEQUENCES).loss, rel=1e-6)
    assert losses[0] != losses[1]
    assert f"step 2: validation loss {losses[1]:.4f}" in processes.output(0)


# Trackers.


def events_of(folder: Path) -> Iterator[Any]:
    """Everything in the event files of a folder, which hold length, checksum, event, checksum."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]
            event.ParseFromString(data[12 : 12 + length])
            yield event
            data = data[16 + length :]


def test_tensorboard_has_the_numbers_of_metrics(watched: Path):
    events = list(events_of(watched / "tensorboard"))
    found: dict[tuple[int, str], float] = {
        (event.step, value.tag): value.simple_value
        for event in events
        for value in event.summary.value
    }
    expected = {
        (line["step"], name): value
        for line in Run(watched).metrics
        for name, value in flatten_scalars(line)
    }
    assert {(6, "loss"), (6, "validation_loss"), (1, "peak_in_flight/0")} < expected.keys()
    assert found == pytest.approx(expected, rel=1e-6)
    # What a part of the run writes takes the place of later steps.
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [1, 6]


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    config = parse_config({"log": {"wandb": "far-apart"}, "seed": 7})
    ids, view = set(), cast(RunView, None)
    for step in (1, 2):
        [tracker] = trackers_of_leader(config, tmp_path, step - 1, is_new=False)
        tracker.on_step_end(view, metrics_of(step, 2.5, idle_share=[0.5]))
        assert wandb.run is not None
        ids.add(wandb.run.id)
        tracker.close()
    # Its service, a process of its own, writes to the end before it goes.
    wandb.teardown()
    assert len(ids) == 1
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{ids.pop()}.wandb"))
    assert len(files) == 2
    for path in files:
        content = path.read_bytes()
        assert all(word in content for word in (b"far-apart", b"idle_share/0", b"2.5"))


@pytest.mark.parametrize(
    ("log", "package", "problem"),
    [
        (LogConfig(tensorboard=True), "tensorboardX", "log.tensorboard = True: needs the package"),
        (LogConfig(wandb="project"), "wandb", "log.wandb = 'project': needs the package"),
    ],
)
def test_without_the_package_of_a_tracker_no_run_begins_and_one_that_trains_goes_on(
    log: LogConfig,
    package: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"{problem}.*pip install"):
        trackers_of_leader(Config(log=log), tmp_path, 5, is_new=False)
    assert trackers_of_leader(Config(log=log), tmp_path, 5, is_new=True) == []
    assert f"warning: {problem}" in capfd.readouterr().err


# The profiler, and what devices say.


def test_the_profile_of_a_step_names_its_operations(watched: Path):
    assert [path.name for path in (watched / "profile").iterdir()] == ["00000002"]
    [path] = watched.glob("profile/*/host_0/plugins/profile/*/*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    names = [e.name for plane in profile.planes for line in plane.lines for e in line.events]
    plan = RunDir(watched).plan()
    for order in plan.order:
        for operation in order:
            assert names.count(f"{operation}, stage {plan.stage_of[operation.node]}") == 1
    assert any(name.startswith("iteration") for name in names)


def test_metrics_tell_what_devices_and_compilation_needed(watched: Path):
    lines = Run(watched).metrics
    assert lines[0]["compile_seconds"] > 0.0
    for line in lines:
        assert (line["compile_seconds"] > 0.0) == (line["compilations"] > 0)
        # CPUs do not count their memory, and have no peak in any data sheet.
        assert set(line["peak_memory_bytes"].values()) == {None}
        assert line["flops_utilisation"] is None
        assert line["peak_process_bytes"] > 1e7
        assert line["z_loss"] is None


# The guard.


def test_skipped_updates_change_nothing_and_are_counted_over_a_resume(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    guarded = {"optimizer__skip_above_norm": 1e-6, "checkpoint__every": 2}
    train_here(config, tmp_path / "run", train__steps=2, **guarded)
    assert "step 2: update skipped" in capfd.readouterr().err
    train_here(config, tmp_path / "run", resume=True, train__steps=4, **guarded)
    assert "(4 so far)" in capfd.readouterr().err
    for before, after in zip(
        arrays_of_checkpoint(tmp_path / "run", 2),
        arrays_of_checkpoint(tmp_path / "run", 4),
        strict=True,
    ):
        assert_same_bits(after, before)
    lines = Run(tmp_path / "run").metrics
    assert [line["skipped_updates"] for line in lines] == [1, 2, 3, 4]
    assert len({line["learning_rate"] for line in lines}) == 1
    # Where updates are made, the schedule goes on from where it stood.
    train_here(config, tmp_path / "run", resume=True, train__steps=6)
    *_, fifth, sixth = Run(tmp_path / "run").metrics
    assert (fifth["skipped_updates"], sixth["skipped_updates"]) == (4, 4)
    assert fifth["learning_rate"] == lines[0]["learning_rate"] < sixth["learning_rate"]


@pytest.mark.parametrize(
    "averaging",
    [
        {},
        pytest.param(
            {"averaging__mode": "outer", "averaging__every": 2, "averaging__fragments": 1},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_iteration_without_a_target_is_told_of_and_the_run_goes_on(
    config: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    averaging: dict[str, Any],
):
    read = TrainingBatches.__getitem__

    def without_targets(own: TrainingBatches, number: int) -> Batch:
        batch = read(own, number)
        # All that is read in the second of three iterations, of four microbatches each.
        if 4 <= number < 8:
            batch["targets"] = np.full_like(batch["targets"], IGNORED_TARGET)
        return batch

    monkeypatch.setattr(TrainingBatches, "__getitem__", without_targets)
    train_here(config, tmp_path / "run", train__steps=3, **averaging)
    lines = Run(tmp_path / "run").metrics
    assert [line["loss"] is None for line in lines] == [False, True, False]
    assert [line["tokens"] == 0 for line in lines] == [False, True, False]
    assert "NaN" not in (tmp_path / "run" / METRICS).read_text()
    told = "step 2: update skipped, no target tokens"
    # Replicas that go apart each count their own.
    assert (told in capfd.readouterr().err) == (not averaging)
    if not averaging:
        assert [line["skipped_updates"] for line in lines] == [0, 1, 1]
        assert lines[2]["learning_rate"] == lines[1]["learning_rate"] > lines[0]["learning_rate"]


@pytest.mark.nightly
def test_a_loss_that_is_no_number_ends_a_run_without_the_guard_alone(config: Path, tmp_path: Path):
    # So far that products overflow, and squares do not: that a norm would bring back to zero.
    explosive = {"optimizer__learning_rate": 3e18, "train__steps": 3}
    with pytest.raises(RunFailed, match="skip_above_norm") as caught:
        train_here(config, tmp_path / "ended", **explosive)
    assert caught.value.field == "optimizer.learning_rate"
    train_here(config, tmp_path / "run", optimizer__skip_above_norm=1e6, **explosive)
    lines = Run(tmp_path / "run").metrics
    assert [line["loss"] is None for line in lines] == [False, True, True]
    assert [line["gradient_norm"] is None for line in lines] == [False, True, True]
    assert [line["skipped_updates"] for line in lines] == [0, 1, 2]
    assert "NaN" not in (tmp_path / "run" / METRICS).read_text()
    assert "Loss" in report(tmp_path / "run")
