"""The optima of the 50 small cases, as they are kept in optima.json.

A solver takes minutes for all of them, so tests read them, solve a few again each time, and all
with ``-m slow``. After a change to `random_small_case` write the file anew::

    PYTHONPATH=sched python -m tests.sched.optima
"""

import hashlib
import json
from functools import cache
from pathlib import Path

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Operation

from tests.sched.optimum import Optimum, optimum, random_small_case

FILE = Path(__file__).with_suffix(".json")
SEEDS = range(50)


def kept_optimum(seed: int) -> Optimum:
    """The optimum of `random_small_case(seed)`; `ValueError` if it was found for another case."""
    kept = _kept()[seed]
    if kept["case"] != digest_of(random_small_case(seed)):
        raise ValueError(f"the case {seed} is another than in {FILE.name}: write it anew")
    order = tuple(
        tuple(Operation(kind, microbatch, node) for kind, microbatch in operations)
        for node, operations in enumerate(kept["order"])
    )
    stages, paths = (tuple(map(tuple, kept[name])) for name in ("stages", "paths"))
    return Optimum(kept["iteration_s"], stages, paths, order)


@cache
def _kept() -> list[dict]:
    return json.loads(FILE.read_text())


def digest_of(case: Case) -> str:
    """By this a case is known again."""
    source = json.dumps(case.source, sort_keys=True, default=dict)
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _solved(seed: int) -> dict:
    case = random_small_case(seed)
    best = optimum(case)
    order = [
        [(kind, microbatch) for kind, microbatch, _ in operations] for operations in best.order
    ]
    return {
        "case": digest_of(case),
        "iteration_s": best.iteration_s,
        "stages": best.stages,
        "paths": best.paths,
        "order": order,
    }


if __name__ == "__main__":
    lines = [json.dumps(_solved(seed), separators=(",", ":")) for seed in SEEDS]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
