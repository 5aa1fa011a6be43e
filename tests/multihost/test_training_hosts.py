"""Training over many processes: equal to the oracle and to one process, and never left hanging."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from skippipe_sched.problem.plan import load_plan

from skippipe_jax import Run
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.config import load_config
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.storage.checkpoint import latest_step
from tests.harness import oracle
from tests.harness.processes import started_processes
from tests.harness.training_runs import (
    Arrays,
    arrays_of_checkpoint,
    assert_same_bits,
    by_name,
    settings,
    steps_done,
    virtual_devices,
    write_config,
)
from tests.sched.examples import plan_of

Paths = tuple[list[list[int]], list[list[int]]]
"""The nodes of each stage, and those that each microbatch visits."""

WRITES_REPLICAS = (Path(__file__).with_name("training_worker.py"), "Replicas")
TRAIN, LAUNCH = ("-m", "skippipe_jax.train"), ("-m", "skippipe_jax", "launch")
PATIENCE_S = 180.0
# A death shows at once; a host that a busy machine keeps from running is not to be lost.
HEARTBEAT_TIMEOUT_S = 10.0
# Of the runs that lose some of them. Each has nodes whose stages other hosts serve, too.
HOSTS = 4
HOST_OF_NODE = [node % HOSTS for node in range(9)]
# Long enough that a run is still on its way when something happens to it.
STEPS = 26
# What a library prints when it ends a process in its own way.
CRASHES = re.compile("Traceback|Check fail|Fatal|terminate called|core dumped|Segmentation")


# Against the oracle.

ORACLE_CASE: dict[str, Any] = {
    "locations": ["Belgium", "Iowa", "Oregon"],
    "links": "gcp12",
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "memory": 2,
    "rules": {"max_swaps": 1, "max_swap_distance": 1, "max_jump": 1},
}
ORACLE_STEPS = 3


# Two data nodes with two microbatches and one; the second path swaps, the third skips.
UNEVEN: Paths = ([[0, 1], [2], [3, 4]], [[0, 2, 3], [0, 4, 2], [1, 2]])
FOUR_STAGES: Paths = (
    [[1], [0, 4], [2], [3, 5]],
    [[1, 0, 2, 3], [1, 2, 4, 5], [1, 0, 3], [1, 2, 5]],
)
UNTIED = {"layers": 3, "recompute": "none"}
TIED = {
    "layers": 5,
    "stage_layers": [2, 1, 1, 1],
    "kv_heads": 2,
    "tied_head": True,
    "recompute": "stage",
}
# Replicas of the data stage have equal meshes on two hosts, those of the last stage others.
MESHES = ((2, 2), (2, 2), (1, 2), (2, 1), (1, 1))
OTHER_MESHES = ((1, 1), (1, 1), (2, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("runtime", "paths", "model", "host_of_node", "execution", "averaging", "packing"),
    [
        pytest.param(
            *("independent", UNEVEN, UNTIED, [0, 1, 2, 0, 1], "ready-first", "ring", "windows"),
            id="3 hosts",
        ),
        pytest.param(
            *("distributed", FOUR_STAGES, TIED, [0, 1, 2, 3, 4, 5]),
            *("strict", "collective", "windows"),
            id="6 hosts",
            marks=pytest.mark.nightly,
        ),
        # Here two stages, and the sum over all hosts, are summed between the same two devices.
        pytest.param(
            *("distributed", UNEVEN, UNTIED, [0, 1, 0, 1, 0]),
            *("strict", "collective", "windows"),
            id="2 hosts",
        ),
        pytest.param(
            *("independent", FOUR_STAGES, TIED, [0, 1, 0, 1, 1, 0]),
            *("ready-first", "ring", "documents"),
            id="2 hosts, ring, packed documents",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_every_replica_equals_the_oracle(
    tmp_path: Path,
    runtime: str,
    paths: Paths,
    model: dict[str, Any],
    host_of_node: list[int],
    execution: str,
    averaging: str,
    packing: str,
):
    save_plan(tmp_path / "plan.json", paths)
    path = write_oracle_config(
        tmp_path,
        model,
        packing,
        train={"steps": ORACLE_STEPS},
        cluster={"host_of_node": host_of_node, "runtime": runtime},
        execution=execution,
        network={"averaging": averaging, "deadline_s": 30},
    )
    hosts = max(host_of_node) + 1
    with started_processes(tmp_path / "hosts") as processes:
        processes.start_hosts(hosts, *WRITES_REPLICAS, "--config", path, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * hosts, processes.outputs()
    assert_replicas_are_saved(tmp_path, ORACLE_STEPS)
    assert_equals_the_oracle(path, tmp_path, ORACLE_STEPS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "runtime", ["independent", pytest.param("distributed", marks=pytest.mark.slow)]
)
def test_hosts_of_meshes_equal_the_oracle_and_go_on_under_others(tmp_path: Path, runtime: str):
    save_plan(tmp_path / "plan.json", UNEVEN, MESHES)
    save_plan(tmp_path / "other.json", UNEVEN, OTHER_MESHES)
    path = write_oracle_config(
        tmp_path,
        {"vocabulary_size": 260, "kv_heads": 2, "layers": 3},
        "documents",
        train={"steps": 2},
        cluster={"host_of_node": [0, 1, 2, 0, 2], "runtime": runtime},
        network={"deadline_s": 60},
    )
    with started_processes(tmp_path / "hosts") as processes:
        processes.start_hosts(3, *WRITES_REPLICAS, "--config", path, **virtual_devices(4))
        assert processes.exit_codes(PATIENCE_S) == [0] * 3, processes.outputs()
    assert_replicas_are_saved(tmp_path, 2)
    assert_equals_the_oracle(path, tmp_path, 2)
    resumed = settings(
        plan__file=tmp_path / "other.json", train__steps=3, cluster__host_of_node="null"
    )
    with started_processes(tmp_path / "alone") as processes:
        command = (*WRITES_REPLICAS, "--config", path, "--resume", *resumed)
        processes.start(*command, **virtual_devices(8))
        assert processes.exit_codes(PATIENCE_S) == [0], processes.outputs()
    assert_equals_the_oracle(path, tmp_path, 3)


def save_plan(path: Path, paths: Paths, meshes: Sequence[tuple[int, int]] = ()) -> None:
    """Write a plan, whose nodes are of one device each or have these meshes (fsdp, tensor)."""
    stages, microbatches = paths
    given: dict[str, Any] = ORACLE_CASE | {"path_length": len(stages)}
    if meshes:
        given["nodes"] = [{"mesh": {"fsdp": fsdp, "tensor": tensor}} for fsdp, tensor in meshes]
    plan_of(stages, microbatches, **given).save(path)


def write_oracle_config(folder: Path, model: dict[str, Any], packing: str, **sections: Any) -> Path:
    """The configuration for short documents, packed or one after the other."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 14, 900)
    texts = ("".join(random.choice(list("skip "), length)) for length in lengths)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shape = {"width": 16, "heads": 4, "kv_heads": 4, "ffn_width": 24, "context": 32}
    return write_config(
        folder,
        run_dir=str(folder / "run"),
        plan={"file": str(folder / "plan.json")},
        model=shape | model,
        data={
            "source": "jsonl",
            "path": str(rows),
            "packing": packing,
            "sequence_length": 32,
            "microbatch_size": 2,
        },
        optimizer={
            "learning_rate": 3e-2,
            "warmup_steps": 1,
            "decay_steps": 10,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            # So large that an update depends on how large a gradient is, not only on its direction.
            "epsilon": 1e-2,
        },
        **sections,
    )


def assert_equals_the_oracle(path: Path, folder: Path, steps: int) -> None:
    """Hold what the replicas are after so many steps, and the losses, against the oracle."""
    config, plan = load_config(path), load_plan(folder / "plan.json")
    paths = plan.microbatches
    batches, sent = TrainingBatches(config.data), len(paths)
    iterations = [[batches[step * sent + m] for m in range(sent)] for step in range(steps)]
    for batch in itertools.chain(*iterations):
        # Packed rows hold several documents.
        is_packed = "begins" in batch and batch["begins"][:, 1:].any()
        assert is_packed == (config.data.packing == "documents")
    stage_paths = [[plan.stage_of[node] for node in path] for path in paths]
    expected, losses = oracle.train(
        config.model, config.optimizer, stage_paths, len(plan.stages), iterations, config.seed
    )
    for stage, replicas in enumerate(read_replicas(folder)):
        assert len(replicas) == len(plan.stages[stage])
        truth = by_name({"parameters": expected[stage]})
        for replica in replicas:
            error = oracle.relative_error({name: replica[name] for name in truth}, truth)
            assert error < 2e-5, f"stage {stage}: {error}"
    found = [line["loss"] for line in Run(folder / "run").metrics]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)


def read_replicas(folder: Path) -> list[list[Arrays]]:
    """What hosts of the run in this folder wrote: the arrays of each replica of each stage."""
    found: dict[int, list[Arrays]] = {}
    for path in sorted((folder / "replicas").iterdir()):
        [stage] = re.findall(r"^stage(\d+)_", path.name)
        with np.load(path) as arrays:
            found.setdefault(int(stage), []).append(dict(arrays))
    return [found[stage] for stage in range(len(found))]


def assert_replicas_are_saved(folder: Path, step: int) -> None:
    """The replicas of a stage hold the bits that the last checkpoint holds of it."""
    saved = arrays_of_checkpoint(folder / "run", step)
    replicas_of_stage = read_replicas(folder)
    assert sum(map(len, replicas_of_stage)) > len(saved)
    for replicas, of_stage in zip(replicas_of_stage, saved, strict=True):
        for replica in replicas:
            assert_same_bits(replica, of_stage)


# The quickstart's plan, with a small model.


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quickstart = load_config(Path("experiments/quickstart.yaml"))
    return write_config(
        tmp_path_factory.mktemp("config"),
        plan={"case": quickstart.plan.case, "method": quickstart.plan.method},
        train={"steps": STEPS},
        checkpoint={"every": 5, "keep": 3},
        cluster={"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "connect_timeout_s": 120},
    )


def in_folder(config: Path, run_dir: Path, **changes: Any) -> list[str | Path]:
    return ["--config", config, *settings(run_dir=run_dir, **changes)]


@pytest.fixture(scope="module")
def one_process(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run of one process, its nodes spread over two devices."""
    folder = tmp_path_factory.mktemp("one")
    with started_processes(folder) as processes:
        processes.start(*TRAIN, *in_folder(config, folder / "run"), **virtual_devices(2))
        assert processes.exit_code(0, PATIENCE_S) == 0, processes.output(0)
    return folder / "run"


@pytest.fixture(scope="module")
def four_processes(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run of as many processes as below lose one after the other."""
    folder = tmp_path_factory.mktemp("four")
    changes = {"cluster__host_of_node": HOST_OF_NODE}
    with started_processes(folder) as processes:
        command = (*TRAIN, *in_folder(config, folder / "run", **changes))
        processes.start_hosts(HOSTS, *command, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * HOSTS, processes.outputs()
        assert not CRASHES.search(processes.outputs()), processes.outputs()
    return folder / "run"


def assert_same_losses(run: Path, expected: Path) -> None:
    lines, others = Run(run).metrics, Run(expected).metrics
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, other in zip(lines, others, strict=True):
        assert abs(line["loss"] - other["loss"]) < 1e-4
    # Otherwise the curves would say little.
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


def errors_of_parameters(run: Path, expected: Path, step: int) -> list[float]:
    """The relative error of each stage."""

    def parameters(folder: Path) -> list[Arrays]:
        saved = arrays_of_checkpoint(folder, step)
        return [{name: own[name] for name in own if "parameters" in name} for own in saved]

    return list(map(oracle.relative_error, parameters(run), parameters(expected)))


@pytest.mark.nightly
def test_nine_processes_equal_one_with_hops_in_8_bits(config: Path, tmp_path: Path):
    """What is drawn for a gradient's rounding depends on no host, and rounds alike everywhere."""
    steps = 10
    one, nine, otherwise = (tmp_path / name for name in ("one", "nine", "otherwise"))

    def command(run_dir: Path, rounding: str) -> list[str | Path]:
        short = {"train__steps": steps, "checkpoint__every": steps}
        rounded = {"network__activation_dtype": "int8", "network__gradient_rounding": rounding}
        return [*TRAIN, *in_folder(config, run_dir, **short, **rounded)]

    with started_processes(tmp_path / "outputs") as processes:
        processes.start(*command(one, "stochastic"), **virtual_devices(2))
        processes.start(*command(otherwise, "nearest"), **virtual_devices(2))
        processes.start_hosts(9, *command(nine, "stochastic"), **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * (2 + 9), processes.outputs()
        # As JAX says of what was given up for nothing.
        assert "donated" not in processes.outputs()

    # Sums over processes differ in their last bits, by which a few gradients are rounded otherwise.
    errors, others = (errors_of_parameters(run, one, steps) for run in (nine, otherwise))
    assert all(error < other / 10 for error, other in zip(errors, others, strict=True))
    lines, of_one = Run(nine).metrics, Run(one).metrics
    for line, other in zip(lines, of_one, strict=True):
        assert abs(line["loss"] - other["loss"]) < 1e-3
        assert line["bytes_sent"] == other["bytes_sent"]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]


@pytest.mark.nightly
def test_three_hosts_with_several_nodes_and_devices_stop_together_and_go_on(
    config: Path, one_process: Path, tmp_path: Path
):
    run_dir = tmp_path / "run"
    with started_processes(tmp_path / "stopped") as processes:
        command = (*LAUNCH, "--hosts", "3", *in_folder(config, run_dir))
        processes.start(*command, **virtual_devices(2))
        processes.wait_until(lambda: steps_done(run_dir) >= 8, PATIENCE_S)
        processes.processes[0].send_signal(signal.SIGINT)
        code, output = processes.exit_code(0, PATIENCE_S), processes.output(0)
    assert code == 128 + signal.SIGINT, output
    step = latest_step(run_dir)
    assert step == steps_done(run_dir)
    assert f"received SIGINT: all hosts stop after step {step}. " in output
    assert f"--resume; last checkpoint: step {step} in {run_dir}." in output
    assert not CRASHES.search(output), output

    with started_processes(tmp_path / "resumed") as processes:
        command = (*WRITES_REPLICAS, *in_folder(config, run_dir), "--resume")
        # Stopped in one runtime, it goes on in the other.
        distributed = settings(cluster__runtime="distributed")
        processes.start_hosts(3, *command, *distributed, **virtual_devices(2))
        assert processes.exit_codes(PATIENCE_S) == [0] * 3, processes.outputs()
    assert_same_losses(run_dir, one_process)
    assert_replicas_are_saved(tmp_path, STEPS)


# Losing a host.


@pytest.mark.nightly
def test_one_jax_ends_with_any_host_and_the_run_is_resumed_even_by_hosts_of_their_own(
    config: Path, four_processes: Path, tmp_path: Path
):
    run_dir = tmp_path / "run"
    arguments = in_folder(config, run_dir, cluster__host_of_node=HOST_OF_NODE)
    distributed = settings(cluster__runtime="distributed")
    with started_processes(tmp_path / "without_2") as processes:
        command = (*TRAIN, *arguments, *distributed)
        processes.start_hosts(HOSTS, *command, **virtual_devices(1))
        processes.wait_until(
            lambda: steps_done(run_dir) >= 7 and latest_step(run_dir) is not None, PATIENCE_S
        )
        processes.processes[2].kill()
        codes = processes.exit_codes(HEARTBEAT_TIMEOUT_S)
        lost, stopped = -signal.SIGKILL, LOST_HOST_EXIT_CODE
        assert codes == [stopped, stopped, lost, stopped]
        for host in (0, 1, 3):
            assert_told_of_loss(processes.output(host), processes.name(2), run_dir)

    with started_processes(tmp_path / "without_0") as processes:
        # JAX's service goes with host 0.
        command = (*LAUNCH, "--hosts", str(HOSTS), *arguments, *distributed, "--resume")
        processes.start(*command, **virtual_devices(1))
        processes.wait_until(lambda: steps_done(run_dir) >= 17, PATIENCE_S)
        [host_0] = [
            child
            for child in psutil.Process(processes.processes[0].pid).children()
            if child.cmdline()[-2:] == ["--host-id", "0"]
        ]
        host_0.kill()
        assert processes.exit_code(0, HEARTBEAT_TIMEOUT_S) != 0
        output = processes.output(0)
        # Its process, where the launcher started one that stands in for it.
        lost = re.search(r"host 0 \(pid \d+ on [^)]*\)", output)
        assert lost
        for host in range(1, HOSTS):
            lines = [line for line in output.splitlines() if line.startswith(f"[host {host}] ")]
            assert_told_of_loss("\n".join(lines), lost[0], run_dir)

    with started_processes(tmp_path / "resumed") as processes:
        command = (*WRITES_REPLICAS, *arguments, "--resume")
        processes.start_hosts(HOSTS, *command, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * HOSTS, processes.outputs()
    assert_replicas_are_saved(tmp_path, STEPS)
    for found, expected in zip(
        arrays_of_checkpoint(run_dir, STEPS),
        arrays_of_checkpoint(four_processes, STEPS),
        strict=True,
    ):
        assert_same_bits(found, expected)
    losses, others = (
        [line["loss"] for line in Run(folder).metrics] for folder in (run_dir, four_processes)
    )
    assert losses == others


def assert_told_of_loss(output: str, lost: str, run_dir: Path) -> None:
    """The output of a host says who was lost and from where to resume, once, and nothing worse."""
    assert output.count(f"{lost} failed: ") == 1, output
    endings = re.findall(r"exits with code 75\. .*: step (\d+) in (\S+)\.$", output, re.M)
    assert len(endings) == 1, output
    assert Path(endings[0][1]) == run_dir
    assert (run_dir / "checkpoints" / f"{int(endings[0][0]):08d}").exists()
    assert not CRASHES.search(output), output


# The launcher, whose hosts are always started for real.
