"""A run of real processes goes on when some of them are lost, and trains what it would have."""

from __future__ import annotations

import itertools
import json
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skippipe_sched.problem.plan import load_plan

import skippipe_jax as sp
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.storage.checkpoint import (
    CHECKPOINTS,
    COMMITTED,
    latest_step,
    open_checkpoint,
    step_name,
)
from skippipe_jax.storage.run_dir import GENERATIONS, METRICS, RunDir
from tests.harness.processes import started_processes
from tests.harness.training_hosts import CASE, PACED, PATIENCE_S, TRAIN, TrainingHosts, hosts_of
from tests.harness.training_runs import (
    arrays_of_checkpoint,
    settings,
    steps_done,
    virtual_devices,
    write_config,
)

Begin = Callable[..., TrainingHosts]

WORKER = Path(__file__).with_name("training_worker.py")
LAUNCH, STATUS = ("-m", "skippipe_jax", "launch"), ("-m", "skippipe_jax", "status")
HOSTS = 4
STEPS = 60
# Hosts 0 and 1 have a replica of stage 0 each, hosts 2 and 3 one of stage 1.
# Nobody is silent for so long that is not stopped.
HEARTBEAT_TIMEOUT_S = 12.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("survival"),
        plan={"case": CASE, "method": "balanced"},
        train={"steps": STEPS},
        checkpoint={"every": 10},
        validation={"every": 20, "sequences": 8},
        trace="every 20",
        cluster={"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "connect_timeout_s": 120},
        network={"deadline_s": PATIENCE_S / 3},  # A host that waits longer says what for.
        replan={"budget_s": 0},
        # As in training in earnest: a difference does not grow a thousandfold in a few steps.
        optimizer={"learning_rate": 1e-3, "warmup_steps": 5},
    )


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    """The run of one process, to the end."""
    folder = config.parent / "undisturbed"
    with started_processes(folder) as processes:
        run_dir = folder / "run"
        processes.start(
            *TRAIN, "--config", config, *settings(run_dir=run_dir), **virtual_devices(1)
        )
        assert processes.exit_code(0, PATIENCE_S) == 0, processes.outputs()
    return run_dir


def told_to_observer(run: TrainingHosts, address: str) -> Any:
    """Return what `status` tells of a run."""
    number = len(run.processes.processes)
    run.processes.start(*STATUS, address, "--json")
    assert run.processes.exit_code(number, PATIENCE_S) == 0, run.processes.outputs()
    return json.loads(run.processes.output(number))


def assert_trained_like(run_dir: Path, other: Path) -> None:
    """Every step is there once, with the losses of the other run, and so are the parameters."""
    lines, others = sp.Run(run_dir).metrics, sp.Run(other).metrics
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in ("loss", "tokens", "gradient_norm"):
        np.testing.assert_allclose(
            [line[key] for line in lines], [line[key] for line in others], rtol=2e-5, err_msg=key
        )
    found = {line["step"]: line["validation_loss"] for line in lines if line["validation_loss"]}
    expected = {line["step"]: line["validation_loss"] for line in others if line["validation_loss"]}
    assert found == pytest.approx(expected, rel=2e-5)
    for stage, same in zip(
        arrays_of_checkpoint(run_dir, STEPS), arrays_of_checkpoint(other, STEPS), strict=True
    ):
        for name, array in stage.items():
            np.testing.assert_allclose(array, same[name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_host_comes_back_whose_node_is_a_mesh(begin: Begin, undisturbed: Path):
    """And takes its state from others, each of which has it in parts."""
    run = begin(*PACED, *settings(node="{fsdp: 2}"), devices=2)
    run.wait_until_step(4)
    run.signal(0, signal.SIGKILL)
    run.wait_until_members(1, 2, 3)
    run.start(0, "--resume")
    run.wait_until_members(0, 1, 2, 3)
    run.ends_well(0, 1, 2, 3)
    assert "host 0 rejoined at step" in run.output(0)
    assert_trained_like(run.run_dir, undisturbed)


def test_a_run_outlives_hosts_and_its_leader_and_a_machine_without_the_folder_joins(
    begin: Begin, undisturbed: Path, tmp_path: Path
):
    """One is lost, and a machine takes its place; then the other of its stage, and who leads."""
    copy, own = tmp_path / "copy", tmp_path / "elsewhere"
    run = begin(*PACED, *settings(checkpoint__copy_to=copy.as_uri()))
    run.wait_until_step(4)
    run.signal(3, signal.SIGKILL)
    run.wait_until_members(0, 1, 2)
    address = run.address(1)
    with_one_lost = told_to_observer(run, address)
    # Where the text lies is no matter for a place without a data node.
    run.join(3, 1, own, data__path=own / "nowhere")
    run.wait_until_members(0, 1, 2, 3)
    run.wait_for_steps(1)
    with_one_joined = told_to_observer(run, address)
    run.signal(2, signal.SIGKILL)
    run.wait_until_members(0, 1, 3)
    run.wait_for_steps(1)
    run.signal(0, signal.SIGKILL)
    run.ends_well(1, 3)
    assert with_one_lost["stages"] == [[0, 1], [2]]
    assert [host["state"] for host in with_one_lost["hosts"]] == [*["present"] * 3, "lost"]
    assert [host["location"] for host in with_one_lost["hosts"]] == ["here"] * 4
    assert with_one_joined["stages"] == [[0, 1], [2, 3]]
    assert {host["state"] for host in with_one_joined["hosts"]} == {"present"}
    before, after = with_one_lost["progress"], with_one_joined["progress"]
    assert 0 < before["step"] < after["step"] <= before["steps"] == after["steps"] == STEPS
    for told in (with_one_lost, with_one_joined):
        assert (told["run"], told["host"], told["leader"]) == (str(run.run_dir), 1, 0)
    assert 1 < with_one_lost["generation"] < with_one_joined["generation"]
    changes = run.changes()
    hosts = [hosts_of(line) for line in changes]
    assert hosts == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3], [1, 3]]
    assert [line["cause"] for line in changes][1:] == [
        "host 3 failed", "host 3 joined", "host 2 failed", "host 0 failed",
    ]  # fmt: skip
    assert [line["leader"] for line in changes] == [0, 0, 0, 0, 1]
    # Of the run's own plan, whose four nodes the hosts serve in order.
    assert all(own["nodes"] == [own["host"]] for own in changes[-1]["members"])
    assert all(a["step"] < b["step"] for a, b in itertools.pairwise(changes))
    assert "host 0 failed; 2 of 4 hosts continue from step" in run.output(1)
    assert "host 2 serves stage 1; 4 hosts train, host 0 leads" in run.output(2)
    told = run.output(3)
    assert f"connected to host 1 of 4 at {address}, run {run.run_dir}; 2 files in {own}, " in told
    assert "replacing host 3 (stage 1)" in told
    assert "host 3 joined at step" in told
    assert f"finished {STEPS} steps; the run is on host 1 (" in told
    lines = itertools.pairwise(sp.Run(run.run_dir).metrics)
    later = [line for before, line in lines if before["generation"] == line["generation"]]
    assert not any(line["compilations"] for line in later), "compiled is before the first step"
    # Whoever leads copies.
    assert (copy / CHECKPOINTS / step_name(STEPS) / COMMITTED).exists()
    assert (own / "config.yaml").read_bytes() == (run.run_dir / "config.yaml").read_bytes()
    assert not (own / "checkpoints").exists()
    assert_trained_like(run.run_dir, undisturbed)


@pytest.mark.nightly
def test_hosts_connect_again_if_a_transfer_is_lost(begin: Begin, undisturbed: Path):
    run = begin(*settings(network__deadline_s=10), program=(WORKER, "LosesATransfer"))
    run.ends_well(0, 1, 2, 3)
    assert run.members() == [[0, 1, 2, 3]] * 2
    assert re.search(r"timed out after 10 s .*; all hosts are alive, and connect", run.output(0))
    assert_trained_like(run.run_dir, undisturbed)


@pytest.mark.nightly
def test_a_machine_joins_beside_all_hosts_serves_a_stage_and_is_lost(
    begin: Begin, undisturbed: Path, tmp_path: Path
):
    """Of three hosts the last one alone has stage 1, by two nodes."""
    run = begin(*settings(cluster__host_of_node="[0,1,2,2]"), *PACED, hosts=3)
    run.wait_until_step(4)
    run.join(3, 1, tmp_path / "elsewhere", data__path=tmp_path / "nowhere")
    run.wait_until_members(0, 1, 2, 3)
    run.wait_for_steps(2)
    run.signal(3, signal.SIGKILL)
    run.wait_until_members(0, 1, 2)
    run.ends_well(0, 1, 2)
    told, first = run.output(3), run.output(0)
    plan = load_plan(run.run_dir / GENERATIONS / "plan-2.json")
    assert "joining as extra host 3 of a run of 3 hosts (stage 1)" in told
    assert "host 3 joined at step" in told
    assert "host 3 joined; 4 of 4 hosts continue" in first
    assert f"host 1: finished {STEPS} steps; run directory {run.run_dir}" in run.output(1)
    assert plan.stages == ((0, 1), (2, 3, 4))
    assert {node for path in plan.microbatches for node in path} == {0, 1, 2, 3, 4}
    joined = run.generations()[1]
    assert (joined["cause"], joined["plan"]) == ("host 3 joined", "balanced, nodes added: 1")
    assert [member["nodes"] for member in joined["members"]] == [[0], [1], [2, 3], [4]]
    assert_trained_like(run.run_dir, undisturbed)


@pytest.mark.nightly
def test_a_lost_stage_takes_all_back_past_a_checkpoint_that_is_damaged(
    begin: Begin, undisturbed: Path
):
    run = begin(*PACED)
    run.wait_until_step(4)
    run.signal(2, signal.SIGKILL)
    run.wait_until_members(0, 1, 3)
    run.wait_until_saved(20)
    [*_, path] = sorted((run.run_dir / CHECKPOINTS / step_name(20) / "stage_1").rglob("*"))
    path.write_bytes(path.read_bytes()[:-1])
    run.signal(3, signal.SIGKILL)
    run.wait_until_members(0, 1)
    assert (run.generations()[-1]["rewound"], run.generations()[-1]["step"]) == (True, 10)
    run.ends_well(0, 1)
    assert (run.run_dir / CHECKPOINTS / f"{step_name(20)}.damaged").is_dir()
    assert "the commit record lists" in run.output(0)
    assert_trained_like(run.run_dir, undisturbed)


@pytest.mark.nightly
def test_a_host_whose_folder_fails_for_good_ends_alone(begin: Begin, undisturbed: Path):
    """A limit on the size of its files lets the leader write a part of a line, and no more."""
    run = begin(*PACED)
    run.wait_until_step(12)
    leader = run.pid(0)
    before = resource.prlimit(leader, resource.RLIMIT_FSIZE)
    size = (run.run_dir / METRICS).stat().st_size + 40
    resource.prlimit(leader, resource.RLIMIT_FSIZE, (size, before[1]))
    run.wait_until(lambda: "File too large; retrying in" in run.output(0))
    run.wait_until_members(1, 2, 3)
    run.ends_well(1, 2, 3)
    run.ends_with(LOST_HOST_EXIT_CODE, 0)
    assert_trained_like(run.run_dir, undisturbed)


SHORT, LONGER = 18, 60


def inner(policy: str, steps: int = SHORT) -> list[str]:
    """Settings of a shorter run, whose stage 1, between two others, is on host 2 alone."""
    return settings(
        plan__case__stages="[2, 1, 1]",
        plan__case__path_length=3,
        model__layers=3,
        train__steps=steps,
        recovery=f"{{lost_stage: {policy}, buddy_every: 2}}",
    )


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["average", "buddy"])
def test_a_lost_stage_is_made_anew_and_no_other_goes_back(begin: Begin, policy: str):
    run = begin(*PACED, *settings(plan__case__forward_s=0.04), *inner(policy))
    run.wait_until_saved(10)
    run.wait_until_step(12)
    run.signal(2, signal.SIGKILL)
    run.ends_well(0, 1, 3)
    last = run.generations()[-1]
    lines = sp.Run(run.run_dir).metrics
    [told] = RunDir(run.run_dir).recoveries()
    output = run.output(0)
    assert (last["rewound"], last["lost"]) == (False, [1])
    assert last["step"] >= 12
    [made] = last["remade"]
    sources = [0, 3] if policy == "average" else [3]
    assert (made["by"], made["sources"]) == (policy, sources)
    assert [line["step"] for line in lines] == list(range(1, SHORT + 1))
    by_step = {line["step"]: line for line in lines}
    assert (told.by, told.asked, told.stages) == (policy, policy, [1])
    assert told.step_before == told.step == last["step"]
    # Every second state is copied, which takes two iterations.
    ages = {"average": [0], "buddy": [1, 2, 3]}
    assert told.steps_old in ages[policy]
    assert told.loss_before == by_step[last["step"]]["loss"]
    assert told.loss_after == by_step[last["step"] + 1]["loss"]
    # Not exact, but no stage that knows nothing either.
    assert told.loss_after == pytest.approx(told.loss_before, abs=0.5)
    how = {"average": "rebuilt as the mean of", "buddy": "restored from its buddy checkpoint of"}
    assert f"host 2 failed; stage 1 {how[policy]}" in output
    counts = [
        int(array)
        for stage in arrays_of_checkpoint(run.run_dir, SHORT)
        for name, array in stage.items()
        if "count" in name
    ]
    assert counts == [SHORT] * 6


@pytest.mark.nightly
def test_a_stage_that_was_left_out_is_back_when_a_host_serves_it_again(begin: Begin):
    run = begin(*PACED, *inner("skip", LONGER))
    run.wait_until_saved(10)
    run.wait_until_step(11)
    run.signal(2, signal.SIGKILL)
    run.wait_until_members(0, 1, 3)
    run.start(2, "--resume")
    run.ends_well(0, 1, 2, 3)
    lost, back = RunDir(run.run_dir).recoveries()
    output = run.output(0)
    without, last = run.generations()[1:]
    assert (without["rewound"], without["lost"], without["left_out"]) == (False, [1], [1])
    # Host 2 alone would have served it: of the others none moves.
    assert load_plan(run.run_dir / GENERATIONS / "plan-2.json").stages == ((0, 1), (), (2,))
    assert "host 2 failed; stage 1 bypassed until" in output
    # The last one that was whole: that of a step which has just counted is not yet.
    saved = last["remade"][0]["step"]
    assert saved % 10 == 0
    assert last["step"] // 10 * 10 - saved in (0, 10)
    # All checkpoints have stage 1 as it was after step 10, until it is back.
    assert last["remade"] == [{"stage": 1, "by": "skip", "step": saved, "sources": [2]}]
    assert [own.steps_old for own in (lost, back)] == [lost.step - 10, back.step - 10]
    assert f"host 2 rejoined; stage 1 restored from the checkpoint of step {saved}" in output
    assert open_checkpoint(run.run_dir, LONGER).record.stale_stages == {}
    lines = sp.Run(run.run_dir).metrics
    assert [line["step"] for line in lines] == list(range(1, LONGER + 1))
    assert back.loss_after == pytest.approx(back.loss_before, abs=0.5)


@pytest.mark.nightly
def test_a_leader_that_alone_holds_a_stage_hands_it_on_and_leaves(begin: Begin, undisturbed: Path):
    """Host 1 is lost, so that host 0 alone reads the text and holds stage 0; then it comes back."""
    run = begin(*PACED)
    run.wait_until_step(2)
    run.signal(1, signal.SIGKILL)
    run.wait_until_members(0, 2, 3)
    run.signal(0, signal.SIGTERM)
    run.wait_until_members(2, 3)
    run.start(0, "--resume")
    run.wait_until_members(0, 2, 3)
    run.ends_well(0, 2, 3)
    # The first process with its number.
    assert run.processes.exit_code(0, PATIENCE_S) == 128 + signal.SIGTERM
    output = run.processes.output(0)
    assert run.members() == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [2, 3], [0, 2, 3]]
    causes = [line["cause"] for line in run.generations()][2:]
    assert causes == [
        "state transfer from host 0 before leaving",
        "host 0 left",
        "host 0 rejoined",
    ]
    assert not any(line["rewound"] for line in run.generations())
    assert "host 0 left; the run continues from step" in output
    assert "Traceback" not in output
    assert_trained_like(run.run_dir, undisturbed)


@pytest.mark.nightly
def test_stages_move_to_where_a_better_plan_has_them(begin: Begin, undisturbed: Path):
    """Two hosts take each other's stages; then one of them alone holds what it has taken."""
    run = begin(program=(WORKER, "Plans"))
    run.wait_until(lambda: len(run.generations()) == 2)
    run.wait_for_steps(3)
    run.signal(2, signal.SIGKILL)
    run.ends_well(0, 1, 3)
    assert run.members() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3]]
    causes = [line["cause"] for line in run.generations()]
    assert causes == ["", "a faster plan was found", "host 2 failed"]
    plans = [load_plan(run.run_dir / GENERATIONS / f"plan-{n}.json").stages for n in (2, 3)]
    # Nodes are counted anew where one is lost: host 3 has node 2 then.
    assert plans == [((0, 3), (1, 2)), ((0, 2), (1,))]
    assert_trained_like(run.run_dir, undisturbed)


@pytest.mark.nightly
def test_where_all_are_told_to_leave_the_run_ends_with_a_checkpoint(
    begin: Begin, undisturbed: Path
):
    run = begin()
    run.wait_until_step(3)
    for host in range(HOSTS):
        run.signal(host, signal.SIGTERM)
        time.sleep(0.1)  # Not at one moment, as where a scheduler tells them.
    run.ends_with(128 + signal.SIGTERM, *range(HOSTS))
    assert run.members() == [[0, 1, 2, 3]], "nobody has left before the others"
    step = steps_done(run.run_dir)
    said = f"received SIGTERM: all hosts stop after step {step}. Restart with --resume"
    assert all(said in run.output(host) for host in range(HOSTS))
    assert 3 <= step < STEPS
    assert latest_step(run.run_dir) == step
    losses = [line["loss"] for line in sp.Run(run.run_dir).metrics]
    others = [line["loss"] for line in sp.Run(undisturbed).metrics]
    np.testing.assert_allclose(losses, others[:step], rtol=2e-5)
