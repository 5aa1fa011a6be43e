"""Small cases of services, and all that can be done with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from skippipe_sched.serving.case import HeldStages, Route, ServingCase
from skippipe_sched.serving.simulate import simulate

# More would take long, and what does not repeat until then is counted from the start.
STEPS = 100


def service(**changes) -> ServingCase:
    """A front and two hosts with room for one of two further stages each; a second is a unit."""
    given = {
        "step_s": np.ones((3, 3)),
        "room_bytes": np.ones(3),
        "stage_bytes": np.ones(3),
        "latency_s": np.ones((3, 3)),
        "bandwidth": np.ones((3, 3)),
        "activation_bytes": 1.0,
        "groups": 1,
        "slots": 1,
        "head_s": 1.0,
    }
    return ServingCase(**given | changes)


@st.composite
def services(draw: st.DrawFn, hosts: int = 4, stages: int = 4, groups: int = 3) -> ServingCase:
    """A service of at most so many hosts, stages and groups; times are whole numbers."""
    size = draw(st.integers(2, hosts)), draw(st.integers(1, stages))
    seed = draw(st.integers(0, 2**32 - 1))
    groups = draw(st.integers(1, groups))
    return random_service(np.random.default_rng(seed), size, groups)


def random_service(random: np.random.Generator, size: tuple[int, int], groups: int) -> ServingCase:
    hosts, stages = size
    stage_bytes = random.integers(1, random.choice([2, 5]), stages).astype(float)
    room_bytes = random.integers(0, 6, hosts).astype(float)
    room_bytes[0] += stage_bytes[0]
    step_s = random.integers(1, 6, (hosts, 1)) * np.ones((1, stages))
    if random.random() < 0.5:
        step_s += random.integers(0, 4, (hosts, stages))
    return ServingCase(
        step_s=step_s,
        room_bytes=room_bytes,
        stage_bytes=stage_bytes,
        latency_s=random.integers(0, random.choice([2, 20]), (hosts, hosts)).astype(float),
        bandwidth=2.0 ** -random.integers(0, 4, (hosts, hosts)),
        activation_bytes=1.0,
        groups=groups,
        slots=int(random.integers(1, 4)),
        head_s=float(random.integers(0, 3)),
    )


def fewest_unheld(case: ServingCase) -> int:
    """How many stages have no host at least, after trying all hosts of each."""
    return min(
        route.count(None)
        for route in itertools.product([0], *[[None, *range(case.hosts)]] * (case.stages - 1))
        if fits(case, [route])
    )


def fits(case: ServingCase, routes: list[Route] | tuple[Route, ...]) -> bool:
    """Whether hosts have room for all stages that routes visit on them."""
    held = {(host, stage) for route in routes for stage, host in enumerate(route)}
    needed = np.zeros(case.hosts)
    for host, stage in held:
        if host is not None:
            needed[host] += case.stage_bytes[stage]
    return bool((needed <= case.room_bytes).all())


def all_routes(case: ServingCase) -> Iterator[list[Route]]:
    """For each choice of stages that have no host, as few as possible, all routes that may be."""
    unheld = fewest_unheld(case)
    for left_out in itertools.combinations(range(1, case.stages), unheld):
        hosts = [[None] if s in left_out else range(case.hosts) for s in range(1, case.stages)]
        yield [route for route in itertools.product([0], *hosts) if fits(case, [route])]


def least_s(case: ServingCase) -> float:
    """Seconds per token of one sequence alone, of all placements and routes."""
    return min(
        simulate(case, [route]).seconds_per_token for routes in all_routes(case) for route in routes
    )


def most_tokens_per_s(case: ServingCase) -> float:
    """Tokens per second of all groups, of all placements and routes.

    Which group has which of the routes, may still make a difference.
    """
    return max(
        simulate(case, chosen, STEPS).tokens_per_s
        for routes in all_routes(case)
        for chosen in itertools.combinations_with_replacement(routes, case.groups)
        if fits(case, chosen)
    )


def routes_through(placement: HeldStages, stages: int, lost: frozenset[int] = frozenset()):
    """All routes through the hosts that hold the stages and are not lost."""
    hosts = [
        [h for h, own in enumerate(placement) if stage in own and h not in lost] or [None]
        for stage in range(stages)
    ]
    return [*itertools.product(*hosts)]
