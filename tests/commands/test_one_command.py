"""All commands under one name: what they say of themselves, how they load, how they end."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import pytest
from skippipe_sched import commands as planner
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case

from skippipe_jax.cli import main as skippipe
from tests.commands.examples import CASE, Command

OWN = skippipe.COMMANDS.keys() - planner.COMMANDS.keys() - {"completion"}
# What takes seconds to load, and what no command loads that computes nothing.
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "numba"}
# Modules that compute nothing, and what they may not load beside that. One process loads them one
# after the other.
LIGHT = {
    # Until a configuration is read.
    "skippipe_jax.config": {"scipy", "numpy", "jaxtyping", "yaml"},
    "skippipe_jax.storage.checkpoint": {"scipy", "numpy", "fsspec"},
    "skippipe_jax.connections.addresses": {"scipy", "fsspec"},
    "skippipe_jax.program": {"scipy", "fsspec"},
    "skippipe_jax.storage.run_dir": {"fsspec"},
    "skippipe_jax.program.compiler": {"fsspec"},
    "skippipe_jax.program.schedule": {"fsspec"},
}
IMPORTS = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(*sys.modules)
"""
# Runs the commands of its arguments, which + separates, and says which packages were loaded.
IN_TURN = """
import contextlib, itertools, sys
from skippipe_jax.cli.main import main
for plus, group in itertools.groupby(sys.argv[1:], lambda word: word == "+"):
    if not plus:
        with contextlib.suppress(SystemExit):
            main([*group])
print(*sys.modules)
"""


def printed(program: str, *words: str) -> list[str]:
    """The lines that a new process prints."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


def loaded(*words: str) -> set[str]:
    """The modules that a new process has loaded after these commands."""
    return set(printed(IN_TURN, *words)[-1].split())


def test_modules_that_compute_nothing_are_light():
    for (module, others), modules in zip(LIGHT.items(), printed(IMPORTS, *LIGHT), strict=True):
        assert not {*modules.split()} & (HEAVY | others), module


def test_commands_that_compute_nothing_are_light(folder: Path):
    (folder / "wrong.yaml").write_text("trian: {steps: 3}")
    helps = [[name, "--help", "+"] for name in skippipe.COMMANDS]
    wrong = ["launch", "--config", "config.yaml", "--hosts", "2", "--set", "train.stepz=3", "+"]
    wrong += ["train", "--config", "wrong.yaml", "+"]
    shown = ["config", "show", "--config", "config.yaml"]
    found = loaded("--help", "+", *itertools.chain(*helps), *wrong, *shown)
    assert not found & (HEAVY | {"scipy"})
    assert "yaml" in found  # It did run.


@pytest.mark.parametrize(
    ("former", "words"),
    [
        ("evaluate --hf a --stages 3 --keep 1", "evaluate --hf a --num-stages 3 --keep-fraction 1"),
        ("evaluate --hf a --cut 3", "evaluate --hf a --num-stages 3"),
        (
            "generate --run a --prompt b --tokens 3 --stages 0,1",
            "generate --run a --prompt b --max-new-tokens 3 --stage-order 0,1",
        ),
        ("harness --run a --tasks b --keep 0.5", "lm-eval --run a --tasks b --keep-fraction 0.5"),
        ("convert from-hf a -o b --cut 3", "convert from-hf a -o b --num-stages 3"),
        ("tokenize a -o b --processes 3", "tokenize a -o b --num-workers 3"),
        (
            "launch --config a --hosts 2 --respawn --grace 3",
            "launch --config a --hosts 2 --restart=resume --kill-after 3",
        ),
        (
            "launch --config a --hosts 2 --respawn=join",
            "launch --config a --hosts 2 --restart join",
        ),
        ("train --config a --num-hosts 2", "train --config a --hosts 2"),
        ("config --print a", "config show --config a"),
    ],
)
def test_former_options_are_understood_but_not_listed(
    former: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    def parsed(words: str) -> dict[str, Any]:
        monkeypatch.setattr(skippipe, "run_command", lambda command, _: seen.append(command))
        seen: list[Any] = []
        skippipe.main(words.split())
        [arguments] = [cell.cell_contents for cell in seen[0].__closure__]
        return vars(arguments)

    assert parsed(former) == parsed(words)
    name, *options = former.split()
    name = skippipe.FORMER_NAMES.get(name, name)
    help_text = skippipe.parser([name]).format_help()
    for word in options:
        if word.startswith("--") and word not in words.split():
            assert word not in help_text.split()


def test_paths_that_were_positional_arguments_still_may_be(command: Command, tmp_path: Path):
    for words in (("report",), ("convert", "to-hf", "-o", "b"), ("experts", "probe")):
        option = "--config" if words[0] == "experts" else "--run"
        without = command(*words)
        assert without.err.startswith(f"error: {option} = None: one path is required.")
        nowhere = str(tmp_path / "nowhere")
        assert command(*words, nowhere) == command(*words, option, nowhere)
        assert command(*words, nowhere, option, nowhere).err.startswith(f"error: {option} = ")


def test_a_plan_is_drawn_without_what_searches_and_a_report_is_written_without_jax(
    folder: Path, run: Path
):
    make_plan(parse_case(CASE), "balanced").save(folder / "plan.json")
    found = loaded("plot", "plan.json", "-o", "plan.svg", "+", "report", str(run))
    assert (folder / "plan.svg").is_file()
    assert (run / "report.html").is_file()
    assert not found & HEAVY


def test_the_list_has_every_command(command: Command):
    listed = command("--help")
    assert listed.code == 0
    for name, about in skippipe.COMMANDS.items():
        assert name in listed.out.split()
        assert about.split()[0] in listed.out
    modules = {path.stem for path in Path(skippipe.__file__).parent.glob("*.py")}
    others = {"__init__", "main", "arguments"}
    assert modules == {name.replace("-", "_") for name in OWN} | others


@pytest.mark.parametrize("name", sorted(skippipe.COMMANDS))
def test_every_command_has_help(name: str, command: Command):
    shown = command(name, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"usage: skippipe {name} ")


@pytest.mark.parametrize(("former", "name"), skippipe.FORMER_NAMES.items())
def test_former_names_of_commands_are_understood_but_not_listed(
    former: str, name: str, command: Command
):
    assert command(former, "--help") == command(name, "--help")
    assert f"\n    {former} " not in command("--help").out


def test_the_planner_has_the_same_commands_without_jax(command: Command):
    alone = import_module("skippipe_sched.__main__")
    for name in planner.COMMANDS:
        assert options(command(name, "--help").out) == options(command(alone, name, "--help").out)


def options(shown: str) -> list[str]:
    """Return what --help prints below the usage; both commands break lines in their own way."""
    return [" ".join(part.split()) for part in shown.split("\n\n")[1:]]


def test_the_versions_are_printed(command: Command):
    shown = command("--version")
    assert shown.code == 0
    own, of_jax, devices = shown.out.splitlines()
    assert own.startswith("skippipe ")
    assert of_jax == f"jax {jax.__version__}"
    assert devices == f"devices: {jax.device_count()} x {jax.devices()[0].device_kind}"


def test_a_device_that_another_process_uses_is_told_of(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    def devices() -> None:
        raise RuntimeError("the TPU is in use by process 7\nmore lines")

    monkeypatch.setattr(jax, "devices", devices)
    assert command("--version").out.endswith("not available: the TPU is in use by process 7\n")


def test_commands_and_arguments_that_there_are_not_are_refused(command: Command):
    for words, told in (
        (("trian",), "invalid choice: 'trian'"),
        (("train", "--fast"), "unrecognized arguments: --fast"),
    ):
        result = command(*words)
        assert result.code == 2
        assert told in result.err


COMPLETE = """
source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
function=$(complete -p skippipe | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function skippipe "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script() -> str:
    """A script that lets bash complete; other shells are told of commands and options too."""
    scripts = {}
    for shell in skippipe.SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as script:
            assert skippipe.main(["completion", shell]) == 0
        scripts[shell] = script.getvalue()
        assert all(name in scripts[shell] for name in (*skippipe.COMMANDS, "resume"))
    return scripts["bash"]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["tr"], ["train"]),
        (["train", "--res"], ["--resume"]),
        (["train", "--config", "conf"], ["config.yaml"]),
        (["plan", "--method", "sk"], ["skippipe-no-tc2", "skippipe"]),
        (["convert", "to"], ["to-hf"]),
    ],
)
def test_bash_completes(typed: list[str], completed: list[str], bash_script: str, folder: Path):
    (folder / "script").write_text(bash_script)
    words = ["bash", "-c", COMPLETE, "bash", "skippipe", *typed]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(completed)


@pytest.mark.parametrize(
    ("last", "number"),
    [
        ("skippipe_jax", signal.SIGTERM),
        ("jax._src.core", signal.SIGINT),
        ("treescope", signal.SIGTERM),
    ],
    ids=["first", "in the middle", "at the end"],
)
def test_a_signal_while_a_command_loads_ends_it_by_one_line(
    last: str, number: signal.Signals, folder: Path
):
    """Some packages would take a KeyboardInterrupt for an import that has failed, and go on."""
    command = [sys.executable, "-X", "importtime", "-m", "skippipe_jax"]
    command += ["generate", "--run", "nowhere", "--prompt", "x"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = list(
            itertools.takewhile(lambda line: line.split("|")[-1].strip() != last, process.stderr)
        )
        process.send_signal(number)
        said += process.stderr
        assert process.wait() == 128 + number
    told = [line for line in said if not line.startswith("import time:")]
    # Between two imports it is the command that ends.
    assert told in (
        [f"ended by {number.name}\n"],
        [
            f"SIGTERM: {skippipe.INTERRUPTED}\n"
            if number == signal.SIGTERM
            else f"{skippipe.INTERRUPTED}\n"
        ],
    )


@pytest.mark.nightly
def test_a_signal_while_the_search_is_compiled_ends_training(folder: Path):
    """numba calls back from C, where a KeyboardInterrupt would be lost."""
    command = [sys.executable, "-m", "skippipe_jax.train", "--config", "config.yaml"]
    command += ["--set", "plan.method=joint", "--set", "plan.budget_s=1000"]
    uncompiled = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(
        command, env=uncompiled, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        said = list(itertools.takewhile(lambda line: "compiling" not in line, process.stderr))
        process.send_signal(signal.SIGTERM)
        said += process.stderr
        assert process.wait() == 128 + signal.SIGTERM
    assert [line.split()[0] for line in said] == ["planning", "ended"]
    assert not (folder / "run").exists()
