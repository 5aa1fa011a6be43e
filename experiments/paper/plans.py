"""The plans that the paper's runs train by, and how long their iterations take on three networks.

    python -m experiments.paper.plans        makes experiments/paper/plans/*.json

A run trains on virtual nodes of one device, and its clock is the planner's: an iteration takes as
long as its plan is predicted to take on 20 nodes in 12 regions. Which way the microbatches go is
decided by the plan alone, so its files are committed and every run repeats the same paths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import run_command
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.search.budget import Search

from experiments.benchmarks.harness import reporting

PAPER = Path(__file__).parent
PLANS = PAPER / "plans"
BUDGET_S = 10.0

# Three or four stages instead of six, on the same nodes, with as many microbatches.
FOUR_STAGES = {"stages": [5, 5, 5, 5]}
THREE_STAGES = {"stages": [5, 8, 7]}
# Changes travel in 8 bits, averaged behind the iterations, and so do activations: a quarter of the
# bytes, and four for the scale of 128 numbers.
OUTER = {
    "activation_bytes": 8650752,
    "averaging": {"mode": "outer", "every": 20, "fragments": 2, "delay": 1, "dtype": "int8"},
}
# As many microbatches as gated runs have, and as many nodes as there are stages, and one.
FEW_NODES = {"nodes": 7, "stages": [2, 1, 1, 1, 1, 1], "microbatches_per_data_node": 4}
# Three blocks instead of two: half as much again, but for the head, whose loss is in proportion.
OF_THREE_BLOCKS = FOUR_STAGES | {"path_length": 3, "stage_cost": 1.5, "loss_ratio": 0.25 / 1.5}


@dataclass(frozen=True)
class Kind:
    """A plan of the yardstick case with `changes`: how it skips, or which model it is for."""

    method: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    max_swaps: int = 0


KINDS = {
    # The whole model of 12 blocks, in 6 stages of 2. Skipping a third is the yardstick itself.
    "full": Kind("full-joint"),
    "skip33": Kind("joint"),
    "skip33_swaps": Kind("joint", max_swaps=2),
    "skip33_skippipe": Kind("skippipe", max_swaps=2),
    "skip33_random": Kind("dtfm-skip"),
    "skip33_random_swaps": Kind("dtfm-skip-swaps", max_swaps=2),
    "skip50": Kind("joint", {"path_length": 3}),
    "skip50_random": Kind("dtfm-skip", {"path_length": 3}),
    # The same blocks in 4 stages, of which 3 are visited.
    "skip25": Kind("joint", OF_THREE_BLOCKS),
    "skip25_random": Kind("dtfm-skip", OF_THREE_BLOCKS),
    # Smaller models, trained in full: 8 blocks in 4 stages of 2, and 6 blocks in 3 stages.
    "small67": Kind("full-joint", FOUR_STAGES | {"path_length": 4}),
    "small50": Kind("full-joint", THREE_STAGES | {"path_length": 3}),
    "full_outer": Kind("full-joint", OUTER),
    "skip33_outer": Kind("joint", OUTER),
    "small67_outer": Kind("full-joint", FOUR_STAGES | {"path_length": 4} | OUTER),
    # The same stages on few nodes, along which the trainer is compared with gates.
    "full_few": Kind("full-joint", FEW_NODES),
    "skip33_few": Kind("joint", FEW_NODES),
}


# The case of each network, and what is changed in it.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "12 regions": ("gcp20", {}),
    "one datacentre": ("cluster1", {}),
    # Where the full pipeline loses least.
    "one datacentre without overhead and memory limits": (
        "cluster1",
        {"hop_overhead_s": 0.0, "memory": 30},
    ),
}
WIDE_AREA = next(iter(NETWORKS))


def case_of(name: str, network: str = WIDE_AREA) -> Case:
    """The case of one of `KINDS` on one of `NETWORKS`."""
    kind, (case, changes) = KINDS[name], NETWORKS[network]
    source = {**fields.load_yaml(PAPER / f"{case}.yaml", "case"), **changes}
    blocks_of_stage = kind.changes.get("stage_cost", 1.0)
    source["stage_bytes"] = round(blocks_of_stage * source["stage_bytes"])
    source["rules"] = source["rules"] | {"max_swaps": kind.max_swaps}
    return parse_case(source | dict(kind.changes))


def plan_of(name: str) -> Plan:
    """The committed plan of one of `KINDS`."""
    return load_plan(PLANS / f"{name}.json")


def iteration_s(name: str, network: str, budget_s: float, folder: Path) -> float:
    """Seconds of an iteration by the planner; a plan that was made is kept in `folder`."""
    if network == WIDE_AREA:
        return plan_of(name).predicted.iteration_s
    path = folder / f"{name}-{list(NETWORKS).index(network)}-{budget_s:g}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        planned(name, network, budget_s).save(path)
    return load_plan(path).predicted.iteration_s


def planned(name: str, network: str, budget_s: float) -> Plan:
    """A new plan of one of `KINDS` on one of `NETWORKS`."""
    return make_plan(case_of(name, network), KINDS[name].method, Search(budget_s=budget_s))


def main() -> int:
    """Parse the command line and plan; returns the exit code."""
    parser = reporting.documented_parser("python -m experiments.paper.plans", __doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="(all)")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds of each search (%(default)g)"
    )
    arguments = parser.parse_args()
    return run_command(lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> int:
    PLANS.mkdir(exist_ok=True)
    for name in arguments.only:
        plan = planned(name, WIDE_AREA, arguments.budget)
        plan.save(PLANS / f"{name}.json")
        print(f"{name}: {plan.predicted.iteration_s:.2f} s an iteration", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
