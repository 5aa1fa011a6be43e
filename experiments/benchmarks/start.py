"""Processor seconds that commands take which compute nothing, or little: most is loading.

    python -m experiments.benchmarks.start --against CHECKOUT --json FILE

Each command is started several times, in turn with the same one of another checkout if there is
one; the figures are medians of user and system time together, which other work on the machine
changes little. Unless --run names one, a short run is trained first, for what is said of runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError, run_command

from experiments.benchmarks import reporting

ROOT = Path(__file__).parents[2]
# The most that a command may take.
TARGETS = {"skippipe --help": 0.1, "skippipe train --help": 0.6, "skippipe report RUN": 1.5}
# Each as this checkout starts it, and as one without `skippipe` does, if it has such a command.
COMMANDS: Mapping[str, tuple[str, str | None]] = {
    "skippipe --help": ("--help", None),
    "skippipe train --help": ("train --help", "skippipe_jax.train --help"),
    "skippipe launch --help": ("launch --help", "skippipe_jax launch --help"),
    "skippipe plot --help": ("plot --help", "skippipe_sched plot --help"),
    "skippipe config --keys": ("config --keys", None),
    "skippipe plot PLAN": ("plot {plan} -o {svg}", "skippipe_sched plot {plan} -o {svg}"),
    "skippipe report RUN": ("report {run} -o {page}", "skippipe_jax report {run} -o {page}"),
}


def processor_s(checkout: Path, words: list[str]) -> float:
    """User and system seconds of one start of a module of a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", *words],
        cwd=checkout,
        env=environment(checkout),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def environment(checkout: Path) -> dict[str, str]:
    """The environment in which Python finds the packages of a checkout."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "sched")])}


def measured(
    places: Mapping[str, Path], against: Path | None, starts: int
) -> dict[str, dict[str, float | None]]:
    """For each command its median here, in the other checkout, and what it may take at most."""
    found: dict[str, dict[str, float | None]] = {}
    for name, (here, there) in COMMANDS.items():
        both = [(ROOT, f"skippipe_jax {here}")]
        if against is not None and there is not None:
            both.append((against, there))
        samples: list[list[float]] = [[] for _ in both]
        # The first start writes bytecode.
        for start in range(starts + 1):
            for (checkout, words), own in zip(both, samples, strict=True):
                took_s = processor_s(checkout, words.format(**places).split())
                own += [took_s] * (start > 0)
        medians_s = [round(statistics.median(own), 3) for own in samples]
        found[name] = {
            "here_s": medians_s[0],
            "there_s": medians_s[1] if len(both) > 1 else None,
            "at_most_s": TARGETS.get(name),
        }
    return found


def trained_run(folder: Path) -> Path:
    """A short run of the quickstart."""
    words = ["--config", "experiments/quickstart.yaml", "--set", f"run_dir={folder / 'run'}"]
    words += ["--set", "train.steps=12", "--set", "trace=every 4", "--set", "checkpoint.every=12"]
    subprocess.run(
        [sys.executable, "-m", "skippipe_jax.train", *words],
        cwd=ROOT,
        env=environment(ROOT),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder / "run"


def table(commands: Mapping[str, Mapping[str, float | None]]) -> str:
    """The figures beside one another."""
    lines = [f"{'processor seconds':<26}{'here':>8}{'there':>8}{'at most':>9}"]
    for name, row in commands.items():
        shown = ["" if value is None else f"{value:.2f}" for value in row.values()]
        lines.append(f"{name:<26}{shown[0]:>8}{shown[1]:>8}{shown[2]:>9}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("start", __doc__)
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="another checkout to compare with"
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="a run (default: train one)")
    parser.add_argument(
        "--starts", type=int, default=5, help="starts of each command (%(default)s)"
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    starts = fields.integer(arguments.starts, "--starts", 1)
    against = None if arguments.against is None else arguments.against.resolve()
    if against is not None and not (against / "skippipe_jax").is_dir():
        raise InputError(
            "--against", str(against), "is not a checkout", "Choose a checkout of this project"
        )
    report = reporting.begun("start")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = trained_run(folder) if arguments.run is None else arguments.run.resolve()
        places = {
            "run": run,
            "plan": run / "plan.json",
            "page": folder / "page.html",
            "svg": folder / "plan.svg",
        }
        report["commands"] = measured(places, against, starts)
    return reporting.finish(report, table(report["commands"]), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
