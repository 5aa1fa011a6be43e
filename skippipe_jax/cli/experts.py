"""The command that trains experts on domains, independently, and compares ensembles of them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import InputError, loading

from skippipe_jax.cli.arguments import add_overrides, required_path

if TYPE_CHECKING:
    from skippipe_jax.experts.tasks import Workspace

ACTIONS = TRAIN, EVALUATE, PROBE, PLAN, EXPORT = "train", "evaluate", "probe", "plan", "export"
EPILOG = """\
train      train missing seed models, probes and experts; score all domains; compare
evaluate   repeat the comparison from existing scores, and write results.json and results.svg
probe      measure the difficulty of each domain, and propose lanes, steps and sizes
plan       divide the nodes of `nodes.case` among the lanes of each arm
export     write every expert as a Hugging Face model to FOLDER/huggingface

An arm is an ensemble to compare. A lane is a sequence of domains: its first expert starts from the
seed model, each later one from the previous expert. Ctrl-C saves a checkpoint of each run; the same
command continues.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Train experts, each on one domain from the weights of a seed model, and compare "
        "ensembles of them (HDEE, arXiv 2502.19385)."
    )
    parser.epilog = EPILOG
    about = f"one of those below (default: {TRAIN})"
    parser.add_argument("action", nargs="*", metavar="ACTION", help=about)
    about = "configuration file of the experts, YAML (required)"
    parser.add_argument("--config", type=Path, metavar="CONFIG", help=about)
    add_overrides(parser, "override a configuration key; repeatable")
    parser.set_defaults(interrupted="stopped; run the same command again to continue")


def run(arguments: argparse.Namespace) -> int:
    """Run the action; return the exit code."""
    from skippipe_jax.experts.config import load_experts

    # Formerly the configuration was a positional argument after the action.
    actions = [word for word in arguments.action if word in ACTIONS]
    former = [Path(word) for word in arguments.action if word not in ACTIONS]
    if len(actions) > 1:
        raise InputError("ACTION", " ".join(actions), "must be one action", "Give one action")
    path = required_path("--config", arguments.config, former)
    config = load_experts(path, arguments.set)
    with loading():
        from skippipe_jax.experts.tasks import Workspace

    place = Workspace(config, Path(config.folder).absolute())
    return _RUNNERS[actions[0] if actions else TRAIN](place)


def _compare(action: str, place: Workspace) -> int:
    with loading():
        from skippipe_jax.experts import work
        from skippipe_jax.experts.evaluation import table

    results = work.train(place) if action == TRAIN else work.evaluate(place)
    print(table(place.config, results["arms"]))
    print(f"{place.folder / work.RESULTS}, {place.folder / work.PICTURE}")
    return 0


def _probe(place: Workspace) -> int:
    with loading():
        from skippipe_jax.experts import difficulty, work

    arm = next(
        (candidate for candidate in place.config.arms.values() if isinstance(candidate.steps, int)),
        None,
    )
    steps = 100 if arm is None else arm.steps
    assert isinstance(steps, int)
    print(difficulty.report_text(place.config, work.probe(place), steps))
    return 0


def _export(place: Workspace) -> int:
    with loading():
        from skippipe_jax.experts.work import export

    for folder in export(place):
        print(folder)
    return 0


def _plan(place: Workspace) -> int:
    with loading():
        from skippipe_sched.division.picture import picture, table

        from skippipe_jax.experts.nodes import DIVISION, divided
        from skippipe_jax.experts.work import divisible_arms
        from skippipe_jax.storage.files import atomic_write

    for arm in divisible_arms(place):
        division = divided(place, arm)
        drawn = place.folder / DIVISION / f"{arm.name}.svg"
        atomic_write(drawn, picture(division, arm.name))
        print(arm.name, table(division), drawn, sep="\n")
    return 0


_RUNNERS = {
    TRAIN: partial(_compare, TRAIN),
    EVALUATE: partial(_compare, EVALUATE),
    PROBE: _probe,
    PLAN: _plan,
    EXPORT: _export,
}
