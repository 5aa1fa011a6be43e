"""The first search of a machine, in this process; a part of the benchmark `planner`.

    python -m experiments.benchmarks.planner.first_plan STARTED SEED BUDGET BALANCED

Prints figures as JSON. STARTED is when the process was started, in seconds of the epoch, BALANCED
the seconds of an iteration of the plan by `balanced`. It loads no more than a plan needs, as its
start counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from skippipe_sched.methods import joint, make_plan
from skippipe_sched.problem.case import load_case
from skippipe_sched.search.budget import Search

CASE = Path(__file__).parents[2] / "paper" / "gcp20.yaml"


def first_plan(started_s: float, seed: int, budget_s: float, balanced_s: float) -> dict[str, Any]:
    """Search while the search is compiled; say when a plan was better than `balanced`."""
    case = load_case(CASE)
    better: dict[str, float] = {}

    def watch(search: Search) -> None:
        if not better and search.best_s < balanced_s:
            better["better_after_s"] = round(time.time() - started_s, 2)
            better["better_after_search_s"] = round(search.elapsed_s, 2)
            better["better_after_processor_s"] = round(time.process_time(), 2)

    search = Search(seed, budget_s, watch=watch, waits_for_compiler=False)
    iteration_s = make_plan(case, "joint", search).predicted.iteration_s
    wall_s, processor_s = time.time() - started_s, time.process_time()
    while joint.compilation().succeeded() is None:  # Or what follows shares the machine with it.
        time.sleep(0.1)
    return {
        "seed": seed,
        "balanced_s": round(balanced_s, 3),
        **better,
        "iteration_s": round(iteration_s, 3),
        "wall_s": round(wall_s, 2),
        "processor_s": round(processor_s, 2),
        "compiled_after_s": round(time.time() - started_s, 1),
    }


if __name__ == "__main__":
    started, seed, budget, balanced = sys.argv[1:]
    print(json.dumps(first_plan(float(started), int(seed), float(budget), float(balanced))))
