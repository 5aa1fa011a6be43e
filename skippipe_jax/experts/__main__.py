"""Train experts on domains, each apart from the others, and compare what they say together.

skippipe experts CONFIG
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import loading

from skippipe_jax.arguments import add_overrides, run_module

if TYPE_CHECKING:
    from skippipe_jax.experts.tasks import Place

TRAIN, EVALUATE, PROBE, PLAN, EXPORT = "train", "evaluate", "probe", "plan", "export"
EPILOG = """\
train      train seeds, probes and experts that are missing, score all domains, compare (default)
evaluate   compare again what has been trained and scored: results.json and results.svg
probe      measure how hard each domain is, and propose lanes, steps and sizes
plan       divide the nodes of `nodes.case` among the lanes of each arm
export     write every expert as a Hugging Face model to FOLDER/huggingface

Two runs train at a time (at_once). Ctrl-C stops after a checkpoint of each; the same command goes
on, also after a crash, and nothing is trained twice: runs are known by a digest of all that they
are told. Nothing is trained either while there are runs of another text, case or plan than those
files hold now; they are named.
"""


def main() -> int:
    """Parse the command line and run; returns the exit code."""
    return run_module("skippipe_jax.experts", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Train experts that branch from seed models, each on its own domain, and compare "
        "ensembles of them (HDEE, arXiv 2502.19385)."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "action",
        nargs="?",
        default=TRAIN,
        choices=(TRAIN, EVALUATE, PROBE, PLAN, EXPORT),
        help="what to do (default: %(default)s)",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the experts, YAML")
    add_overrides(parser, "override one key of CONFIG; may be given often")
    parser.set_defaults(
        command=_experts, interrupted="stopped; the same command goes on where this one was"
    )


def _experts(arguments: argparse.Namespace) -> int:
    from skippipe_jax.experts.config import load_experts

    config = load_experts(arguments.config, arguments.set)
    with loading():
        from skippipe_jax.experts.tasks import Place

    place = Place(config, Path(config.folder).absolute())
    return _ACTIONS[arguments.action](place)


def _train(place: Place) -> int:
    with loading():
        from skippipe_jax.experts import work

    return _tell(place, work.train(place)["arms"])


def _evaluate(place: Place) -> int:
    with loading():
        from skippipe_jax.experts import work

    return _tell(place, work.evaluate(place)["arms"])


def _tell(place: Place, arms: dict) -> int:
    from skippipe_jax.experts.evaluation import table
    from skippipe_jax.experts.work import PICTURE, RESULTS

    print(table(place.config, arms))
    print(f"{place.folder / RESULTS}, {place.folder / PICTURE}")
    return 0


def _probe(place: Place) -> int:
    with loading():
        from skippipe_jax.experts import difficulty, work

    arm = next((own for own in place.config.arms.values() if isinstance(own.steps, int)), None)
    steps = 100 if arm is None else arm.steps
    assert isinstance(steps, int)
    print(difficulty.told(place.config, work.probe(place), steps))
    return 0


def _export(place: Place) -> int:
    with loading():
        from skippipe_jax.experts.work import export

    for folder in export(place):
        print(folder)
    return 0


def _plan(place: Place) -> int:
    with loading():
        from skippipe_sched.division.picture import picture, table

        from skippipe_jax.experts.nodes import DIVISION, compared
        from skippipe_jax.experts.work import divisible_arms
        from skippipe_jax.storage.whole_file import write_whole

    for arm in divisible_arms(place):
        divisions = compared(place, arm)
        drawn = place.folder / DIVISION / f"{arm.name}.svg"
        write_whole(drawn, picture(divisions, arm.name))
        print(arm.name, table(divisions), drawn, sep="\n")
    return 0


_ACTIONS = {TRAIN: _train, EVALUATE: _evaluate, PROBE: _probe, PLAN: _plan, EXPORT: _export}

if __name__ == "__main__":
    sys.exit(main())
