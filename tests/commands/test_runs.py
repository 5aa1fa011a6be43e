"""Runs as commands leave and find them: resumed, damaged, over, evaluated."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from jax.experimental.compilation_cache import compilation_cache
from skippipe_sched.errors import TEMPORARY_EXIT_CODE

from skippipe_jax import Run, log
from skippipe_jax.config import load_config, parse_config
from skippipe_jax.storage import files
from skippipe_jax.storage.checkpoint import committed_steps
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training import metrics
from tests.commands.examples import CASE, TRAIN, Command, expect_one_error, given

RESUMED = (*TRAIN, "--resume", *given("train.steps=5"))


def test_training_tells_how_far_compiling_is(monkeypatch: pytest.MonkeyPatch):
    said = []
    monkeypatch.setattr(log, "SECONDS_BETWEEN_LINES", 0.0)
    with metrics.CompilationCounter(said.append):
        jax.jit(lambda x: x - 17)(1.5)
    programs = "programs" if len(said) > 1 else "program"
    assert said[-1].startswith(f"compiling: {len(said)} {programs} so far")


def test_training_tells_how_to_go_on(folder: Path, command: Command):
    result = command(*TRAIN)
    assert result.code == 0
    # What differs from the defaults, as a file that could be given again.
    *shown_lines, of_text, last, of_page = result.out.splitlines()
    shown = "\n".join(shown_lines)
    assert parse_config(yaml.safe_load(shown)) == load_config(Path("config.yaml"))
    assert "cluster" not in shown
    assert of_text.startswith("the text has ")
    assert yaml.safe_load(Path("run/config.yaml").read_text())["optimizer"]["beta2"] == 0.95
    assert "skippipe evaluate --run run" in last
    assert of_page == "report with curves and timelines: run/report.html"
    assert committed_steps(folder / "run") == [2, 3]
    lines = Run(folder / "run").metrics
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["tokens"] == 2 * 2 * 32 for line in lines)


def test_a_plan_for_other_sizes_is_warned_of(folder: Path, command: Command):
    """Both numbers, the key and what to do, also where a run goes on."""
    case = given(f"plan.case={json.dumps(CASE | {'activation_bytes': 1})}", "train.steps=1")
    for more in ((), ("--resume",)):
        result = command(*TRAIN, *more, *case)
        assert result.code == 0
        [line] = [line for line in result.err.splitlines() if line.startswith("warning: ")]
        assert "case.activation_bytes = 1, but the configuration gives 4096: " in line
        assert line.endswith("set it to auto")


def test_resuming_a_run_that_is_over_changes_nothing(run: Path, command: Command):
    metrics = (run / "metrics.jsonl").read_bytes()
    for steps in ("3", "2"):
        result = command(*TRAIN, "--resume", *given(f"train.steps={steps}"))
        # A slow machine says how far compiling is.
        told = [line for line in result.err.splitlines() if not line.startswith("compiling: ")]
        assert (result.code, told) == (0, [])
        assert "finished 3 steps" in result.out
        assert f"already finished: step 3 of {steps}" in result.out
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert committed_steps(run) == [2, 3]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(folder: Path, command: Command):
    explosive = given("optimizer.learning_rate=1e38", "optimizer.warmup_steps=0")
    result = command(*TRAIN, *explosive, *given("checkpoint.every=1", "train.steps=9"))
    assert result.code == 2
    assert "Traceback" not in result.err
    [line] = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "optimizer.learning_rate = 1e+38: step " in line
    assert "Resume from the last checkpoint with a lower learning_rate" in line
    reported = Run(folder / "run").metrics
    assert committed_steps(folder / "run")[-1] == reported[-1]["step"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.ffn_width=32"], ["model.ffn_width = 32", "must be 24", "Set model.ffn_width=24"]),
        (
            ["run_dir=elsewhere"],
            ["run_dir = 'elsewhere'", "does not contain a run", "elsewhere/config.yaml"],
        ),
    ],
)
def test_a_run_cannot_be_resumed_as_another(
    overrides: list[str], words: list[str], run: Path, command: Command
):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    expect_one_error(command(*TRAIN, "--resume", *given(*overrides)), *words)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert not Path("elsewhere").exists()


def test_a_text_that_has_changed_is_refused(run: Path, command: Command):
    Path("text").write_text(Path("text").read_text().replace("stage", "steps"))
    expect_one_error(command(*RESUMED), "data_state.fingerprint", "other data")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest_file(folder: Path) -> Path:
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


DAMAGES: dict[str, Callable[[Path], object]] = {
    # Within the name of a section: between two keys, what is left would be a configuration.
    "truncated config": lambda path: path.write_text(path.read_text().partition("data:")[0] + "da"),
    "config of a list": lambda path: path.write_text("- model"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("command_name", ["train", "evaluate"])
def test_a_damaged_run_is_refused(name: str, command_name: str, run: Path, command: Command):
    DAMAGES[name](run / "config.yaml")
    result = command(*(RESUMED if command_name == "train" else ("evaluate", "--run", "run")))
    expect_one_error(result, "run/config.yaml")
    assert [line.step for line in RunDir(run).metrics()] == [1, 2, 3]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run: Path, command: Command):
    damaged = largest_file(run / "checkpoints" / "00000003" / "stage_1")
    truncate(damaged)
    result = command("evaluate", "--run", "run")
    assert result.code == 0
    assert f"warning: {damaged.absolute()} = " in result.err
    named = command("evaluate", "--run", "run", "--step", "3")
    expect_one_error(named, str(damaged), "commit record lists", "the previous checkpoint: step 2")
    result = command(*RESUMED)
    assert result.code == 0
    assert f"warning: {damaged.absolute()} = " in result.err
    assert "The run continues from step 2." in result.err
    assert [line["step"] for line in Run(run).metrics] == [1, 2, 3, 4, 5]
    assert committed_steps(run) == [4, 5]


def test_a_cache_that_cannot_be_used_costs_time_only(run: Path, command: Command):
    result = command(*TRAIN, "--resume", *given("compilation_cache=text"))
    assert result.code == 0
    assert result.err.startswith("warning: compilation_cache = 'text': cannot be used: File exists")
    assert result.err.count("\n") == 1


def test_two_trainings_do_not_write_one_folder(run: Path, command: Command):
    words = "another training run is writing to it", "set another folder"
    resumed, new = (*TRAIN, "--resume", *given("train.steps=4")), (*TRAIN, *given("run_dir=new"))
    with RunLock(run) as lock, RunLock(Path("new")) as other:
        lock.acquire()
        other.acquire()
        # The other may be at its end, or stopped and killed later.
        again = TEMPORARY_EXIT_CODE
        expect_one_error(command(*resumed), "run_dir = 'run'", *words, code=again)
        expect_one_error(command(*new), "run_dir = 'new'", *words, code=again)

    assert command(*resumed).code == 0


def test_a_disk_that_is_full_may_have_room_later(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """Whatever file of a run it is that does not fit: here what no other message is for."""

    def full(run: RunDir, _: Mapping[str, Any] | None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.path / "best.json"))

    monkeypatch.setattr(files, "RETRY_PAUSES_S", (0.0,))
    monkeypatch.setattr(RunDir, "write_best", full)
    result = command(*RESUMED, *given("validation.every=1"))
    assert result.code == TEMPORARY_EXIT_CODE
    line = "error: run_dir = 'run': cannot be used: No space left on device (run/best.json). Fix"
    assert result.err.splitlines()[-1].startswith(line)
    assert "Traceback" not in result.err


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
def test_a_missing_file_of_a_run_is_named(name: str, run: Path, command: Command):
    (run / name).unlink()
    expect_one_error(command(*RESUMED), f"run/{name}", "No such file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--run", "nowhere"],
            ["--run = 'nowhere'", "/nowhere/config.yaml", "does not contain a run"],
        ),
        (["--run", "run", "--step", "1"], ["checkpoints = 1", "one of the steps [2, 3]"]),
        (["--run", "run", "--step", "last"], ["--step = 'last'", 'Write a number, or "best"']),
        (["--run", "run", "--step", "best"], ["--step = 'best'", "never computed"]),
        (["--run", "run", "--sequences", "0"], ["--sequences = 0", "at least 1"]),
        (
            ["--run", "run", "--keep-fraction", "1", "--plot", "folder.svg"],
            ["--plot = ", "is a folder"],
        ),
        (
            ["--run", "run", "--keep-fraction", "1", "--plot", "a.pdf"],
            ["--plot = 'a.pdf'", "Give a picture the ending .svg"],
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    arguments: list[str], words: list[str], run: Path, command: Command
):
    Path("folder.svg").mkdir()
    expect_one_error(command("evaluate", *arguments), *words)


def test_the_best_checkpoint_is_told_of_and_evaluated_by_its_name(run: Path, command: Command):
    result = command(*RESUMED, *given("validation.every=1"))
    best = json.loads((run / "best.json").read_text())
    told = f"step {best['step']}, validation loss {best['validation_loss']:.4f}"
    assert f"best checkpoint (--step best): {told}\n" in result.out
    evaluated = command("evaluate", "--run", "run", "--step", "best")
    assert evaluated.out.startswith(f"step {best['step']}: "), evaluated.out
    written = command("convert", "to-hf", "--run", "run", "-o", "model", "--step", "best")
    assert f"exported step {best['step']} of run to model" in written.out


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing is compiled yet, in this process or in its cache; afterwards all is as it was."""
    name = "jax_compilation_cache_dir"
    before = getattr(jax.config, name)
    jax.clear_caches()
    compilation_cache.reset_cache()
    yield
    jax.config.update(name, before)
    compilation_cache.reset_cache()


def test_a_model_that_is_used_keeps_its_programs(run: Path, command: Command, forgotten: None):
    """The last test of this file, as those before it share what is compiled."""
    assert command("evaluate", "--run", "run", "--set", "compilation_cache=kept").code == 0
    assert any(path.name.startswith("jit_") for path in Path("kept").iterdir())
