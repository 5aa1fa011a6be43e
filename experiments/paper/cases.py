"""The paper's cases as our planner takes them, and what was published for one of them."""

from __future__ import annotations

from pathlib import Path

from skippipe_sched.problem.case import Case, load_case
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.timing.simulate import simulate
from skippipe_sched.timing.timeline import Timeline

FOLDER = Path(__file__).parent
CASES = ("gcp20", "world18", "world42", "clusters5", "cluster1")
# The published full pipeline uses three of its five data nodes and is not in the plan's file. These
# are columns of its placement that take as long as it is said to: 79.9 s with 27 microbatches.
PUBLISHED_COLUMNS = ((0, 14, 9, 13, 7, 19), (3, 15, 1, 16, 5, 17), (10, 8, 6, 12, 18, 2))


def load(name: str) -> Case:
    """One of `CASES`."""
    return load_case(FOLDER / f"{name}.yaml")


def published_plan() -> Plan:
    """The published SkipPipe plan of gcp20."""
    return load_plan(FOLDER / "published_gcp20.json")


def published_full_pipeline() -> Timeline:
    """The published full pipeline of gcp20 with all of its 30 microbatches, as we simulate it."""
    columns = [PUBLISHED_COLUMNS[microbatch % 3] for microbatch in range(30)]
    return simulate(load("gcp20"), published_plan().stages, columns)
