"""How good the planner's plans are, how soon it has them, and how it grows.

    python -m experiments.benchmarks.planner --json FILE

Parts, each of which can be run alone with `--only`:

yardstick   the paper's case of 20 nodes without contention: the published plan from its file, ours
            within 10 and 60 seconds over several seeds, full pipelines.
first       the paper's case: the first plan better than `balanced` of a machine that has compiled
            nothing, and a better plan within 2 seconds of search after nodes were lost.
methods     every method on every case of the paper, side by side.
bound       the quick lower bound and that over placements: how far the known optima of 50 small
            cases are above them, and both of the paper's case, with their processor seconds.
scale       42, 200 and 1,000 nodes, each against random paths.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from skippipe_sched import compare
from skippipe_sched.methods import METHODS, make_plan
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.placement_bound import placement_bound_s
from skippipe_sched.timing.simulate import simulate_plan

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.planner.settings import searched
from experiments.paper import cases

FIRST_BUDGET_S = 2.0
# Nodes of the paper's case that are lost together.
LOSSES = ((4,), (0, 12), (3, 8, 15), (3, 6, 12, 14, 15))
# Nodes, replicas of the data stage and of each inner stage, microbatches per data node, seconds.
SIZES = {42: (7, 5, 7, 6, 60), 200: (40, 32, 5, 30, 120), 1000: (200, 160, 5, 30, 120)}


def yardstick(seeds: int) -> dict[str, Any]:
    """The paper's case without contention."""
    case = cases.load("gcp20")
    full = cases.published_full_pipeline()
    published = {
        "published_plan": simulate_plan(cases.published_plan()),
        "published_full_pipeline": full,
    }
    result: dict[str, Any] = {
        name: {
            "pipeline_s": round(timeline.pipeline_s, 2),
            "iteration_s": round(timeline.iteration_s, 2),
        }
        for name, timeline in published.items()
    }
    for name, found in result.items():
        print(f"{name}: {found}", flush=True)
    for method, budget_s in (("joint", 10.0), ("joint", 60.0), ("full-joint", 60.0)):
        runs = [searched(case, method, Search(seed, budget_s))[1] for seed in range(seeds)]
        median_s = statistics.median(run["iteration_s"] for run in runs)
        result[f"{method}_{budget_s:.0f}s"] = {
            "median_iteration_s": median_s,
            "over_published_full": round(median_s / full.iteration_s, 3),
            "runs": runs,
        }
        print(
            f"{method} within {budget_s:.0f} s: median {median_s:.2f} s of "
            f"{sorted(run['iteration_s'] for run in runs)}",
            flush=True,
        )
    return result


def first(seeds: int) -> dict[str, Any]:
    """Plans within 2 seconds of search: where nothing is compiled, and after losses."""
    runs = []
    case = cases.load("gcp20")
    balanced_s = make_plan(case, "balanced").predicted.iteration_s
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            module = "-m", "experiments.benchmarks.planner.first_plan"
            given = map(str, (time.time(), seed, FIRST_BUDGET_S, balanced_s))
            runs.append(reporting.found_by(*module, *given, XDG_CACHE_HOME=folder))
        print(f"first: {runs[-1]}", flush=True)
    own = make_plan(case, "joint", Search(0))
    losses = []
    for lost in LOSSES:
        repaired = repair_plan(own, set(range(len(case.nodes))) - set(lost))
        before_s = repaired.predicted.iteration_s
        found = []
        for seed in range(seeds):
            search = Search(seed, FIRST_BUDGET_S, begin=repaired, improves=True)
            processor_s = time.process_time()
            run = searched(repaired.case, "joint", search)[1]
            processor_s = time.process_time() - processor_s
            # A search that begins with a step waits for the end of one that is under way.
            waits_s = before_s - run["search_s"] % before_s
            found.append(run | {"processor_s": round(processor_s, 2), "waits_s": round(waits_s, 2)})
        after_s = statistics.median(run["iteration_s"] for run in found)
        losses.append(
            {"lost": lost, "repaired_s": round(before_s, 3), "median_s": after_s, "runs": found}
        )
        print(
            f"first: without {list(lost)} {before_s:.2f} s, improved {after_s:.2f} s; search and "
            f"wait for the step's end {[(run['search_s'], run['waits_s']) for run in found]}",
            flush=True,
        )
    return {"cold": runs, "losses": losses}


def methods(budget_s: float) -> dict[str, Any]:
    """All methods on all cases of the paper."""
    result = {}
    for name in cases.CASES:
        rows = compare.compare(cases.load(name), list(METHODS), lambda _: Search(0, budget_s))
        print(f"{name}\n{compare.table(rows)}", flush=True)
        result[name] = compare.to_json(rows)
    return result


def timed(bound: Callable[[], float]) -> tuple[float, float]:
    """A bound and the processor seconds that it took."""
    start = time.process_time()
    return bound(), time.process_time() - start


def both_bounds(case: Case, most_s: float, limit_s: float) -> dict[str, float]:
    """Both lower bounds of a case, and how far above them `most_s` is, what a plan takes."""
    lower_bound_s.cache_clear()
    quick_s, quick_took_s = timed(lambda: lower_bound_s(case, case.path_length))
    better_s, better_took_s = timed(
        lambda: placement_bound_s(case, case.path_length, most_s, limit_s)
    )
    return {
        "best_s": most_s,
        "quick_s": quick_s,
        "quick_gap": most_s / quick_s - 1,
        "quick_took_s": quick_took_s,
        "placements_s": better_s,
        "placements_gap": most_s / better_s - 1,
        "placements_took_s": better_took_s,
    }


def bound(limit_s: float, optima: int | None) -> dict[str, Any]:
    """Both lower bounds on small cases with known optima, and on the paper's case."""
    # With the solver of optima, which only tests need.
    from tests.sched.optima import SEEDS, kept_optimum
    from tests.sched.optimum import random_small_case

    small = []
    for seed in SEEDS[:optima]:
        case, optimum_s = random_small_case(seed), kept_optimum(seed).iteration_s
        small.append({"seed": seed, **both_bounds(case, optimum_s, limit_s)})
    result: dict[str, Any] = {}
    for name in ("quick", "placements"):
        gaps = [case[f"{name}_gap"] for case in small]
        result[name] = {
            "mean_gap": round(statistics.mean(gaps), 4),
            "median_gap": round(statistics.median(gaps), 4),
            "took_s": round(sum(case[f"{name}_took_s"] for case in small), 2),
        }
        print(f"bound: {len(small)} optima above {name}: {result[name]}", flush=True)
    case = cases.load("gcp20")
    plan = make_plan(case, "joint", Search(0, limit_s / 5))
    result["gcp20"] = both_bounds(case, plan.predicted.iteration_s, limit_s)
    print(f"bound: gcp20: {result['gcp20']}", flush=True)
    return result | {"optima": small}


def case_of_size(nodes: int) -> Case:
    """The yardstick grown to more nodes in the same 12 regions, as `SIZES` says."""
    if nodes == 42:
        return cases.load("world42")
    data, inner, inner_stages, microbatches, _ = SIZES[nodes]
    source = dict(cases.load("gcp20").source)
    return parse_case(
        source
        | {
            "nodes": nodes,
            "stages": [data, *[inner] * inner_stages],
            "microbatches_per_data_node": microbatches,
        }
    )


def scale(sizes: list[int]) -> dict[str, Any]:
    """Larger cases, each in a process of its own for its peak memory."""
    runs = []
    for nodes in sizes:
        words = "-m", "experiments.benchmarks.planner", "--size", str(nodes)
        runs.append(reporting.found_by(*words)["found"])
        print(f"scale: {runs[-1]}", flush=True)
    return {"runs": runs}


def of_size(nodes: int) -> dict[str, Any]:
    """One size: random paths, then ours."""
    case = case_of_size(nodes)
    budget_s = SIZES[nodes][-1]
    _, rival = searched(case, "dtfm-skip", Search(0, budget_s / 4))
    wall = time.perf_counter()
    plan, ours = searched(case, "joint", Search(0, budget_s))
    wall = time.perf_counter() - wall
    return {
        "nodes": nodes,
        "microbatches": len(plan.microbatches),
        "dtfm-skip": rival,
        "joint": ours,
        "joint_over_dtfm_skip": round(ours["iteration_s"] / rival["iteration_s"], 3),
        "make_plan_s": round(wall, 1),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


PARTS = ("yardstick", "first", "methods", "bound", "scale")


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Measure the parts that are asked for."""
    if arguments.size is not None:
        report["found"] = of_size(arguments.size)
        return
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "yardstick": lambda: yardstick(arguments.seeds),
        "first": lambda: first(arguments.seeds),
        "methods": lambda: methods(arguments.budget),
        "bound": lambda: bound(arguments.bound_budget, arguments.optima),
        "scale": lambda: scale(arguments.sizes),
    }
    for part in arguments.only:
        report[part] = run[part]()
        reporting.write(report, arguments.json)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {
        "seeds": (5, 1, "seeds of yardstick and first"),
        "budget": (10.0, None, "seconds of each method"),
        "bound_budget": (300.0, None, "time limit in seconds of each bound"),
    }
    several = {"nargs": "+"}
    options = {
        "--only": several | {"choices": PARTS, "default": PARTS, "help": "parts (all)"},
        "--optima": {"type": int, "help": "number of small cases of bound (all)"},
        "--sizes": several
        | {
            "type": int,
            "choices": SIZES,
            "default": [*SIZES],
            "help": "numbers of nodes of scale (all)",
        },
        "--size": {"type": int, "help": argparse.SUPPRESS},
    }
    return reporting.run(
        "planner",
        __doc__,
        measure,
        numbers=numbers,
        options=options,
        # A process of one size tells its own memory.
        takes_device="--size" not in sys.argv,
    )


if __name__ == "__main__":
    sys.exit(main())
