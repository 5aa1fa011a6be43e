"""The commands as a user meets them: what they print, refuse and leave behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from skippipe_sched.errors import InputError
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case

from skippipe_jax import evaluate, launch, train
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import load_config
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import saved_steps
from skippipe_jax.training import progress, trainer

CASE: dict[str, Any] = {
    "nodes": 3,
    "locations": ["here"],
    "links": [],
    "activation_bytes": 4096,
    "stage_bytes": 8192,
    "forward_s": 0.1,
    "stages": [2, 1],
    "path_length": 2,
    "microbatches_per_data_node": 1,
    "memory": 2,
}
CONFIG: dict[str, Any] = {
    "run_dir": "run",
    "compilation_cache": None,
    "model": {
        "width": 16,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "ffn_width": 24,
        "context": 32,
    },
    "plan": {"case": CASE, "method": "balanced"},
    "data": {
        "source": "text",
        "path": "text",
        "sequence_length": 32,
        "microbatch_size": 2,
        "held_out": 0.2,
    },
    "train": {"steps": 3},
    "checkpoint": {"every": 2, "keep": 2},
}


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a configuration that can be trained."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


def write_inputs(folder: Path) -> None:
    words = ["stage", "node", "path", "plan", "microbatch", "host"]
    (folder / "text").write_text(" ".join(words[n * n % 7 % 6] for n in range(1500)))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: its `main` with these arguments."""

    def run(module: Any, *arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
        capfd.readouterr()
        try:
            code = module.main()
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        printed = capfd.readouterr()
        return Result(code, printed.out, printed.err)

    return run


def expect_one_error(result: Result, *words: str) -> None:
    """One line that names field and value, says what is wrong, and what to do."""
    assert result.code == 2
    [line] = [line for line in result.err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert line.endswith(".")
    assert " = " in line
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run has been trained to its end; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    with contextlib.chdir(folder):
        config = load_config(Path("config.yaml"))
        alone = Membership(config.cluster, index=0, count=1)
        trainer.train(config, alone, resume=False, config_folder=folder)
    return folder


@pytest.fixture
def run(trained: Path, folder: Path) -> Path:
    """A copy of the trained run, in the current directory."""
    shutil.copytree(trained / "run", folder / "run")
    return folder / "run"


def case_with(**changes: Any) -> str:
    return f"plan.case={json.dumps(CASE | changes)}"


# Each: arguments of --set, and words of the error: the field, the value, the remedy.
WRONG_VALUES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["model.depth=3"], ["model.depth = 3", "unknown key", "use one of: "]),
    "unknown section": (["modle.layers=3"], ["config.modle", "unknown key", "model"]),
    "text for a number": (["train.steps=many"], ["train.steps = 'many'", "whole number"]),
    "fraction": (["train.steps=2.5"], ["train.steps = 2.5", "whole number"]),
    "no equals sign": (["train.steps"], ["--set = 'train.steps'", "Write --set"]),
    "override of no mapping": (["run_dir.sub=3"], ["run_dir holds no keys"]),
    "no steps": (["train.steps=0"], ["train.steps = 0", "at least 1"]),
    "negative learning rate": (
        ["optimizer.learning_rate=-1e-3"],
        ["optimizer.learning_rate = -0.001", "at least 0"],
    ),
    "no checkpoint interval": (["checkpoint.every=0"], ["checkpoint.every = 0", "Write 1"]),
    "no checkpoints kept": (["checkpoint.keep=0"], ["checkpoint.keep = 0", "Write 1"]),
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
        ["model.attention = 'cudnn'", "needs a GPU", "Write xla"],
    ),
    "no plan": (["plan.case=null"], ["plan.case = None", "Give plan.case or plan.file"]),
    "two plans": (["plan.file=plan.json"], ["plan.file = 'plan.json'", "Remove one"]),
    "unknown method": (["plan.method=best"], ["plan.method = 'best'", "Use one of: "]),
    "missing plan": (
        ["plan.case=null", "plan.file=plan.json"],
        ["plan = 'plan.json'", "No such file", "Check the path"],
    ),
    "missing case": (["plan.case=case.yaml"], ["case = 'case.yaml'", "No such file"]),
    "long paths": ([case_with(path_length=3)], ["case.path_length = 3", "only 2 stages"]),
    "no memory": ([case_with(memory=0)], ["case.memory = 0", "at least 1"]),
    "nodes and stages": ([case_with(stages=[2, 3])], ["case.stages = [2, 3]", "3 nodes"]),
    "unknown link table": ([case_with(links="gcp13")], ["case.links = 'gcp13'"]),
    "unknown location": (
        [case_with(links="gcp12", locations=["Atlantis", "Iowa"])],
        ["case.links = 'Atlantis to Iowa'", "Add a row"],
    ),
    "hosts of nodes": (
        ["cluster.host_of_node=[0, 0]"],
        ["cluster.host_of_node = [0, 0]", "3 nodes", "Give the host of each node"],
    ),
    "hosts that are not there": (
        ["cluster.host_of_node=[0, 1, 0]"],
        ["cluster.host_of_node", "1 hosts", "Start 2 hosts"],
    ),
    "folder below a file": (["run_dir=text/run"], ["run_dir = 'text/run'", "Give another folder"]),
    "folder that is a file": (["run_dir=text"], ["run_dir = 'text'", "Give another folder"]),
    "folder of no name": (
        ["run_dir=" + "a" * 300],
        ["run_dir = 'aaa", "name too long", "Give another folder"],
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused_before_anything_is_written(
    name: str, folder: Path, command: Command
):
    overrides, words = WRONG_VALUES[name]
    before = sorted(folder.rglob("*"))
    result = command(
        train, "--config", "config.yaml", *(word for text in overrides for word in ("--set", text))
    )
    expect_one_error(result, *words)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("module", [train, launch])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["--config = 'config.yaml'", "No such file", "Check the path"]),
        ("model: {layers: 2", ["--config = 'config.yaml'", "not valid YAML at line 1"]),
        ("- model\n- data\n", ["--config = 'config.yaml'", "is not a mapping"]),
        ("seed: 1\ntrain: {steps: 3}\nseed: 2\n", ["line 3", "'seed' is given twice"]),
        ("train: {steps: x}\n", ["train.steps = 'x'"]),
        ("train:\n\tsteps: 3\n", ["not valid YAML at line 2"]),
    ],
)
def test_configurations_that_cannot_be_read_are_refused(
    module: Any, text: str | None, words: list[str], folder: Path, command: Command
):
    (folder / "config.yaml").unlink()
    if text is not None:
        (folder / "config.yaml").write_text(text)
    hosts = ["--hosts", "2"] if module is launch else []
    expect_one_error(command(module, "--config", "config.yaml", *hosts), *words)
    assert not (folder / "run").exists()


def damaged_plan(damage: Callable[[dict[str, Any]], Any]) -> str:
    plan = make_plan(parse_case(CASE), "balanced").to_json()
    damage(plan)
    return json.dumps(plan)


def put(*places: Any) -> Callable[[Any], None]:
    """Sets the entry at all but the last of `places` to the last."""
    *parents, key, value = places

    def damage(plan: Any) -> None:
        for parent in parents:
            plan = plan[parent]
        plan[key] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (put("microbatches", 0, [0, 2, 1]), ["plan.microbatches[0][2] = 1", "stage 0 twice"]),
        (put("microbatches", 0, [0, 9]), ["plan.microbatches[0][1] = 9", "at most 2"]),
        (put("microbatches", 0, [2, 0]), ["plan.microbatches[0][0] = 2", "begins at a data node"]),
        (put("stages", [[0, 1], [3]]), ["plan.stages[1][0] = 3", "at most 2"]),
        (put("stages", [[0, 1], [2, 2]]), ["plan.stages[1][1] = 2", "already"]),
        (put("order", 0, []), ["plan.order[0]", "lacks the"]),
        (put("case", "memory", 0), ["case.memory = 0"]),
        (put("format", "csv"), ["plan.format = 'csv'"]),
        (put("version", 2), ["plan.version = 2"]),
        (put("speed", 3), ["plan.speed = 3", "unknown key"]),
        (lambda plan: plan.pop("order"), ["plan.order", "is missing"]),
        (lambda plan: plan["order"][2].reverse(), ["plan.order"]),
    ],
)
def test_plans_that_mean_nothing_are_refused(
    damage: Callable[[Any], Any], words: list[str], folder: Path, command: Command
):
    (folder / "plan.json").write_text(damaged_plan(damage))
    result = command(
        train, "--config", "config.yaml", "--set", "plan.case=null", "--set", "plan.file=plan.json"
    )
    expect_one_error(result, *words)
    assert not (folder / "run").exists()


def test_a_plan_file_that_is_no_json_is_refused(folder: Path, command: Command):
    (folder / "plan.json").write_text('{"format": ')
    result = command(
        train, "--config", "config.yaml", "--set", "plan.case=null", "--set", "plan.file=plan.json"
    )
    expect_one_error(result, "plan = 'plan.json'", "not valid JSON")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--coordinator", "nowhere"], ["--coordinator"]),
        (["--coordinator", "host:port", "--hosts", "2", "--host-id", "0"], ["host:port"]),
        (["--coordinator", "127.0.0.1:1", "--hosts", "2"], ["--host-id"]),
        (["--coordinator", "127.0.0.1:1", "--hosts", "2", "--host-id", "2"], ["--host-id = 2"]),
        (["--coordinator", "127.0.0.1:1", "--hosts", "0", "--host-id", "0"], ["--hosts = 0"]),
        (["--hosts", "2"], ["--coordinator"]),
    ],
)
def test_hosts_that_make_no_cluster_are_refused(
    arguments: list[str], words: list[str], folder: Path, command: Command
):
    expect_one_error(command(train, "--config", "config.yaml", *arguments), *words)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "0"], ["--hosts = 0", "at least 1"]),
        (["--hosts", "2", "--grace", "-1"], ["--grace = -1", "at least 0"]),
        (["--hosts", "2", "--set", "train.stepz=3"], ["train.stepz = 3", "unknown key"]),
    ],
)
def test_launcher_says_what_is_wrong_once(
    arguments: list[str], words: list[str], folder: Path, command: Command
):
    expect_one_error(command(launch, "--config", "config.yaml", *arguments), *words)


@pytest.mark.parametrize("module", [train, evaluate, launch])
def test_help_explains_the_command(module: Any, command: Command):
    result = command(module, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"python -m {module.__name__}" in result.out
    wanted = {
        train: ["--config", "YAML", "--set KEY.SUB=VALUE", "--resume", "exit codes", "75"],
        evaluate: ["--run", "folder of a run", "--step", "--json", "perplexity"],
        launch: ["--config", "YAML", "--hosts N", "--grace", "machine"],
    }
    for words in wanted[module]:
        assert words in result.out


@pytest.mark.parametrize("module", [train, evaluate, launch])
def test_unknown_arguments_are_refused(module: Any, command: Command):
    result = command(module, "--config", "config.yaml", "--run", "run", "--fast")
    assert result.code == 2
    assert "usage: " in result.err
    assert "Traceback" not in result.err


def test_a_corrected_start_needs_no_resume(folder: Path, command: Command):
    """A refused start leaves nothing; a start over a run is refused and leaves that run alone."""
    wrong = command(train, "--config", "config.yaml", "--set", "data.path=nowhere")
    expect_one_error(wrong, "data.path")
    assert command(train, "--config", "config.yaml", "--set", "train.steps=1").code == 0
    files = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    again = command(train, "--config", "config.yaml")
    expect_one_error(again, "run_dir = 'run'", "holds a run already", "--resume")
    assert files == {p: p.read_bytes() for p in (folder / "run").rglob("*") if p.is_file()}


def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback():
    command = [sys.executable, "-X", "importtime", "-m", "skippipe_jax.report", "--help"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # The package itself is imported then, and what the command needs is not.
        said = list(
            itertools.takewhile(
                lambda line: line.split("|")[-1].strip() != "skippipe_jax", process.stderr
            )
        )
        process.send_signal(signal.SIGINT)
        said += process.stderr
        assert process.wait() == -signal.SIGINT
    assert not any("Traceback" in line for line in said)


def test_an_interrupt_while_the_search_is_compiled_ends_training(folder: Path):
    """numba calls back from C, where a KeyboardInterrupt would be lost."""
    command = [sys.executable, "-m", "skippipe_jax.train", "--config", "config.yaml"]
    command += ["--set", "plan.method=joint", "--set", "plan.budget_s=1000"]
    uncompiled = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(
        command, env=uncompiled, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        said = list(itertools.takewhile(lambda line: "compiling" not in line, process.stderr))
        process.send_signal(signal.SIGINT)
        said += process.stderr
        assert process.wait() == -signal.SIGINT
    assert [line.split()[0] for line in said] == ["planning"]
    assert not (folder / "run").exists()


def test_training_tells_how_far_compiling_is(monkeypatch: pytest.MonkeyPatch):
    said = []
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.CompilationCounter(said.append):
        jax.jit(lambda x: x - 17)(1.5)
    assert said[-1].startswith(f"compiling: {len(said)} programs so far")


def test_training_tells_how_to_go_on(folder: Path, command: Command):
    result = command(train, "--config", "config.yaml")
    assert result.code == 0
    # The whole configuration, defaults too, as a file that could be given again.
    shown, _, last = result.out.rstrip().rpartition("\n")
    assert yaml.safe_load(shown)["optimizer"]["beta2"] == 0.999
    assert "python -m skippipe_jax.evaluate --run run" in last
    assert saved_steps(folder / "run") == [2, 3]
    lines = run_folder.read_metrics(folder / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["tokens"] == 2 * 2 * 32 for line in lines)


def test_resuming_a_run_that_is_over_changes_nothing(run: Path, command: Command):
    metrics = (run / "metrics.jsonl").read_bytes()
    for steps in ("3", "2"):
        result = command(
            train, "--config", "config.yaml", "--resume", "--set", f"train.steps={steps}"
        )
        assert (result.code, result.err) == (0, "")
        assert "trained to step 3" in result.out
        assert f"the run is at step 3 of {steps}" in result.out
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert saved_steps(run) == [2, 3]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(folder: Path, command: Command):
    result = command(
        train,
        "--config",
        "config.yaml",
        *("--set", "optimizer.learning_rate=1e38"),
        *("--set", "optimizer.warmup_steps=0"),
        *("--set", "checkpoint.every=1"),
        *("--set", "train.steps=9"),
    )
    assert result.code == 2
    assert "Traceback" not in result.err
    [line] = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "optimizer.learning_rate = 1e+38: the loss of step" in line
    assert "Resume from the last checkpoint with a lower rate" in line
    reported = run_folder.read_metrics(folder / "run")
    assert saved_steps(folder / "run")[-1] == reported[-1]["step"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.ffn_width=32"], ["model.ffn_width = 32", "has 24", "Set model.ffn_width=24"]),
        (["seed=1"], ["seed = 1", "Set seed=0"]),
        (["data.held_out=0.1"], ["data.held_out = 0.1", "another run_dir"]),
        (["run_dir=elsewhere"], ["run_dir = 'elsewhere'", "no config.yaml"]),
    ],
)
def test_a_run_cannot_be_resumed_as_another(
    overrides: list[str], words: list[str], run: Path, command: Command
):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = command(
        train,
        *("--config", "config.yaml", "--resume"),
        *(word for text in overrides for word in ("--set", text)),
    )
    expect_one_error(result, *words)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_text_that_has_changed_is_refused(run: Path, command: Command):
    Path("text").write_text(Path("text").read_text().replace("stage", "steps"))
    result = command(train, "--config", "config.yaml", "--resume", "--set", "train.steps=5")
    expect_one_error(result, "data_state.fingerprint", "other data")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest_file(folder: Path) -> Path:
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated stage": lambda step: truncate(largest_file(step / "stage_1")),
    "missing stage": lambda step: shutil.rmtree(step / "stage_0"),
    "truncated record": lambda step: truncate(step / "COMMITTED"),
    "truncated config": lambda step: truncate(step.parents[1] / "config.yaml"),
    "empty config": lambda step: (step.parents[1] / "config.yaml").write_text(""),
    "config of a list": lambda step: (step.parents[1] / "config.yaml").write_text("- model"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("module", [train, evaluate])
def test_a_damaged_run_is_refused(name: str, module: Any, run: Path, command: Command):
    DAMAGES[name](run / "checkpoints" / "00000003")
    arguments = {
        train: ["--config", "config.yaml", "--resume", "--set", "train.steps=5"],
        evaluate: ["--run", "run"],
    }
    result = command(module, *arguments[module])
    expect_one_error(result, *["run/config.yaml"] * ("config" in name))
    assert [line["step"] for line in run_folder.read_metrics(run)] == [1, 2, 3]


def test_a_cache_that_cannot_be_used_costs_time_only(run: Path, command: Command):
    result = command(
        *(train, "--config", "config.yaml", "--resume", "--set", "compilation_cache=text")
    )
    assert result.code == 0
    assert result.err.startswith("warning: compilation_cache = 'text': cannot be used: File exists")
    assert result.err.count("\n") == 1


def test_two_trainings_do_not_write_one_folder(run: Path, command: Command):
    words = "another training is writing it", "give another folder"
    resumed = "--config", "config.yaml", "--resume", "--set", "train.steps=4"
    new = "--config", "config.yaml", "--set", "run_dir=new"
    with run_folder.Hold(run) as hold, run_folder.Hold(Path("new")) as other:
        hold.take()
        other.take()
        expect_one_error(command(train, *resumed), "run_dir = 'run'", *words)
        expect_one_error(command(train, *new), "run_dir = 'new'", *words)
    assert command(train, *resumed).code == 0
    assert command(train, *new).code == 0


@pytest.mark.parametrize("line", ["garbage", "[1]", "{}", '{"step": "two"}'])
def test_a_damaged_line_of_the_metrics_is_named(line: str, run: Path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], line, lines[2]]))
    with pytest.raises(InputError, match=r"run/metrics.jsonl, line 2 = .*Remove this line"):
        run_folder.read_metrics(run)


def test_a_damaged_position_in_the_text_is_refused(run: Path, command: Command):
    truncate(run / "checkpoints" / "00000003" / "data.json")
    result = command(train, "--config", "config.yaml", "--resume", "--set", "train.steps=5")
    expect_one_error(
        result, "data.json", "was committed as", "to go on from the checkpoint before: 00000002"
    )


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
def test_a_missing_file_of_a_run_is_named(name: str, run: Path, command: Command):
    (run / name).unlink()
    result = command(train, "--config", "config.yaml", "--resume", "--set", "train.steps=5")
    expect_one_error(result, f"run/{name}", "No such file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "nowhere"], ["--run = 'nowhere'", "no config.yaml", "folder of a run"]),
        (["--run", "text"], ["--run = 'text'", "holds no run"]),
        (["--run", "a" * 300], ["--run = 'aaa", "holds no run"]),
        (["--run", "run", "--step", "1"], ["checkpoints = 1", "one of the steps [2, 3]"]),
        (["--run", "run", "--step", "-1"], ["checkpoints = -1"]),
        (["--run", "run", "--sequences", "0"], ["--sequences = 0", "at least 1"]),
        (["--run", "run", "--keep", "1", "--plot", "folder.svg"], ["--plot = ", "is a folder"]),
        (["--run", "run", "--keep", "1", "--plot", "a.pdf"], ["--plot = 'a.pdf'", "no name of"]),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    arguments: list[str], words: list[str], run: Path, command: Command
):
    Path("folder.svg").mkdir()
    expect_one_error(command(evaluate, *arguments), *words)


def test_a_run_without_a_checkpoint_cannot_be_evaluated(run: Path, command: Command):
    shutil.rmtree(run / "checkpoints")
    expect_one_error(command(evaluate, "--run", "run"), "no such checkpoint", "has saved one")
