"""Placement of as many stages as possible with as few loaded bytes as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from skippipe_sched.serving.case import ServingCase
from skippipe_sched.serving.shortest import empty_room

MOST_TRIES = 5_000
"""Limit on tried placements of a stage; it is reached only where sizes barely fit together."""


def hosts_of_stages(
    case: ServingCase, loading: Float[np.ndarray, "hosts stages"] | None = None
) -> dict[int, int]:
    """Choose a host for each stage after 0, or for as many as the memory of all hosts allows.

    The choice is as cheap as possible if `loading` gives the cost of a stage on a host. If stages
    barely fit together, one that would fit may be left out (`MOST_TRIES`).
    """
    by_size = (1 + np.argsort(case.stage_bytes[1:], kind="stable")).tolist()
    # If any choice of this many stages fits, so do the smallest.
    for skips in range(len(by_size)):
        smallest = by_size[: len(by_size) - skips]
        found = _packed(case, smallest, np.zeros((case.hosts, case.stages)), 0)
        if found is not None:
            cheap = None if loading is None else _packed(case, by_size, loading, skips)
            return found if cheap is None else cheap
    return {}


def _packed(
    case: ServingCase,
    stages: Sequence[int],
    loading: Float[np.ndarray, "hosts stages"],
    skips: int,
) -> dict[int, int] | None:
    """Choose hosts for all stages except `skips` of them; None if no packing was found.

    It is a depth-first search: the largest stage first, each on the cheapest and fullest host.
    `loading` is the cost of a stage on a host.
    """
    order = sorted(stages, key=lambda stage: -case.stage_bytes[stage])
    free, all_sizes = empty_room(case).free_bytes, case.stage_bytes[order]
    least_costs = loading.min(axis=0)[order]
    chosen: dict[int, int] = {}
    best: dict[int, int] | None = None
    best_cost, tries = np.inf, 0

    def choose_from(position: int, cost: float, skips: int) -> None:
        """Choose hosts for the stages from this place in the order on."""
        nonlocal best, best_cost, tries
        sizes = all_sizes[position:]
        needed = len(sizes) - skips
        # The skipped stages may be the most expensive ones.
        least = np.sort(least_costs[position:])[: max(needed, 0)].sum()
        if tries > MOST_TRIES or cost + least >= best_cost:
            return
        if needed <= 0:
            best, best_cost = dict(chosen), cost
            return
        if np.floor(free / sizes[-1]).sum() < needed or free.sum() < sizes[skips:].sum():
            return
        stage, size = order[position], sizes[0]
        for host in np.lexsort((free, loading[:, stage])).tolist():
            if free[host] >= size:
                tries += 1
                free[host] -= size
                chosen[stage] = host
                choose_from(position + 1, cost + float(loading[host, stage]), skips)
                del chosen[stage]
                free[host] += size
        if skips:
            choose_from(position + 1, cost, skips - 1)

    choose_from(0, 0.0, skips)
    return best
