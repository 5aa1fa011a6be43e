"""What commands refuse before anything is written, and in which words."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case

from skippipe_jax.local import hosts
from tests.commands.examples import CASE, TRAIN, Command, expect_one_error, given

# A plan in a file instead of the case of the configuration.
BY_FILE = given("plan.case=null", "plan.file=plan.json")


def case_with(**changes: Any) -> str:
    return f"plan.case={json.dumps(CASE | changes)}"


# Each: arguments of --set, and words of the error: the field, the value, the remedy.
WRONG_VALUES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["model.depth=3"], ["model.depth = 3", "unknown key", "use one of: "]),
    "heads and width": (["model.heads=3"], ["model.heads = 3", "width 16", "Choose heads"]),
    "heads and kv heads": (["model.kv_heads=3"], ["model.kv_heads = 3", "Choose a divisor"]),
    "layers and stages": (["model.layers=3"], ["model.layers = 3", "2 stages", "multiple"]),
    "stage layers": (
        ["model.stage_layers=[1, 2]"],
        ["model.stage_layers = [1, 2]", "adds up to 3", "Make the two agree"],
    ),
    "small vocabulary": (["model.vocabulary_size=100"], ["vocabulary_size = 100", "Write 259"]),
    "long sequence": (
        ["data.sequence_length=64"],
        ["data.sequence_length = 64", "model.context = 32", "Shorten it"],
    ),
    "no such text": (["data.path=nowhere"], ["data.path = ", "nowhere", "No such file"]),
    "too little text": (["data.held_out=1e-6"], ["data.sequence_length = 32", "held-out text"]),
    "no cuDNN": (
        ["model.attention=cudnn", "model.compute_dtype=bfloat16"],
        ["model.attention = 'cudnn'", "needs a GPU", "Set auto"],
    ),
    "parameters rounded where replicas send changes": (
        ["model.parameter_dtype=bfloat16", "averaging.mode=outer"],
        ["model.parameter_dtype = 'bfloat16'", "rounded stochastically", "averaging.mode: exact"],
    ),
    "missing plan": (
        ["plan.case=null", "plan.file=plan.json"],
        ["plan = 'plan.json'", "No such file", "Check the path"],
    ),
    "nodes and stages": ([case_with(stages=[2, 3])], ["case.stages = [2, 3]", "case.nodes has 3"]),
    "hosts of nodes": (
        ["cluster.host_of_node=[0, 0]"],
        ["cluster.host_of_node = [0, 0]", "3 nodes", "List the host of each node"],
    ),
    "hosts that are not there": (
        ["cluster.host_of_node=[0, 1, 0]"],
        ["cluster.host_of_node", "assign the nodes to 1 hosts", "Start 2 hosts"],
    ),
    "folder below a file": (["run_dir=text/run"], ["run_dir = 'text/run'", "Name another folder"]),
    "folder that is a file": (["run_dir=text"], ["run_dir = 'text'", "Name another folder"]),
    "folder in that of the text": (
        ["data.path=."],
        ["run_dir = 'run'", "lies in .", "Name a folder outside of it"],
    ),
    "folder of no name": (
        ["run_dir=" + "a" * 300],
        ["run_dir = 'aaa", "name too long", "Name another folder"],
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused_before_anything_is_written(
    name: str, folder: Path, command: Command
):
    overrides, words = WRONG_VALUES[name]
    before = sorted(folder.rglob("*"))
    expect_one_error(command(*TRAIN, *given(*overrides)), *words)
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_shows_plan_and_memory_and_writes_nothing(folder: Path, command: Command):
    before = sorted(folder.rglob("*"))
    shown = command(*TRAIN, "--dry-run")
    assert (shown.code, shown.err) == (0, "")
    assert "width: 16" in shown.out
    assert "by the timing model" not in shown.out, "nobody has measured what the case says"
    assert "working" in shown.out
    assert sorted(folder.rglob("*")) == before


def test_a_log_level_leaves_lines_on_stderr_out(folder: Path, command: Command):
    words = (*TRAIN, "--dry-run", "--set", case_with(stage_bytes=1))
    told = command(*words, "--log-level", "warning")
    assert "warning: case.stage_bytes[0] = 1, " in told.err
    quiet = command(*words, "--log-level", "error")
    assert (quiet.out, quiet.err) == (told.out, "")
    refused = command("join", "nowhere", "--log-level", "error")
    expect_one_error(refused, "ADDRESS = 'nowhere'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", case_with(stages=[2, 3])], ["case.stages = [2, 3]"]),
        (["--hosts", "100"], ["--hosts = 100", "3 nodes"]),
        (["--set", "network.deadline_s=0.1s"], ["network.deadline_s = 0.1", "planned time"]),
        (["--resume"], ["run_dir = 'run'", "does not contain a run"]),
    ],
)
def test_a_dry_run_refuses_what_a_run_does(
    arguments: list[str], words: list[str], folder: Path, command: Command
):
    result = command(*TRAIN, "--dry-run", *arguments)
    assert result.code == 2
    [line] = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words)
    assert not (folder / "run").exists()


def test_a_dry_run_over_a_run_is_refused(run: Path, command: Command):
    assert command(*TRAIN, "--dry-run", "--resume").code == 0
    result = command(*TRAIN, "--dry-run")
    assert result.code == 2
    assert f"run_dir = '{run.name}': already contains a run" in result.err


def test_times_may_have_units(command: Command, folder: Path):
    times = given("cluster.grace_s=2min", "network.deadline_s=0.5h")
    shown = command("config", "show", "--config", "config.yaml", *times)
    config = yaml.safe_load(shown.out)
    assert (config["cluster"]["grace_s"], config["network"]["deadline_s"]) == (120, 1800)
    wrong = command("config", "show", "--config", "config.yaml", "--set", "cluster.grace_s=2 weeks")
    expect_one_error(wrong, "cluster.grace_s = '2 weeks'", "must be a time", "5min")


@pytest.mark.parametrize("words", [TRAIN, ("launch", "--config", "config.yaml", "--hosts", "2")])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, ["--config = 'config.yaml'", "No such file", "Check the path"]),
        ("- model\n- data\n", ["--config = 'config.yaml'", "is not a mapping"]),
    ],
)
def test_configurations_that_cannot_be_read_are_refused(
    words: Sequence[str], text: str | None, told: list[str], folder: Path, command: Command
):
    (folder / "config.yaml").unlink()
    if text is not None:
        (folder / "config.yaml").write_text(text)
    expect_one_error(command(*words), *told)
    assert not (folder / "run").exists()


# Each: arguments of --set, and words of the error.
WRONG_PARENTS: dict[str, tuple[list[str], list[str]]] = {
    "no folder": (
        ["init_from=run:nowhere"],
        ["init_from = 'nowhere'", "does not contain a run", "Name a run directory"],
    ),
    "configuration only": (
        ["init_from=run:."],
        ["init_from = 'run:.'", "checkpoint does not exist", "that has checkpoints"],
    ),
    "no such step": (
        ["init_from=run:run@7"],
        ["init_from = 'run:run@7'", "checkpoint does not exist", "Choose one of the steps [2, 3]"],
    ),
    "damaged step": (
        ["init_from=run:run@3"],
        ["init_from = 'run:run@3'", "the commit record lists", "step 2"],
    ),
    "itself": (
        ["run_dir=run/../run"],
        ["init_from = 'run:run'", "is the run itself", "--set run_dir="],
    ),
    "another width": (
        ["model.width=32"],
        ["model.width = 32", "must be 16, as in run/config.yaml", "shapes come from that file"],
    ),
}


@pytest.mark.parametrize("name", WRONG_PARENTS)
def test_wrong_parents_are_refused_before_anything_is_written(
    name: str, run: Path, folder: Path, command: Command
):
    overrides, words = WRONG_PARENTS[name]
    if name == "damaged step":
        files = filter(Path.is_file, (run / "checkpoints/00000003/stage_1").rglob("*"))
        max(files, key=os.path.getsize).write_bytes(b"other")
    before = sorted(folder.rglob("*"))
    result = command(*TRAIN, *given("run_dir=child", "init_from=run:run", *overrides))
    expect_one_error(result, *words)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("microbatches", [[0, 9], [1, 2]], ["plan.microbatches[0][1] = 9", "at most 2"]),
        ("order", [], ["plan.order", "Add"]),
    ],
)
def test_plans_that_mean_nothing_are_refused(
    key: str, value: Any, words: list[str], folder: Path, command: Command
):
    plan = make_plan(parse_case(CASE), "balanced").to_json() | {key: value}
    (folder / "plan.json").write_text(json.dumps(plan))
    expect_one_error(command(*TRAIN, *BY_FILE), *words)
    assert not (folder / "run").exists()


# The place of a host may come from the environment too.
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("--coordinator nowhere", "--coordinator"),
        ("--coordinator host:port --hosts 2 --host-id 0", "host:port"),
        ("--coordinator 127.0.0.1:1 --hosts 2", "--host-id"),
        ("--coordinator 127.0.0.1:1 --hosts 2 --host-id 2", "--host-id = 2"),
        ("--coordinator 127.0.0.1:1 --hosts 0 --host-id 0", "--hosts = 0"),
        ("--hosts 2", "--coordinator"),
        ({"HOSTS": "2"}, "is required with --hosts"),
        ({"COORDINATOR": "127.0.0.1:1", "HOSTS": "2", "HOST_ID": "2"}, "--host-id = 2"),
        ({"HOSTS": "two"}, "SKIPPIPE_HOSTS = 'two': must be a whole number"),
    ],
)
def test_hosts_that_make_no_cluster_are_refused(
    place: str | dict[str, str], words: str, folder: Path, command: Command, monkeypatch: Any
):
    for name, value in {} if isinstance(place, str) else place.items():
        monkeypatch.setenv(f"SKIPPIPE_{name}", value)
    arguments = place.split() if isinstance(place, str) else []
    expect_one_error(command(*TRAIN, *arguments), words)
    assert not (folder / "run").exists()


ON_TWO_HOSTS = given("cluster.host_of_node=[0, 1, 0]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "0"], ["--hosts = 0", "at least 1"]),
        (["--hosts", "2", "--kill-after", "-1"], ["--kill-after = -1", "at least 0"]),
        (["--hosts", "2", "--set", "train.stepz=3"], ["train.stepz = 3", "unknown key"]),
        (["--hosts", "100"], ["--hosts = 100", "3 nodes", "Start 3 hosts or fewer"]),
        (["--hosts", "4", *BY_FILE], ["--hosts = 4", "3 nodes"]),
        (["--hosts", "3", *ON_TWO_HOSTS], ["cluster.host_of_node", "Start 2 hosts"]),
        (["--hosts", "3", "--set", "plan=auto", *ON_TWO_HOSTS], ["cluster.host_of_node"]),
        (["--hosts", "2", "--set", "plan.case=none.yaml"], ["case = 'none.yaml'", "No such file"]),
    ],
)
def test_launcher_says_what_is_wrong_once(
    arguments: list[str],
    words: list[str],
    folder: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
):
    """Before it starts a host."""
    monkeypatch.setattr(hosts.LocalHosts, "run", lambda _: pytest.fail("hosts are started"))
    make_plan(parse_case(CASE), "balanced").save(folder / "plan.json")
    expect_one_error(command("launch", "--config", "config.yaml", *arguments), *words)
