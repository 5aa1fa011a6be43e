"""What it brings to divide nodes among experts by their sizes and steps, as simulated.

    python -m experiments.benchmarks.planner.division --json FILE

Three lanes (easy, medium, hard) of two experts each train side by side on the nodes of a case of
the paper, in three arms, the sizes S, M and L being those of HDEE (arXiv 2502.19385):

steps   M everywhere, in 300, 400 and 500 iterations
sizes   S, M and L, in 400 iterations
both    S in 300, M in 400, L in 500

equal    the control: as many nodes for each lane as for the others, give or take one; which ones,
         in how many stages and by which plans, is searched for
divided  the same search, which may give one lane more nodes than another
listed   as many nodes for each lane, in the order in which the case lists them, as whoever does
         not look at links deals them out: stages and plans are searched for, nodes are not
alone    the hard lane with all nodes to choose from, as if no other trained, its search begun at
         what it is in the divided one: no division can be quicker, as far as the search knows

The first two have the same history: a search for an equal division, and from there on a second one
of the same budget each, by other random numbers. A ratio is the time at which the last expert is
done, over that of the control.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from skippipe_sched import fields
from skippipe_sched.division.lanes import Division, Lane, Training
from skippipe_sched.division.parts import Whole
from skippipe_sched.division.picture import picture, table
from skippipe_sched.division.search import divide
from skippipe_sched.problem.case import node_count
from skippipe_sched.search.budget import Search

from experiments.benchmarks.harness import reporting
from experiments.paper import cases

WIDTH = 768
FFN = {"S": 2304, "M": 3072, "L": 3840}
LANES = ("easy", "medium", "hard")
EXPERTS = 2
# Size and steps of each lane.
ARMS = {
    "steps": (("M", 300), ("M", 400), ("M", 500)),
    "sizes": (("S", 400), ("M", 400), ("L", 400)),
    "both": (("S", 300), ("M", 400), ("L", 500)),
}
CASES = ("gcp20", "world42")
MOST = 0.75


def size_of(name: str) -> float:
    """Parameters of a block, and so its compute and bytes, in those of M."""

    def parameters(ffn: int) -> int:
        return 4 * WIDTH**2 + 3 * WIDTH * ffn

    return parameters(FFN[name]) / parameters(FFN["M"])


def lanes_of(arm: str) -> tuple[Lane, ...]:
    """The lanes of an arm."""
    return tuple(
        Lane(
            lane,
            tuple(
                Training(f"{lane} {number + 1}", steps, size_of(size), size_of(size))
                for number in range(EXPERTS)
            ),
        )
        for lane, (size, steps) in zip(LANES, ARMS[arm], strict=True)
    )


def blocks(source: Mapping[str, Any], lanes: int) -> list[list[int]]:
    """The nodes of a case dealt out to lanes as it lists them, as many to each as possible."""
    nodes = np.arange(node_count(source["nodes"]))
    return [block.tolist() for block in np.array_split(nodes, lanes)]


def part_of(source: Mapping[str, Any], folder: Path, nodes: Sequence[int]) -> Mapping[str, Any]:
    """The case of some of the nodes, to be divided by itself; how it is cut is still open."""
    whole = Whole(source, folder)
    return whole.part(nodes, whole.cuts(len(nodes), 1)[0], Training("any", 1)).source


def measured(case: str, arm: str, seed: int, budget_s: float) -> tuple[dict, dict[str, Division]]:
    """The figures of one arm on a case, and the two divisions."""
    path = cases.FOLDER / f"{case}.yaml"
    source, lanes = fields.load_yaml(path, "case"), lanes_of(arm)
    cut_short = []

    def found(
        seed: int, lanes: tuple[Lane, ...], nodes: Sequence[int] | None = None, **options: Any
    ) -> Division:
        search = Search(seed, budget_s)
        of_nodes = source if nodes is None else part_of(source, path.parent, nodes)
        division = divide(of_nodes, path.parent, lanes, search, **options)
        cut_short.append(search.end.cut_short)
        return division

    first = found(seed, lanes, equal=True)
    control = found(seed + 1, lanes, equal=True, begin=first)
    divided = found(seed + 1, lanes, begin=first)
    others = [node for part in divided.parts[:-1] for node in part.nodes]
    hard = Division(divided.parts[-1:], (*divided.idle, *others))
    alone = found(seed, lanes[-1:], begin=hard)
    listed = Division(
        tuple(
            part
            for lane, nodes in zip(lanes, blocks(source, len(lanes)), strict=True)
            for part in found(seed, (lane,), nodes=nodes).parts
        ),
        (),
    )
    result = {
        "case": case,
        "arm": arm,
        "ratio": round(divided.seconds / control.seconds, 4),
        "listed_ratio": round(divided.seconds / listed.seconds, 4),
        "alone_ratio": round(alone.seconds / control.seconds, 4),
        "searches_cut_short": sum(cut_short),
        "equal": control.to_json(),
        "divided": divided.to_json(),
        "listed": listed.to_json(),
        "alone": alone.to_json(),
    }
    return result, {"divided": divided, "equal": control, "listed": listed}


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Divide all cases in all arms."""
    budget_s = 1.0 if arguments.quick else arguments.budget
    report |= {
        "seed": arguments.seed,
        "budget_s": budget_s,
        "arms": {arm: dict(zip(LANES, lanes, strict=True)) for arm, lanes in ARMS.items()},
        "sizes": {name: round(size_of(name), 4) for name in FFN},
        "most": MOST,
        "results": [],
    }
    for case in arguments.cases:
        for arm in arguments.arms:
            result, divisions = measured(case, arm, arguments.seed, budget_s)
            report["results"].append(result)
            reached = "" if result["ratio"] <= MOST else f" (more than {MOST})"
            print(table(divisions))
            print(
                f"{case}, {arm}: {result['ratio']:.3f} of equal node counts{reached}, "
                f"{result['listed_ratio']:.3f} of equal counts as listed; the hard lane alone "
                f"takes {result['alone_ratio']:.3f}\n",
                flush=True,
            )
            reporting.write(report, arguments.json)
            if arguments.picture is not None and (case, arm) == (arguments.cases[-1], "both"):
                drawn = picture(divisions, f"{case}, sizes and steps by lane")
                arguments.picture.write_text(drawn, encoding="utf-8")


def main() -> int:
    """Parse the command line, divide, print; returns the exit code."""
    numbers = {
        "seed": (0, None, "seed of the first search"),
        "budget": (20.0, None, "seconds of each search"),
    }
    several = {"nargs": "+", "help": "(all)"}
    options = {
        "--cases": several | {"choices": CASES, "default": [*CASES]},
        "--arms": several | {"choices": ARMS, "default": [*ARMS]},
        "--quick": {"action": "store_true", "help": "one second for each search"},
    }
    paths = {"picture": "draw the arm `both` of the last case as an SVG to this file"}
    return reporting.run(
        "planner.division", __doc__, measure, numbers=numbers, options=options, paths=paths
    )


if __name__ == "__main__":
    sys.exit(main())
