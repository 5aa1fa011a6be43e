"""Plan which hosts serve which stages of a model, and by which routes."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import loading

if TYPE_CHECKING:
    from skippipe_sched.serving.case import HeldStages, Route, ServingCase
    from skippipe_sched.serving.simulate import Rates


DESCRIPTION = """\
Plan a service: the stages of each host, and the routes of sequences. Print both, and tokens per
second and seconds per token as predicted, each with a bound that no placement can beat.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("case", type=Path, help="YAML file")
    add(
        "--objective", choices=("tokens_per_s", "seconds_per_token"), default="tokens_per_s",
        help="maximize tokens per second of all groups, or minimize seconds per token of one "
        "sequence (default: %(default)s)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the search (default: 0)")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the stages of each host, the routes, their predicted rates and the bounds."""
    with loading():
        from dataclasses import asdict, replace

        from skippipe_sched.serving.bound import bounds
        from skippipe_sched.serving.case import load_serving_case
        from skippipe_sched.serving.placing import place
        from skippipe_sched.serving.routing import routes
        from skippipe_sched.serving.simulate import simulate
    case = load_serving_case(arguments.case)
    placement = place(case, arguments.objective, seed=arguments.seed)
    missing = sorted({*range(case.stages)}.difference(*placement))
    if missing:
        print(
            f"warning: the hosts have no room for stages {missing}: these never run",
            file=sys.stderr,
        )
    chosen_routes = routes(case, placement, seed=arguments.seed)
    alone = routes(replace(case, groups=1), placement)
    seconds_per_token = simulate(case, alone).seconds_per_token
    predicted = replace(simulate(case, chosen_routes), seconds_per_token=seconds_per_token)
    bound = bounds(case)
    if arguments.json:
        chosen = {"placement": placement, "routes": chosen_routes}
        print(json.dumps(chosen | asdict(predicted) | {"bounds": asdict(bound)}))
    else:
        print(_table(placement, chosen_routes))
        print(_summary(case, predicted, bound))
    return 0


def _table(placement: HeldStages, routes: tuple[Route, ...]) -> str:
    """Format the stages of each host, then the routes with their numbers of groups."""
    from skippipe_sched.figures.tables import aligned

    rows = [["host", "stages", "groups"]]
    for host, stages in enumerate(placement):
        visits = sum(host in route for route in routes)
        rows.append([str(host), " ".join(map(str, stages)), str(visits)])
    lines = [aligned(rows, left=(1,))]
    for route, groups in Counter(routes).items():
        visited = " ".join("-" if host is None else str(host) for host in route)
        lines.append(f"groups: {groups}, hosts of the stages: {visited}")
    return "\n".join(lines)


def _summary(case: ServingCase, predicted: Rates, bound: Rates) -> str:
    """Format the predicted rates of the routes and their bounds."""
    return (
        f"{case.groups} groups of {case.slots} sequences: {predicted.tokens_per_s:.1f} tokens/s, "
        f"at most {bound.tokens_per_s:.1f}\n"
        f"one sequence alone: {predicted.seconds_per_token:.4f} s/token, "
        f"at least {bound.seconds_per_token:.4f}"
    )
