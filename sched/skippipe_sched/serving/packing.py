"""Placement of as many stages as possible with as few loaded bytes as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        found = _Packing(case, smallest, np.zeros((case.hosts, case.stages))).found(skips=0)
        if found is not None:
            cheap = None if loading is None else _Packing(case, by_size, loading).found(skips)
            return found if cheap is None else cheap
    return {}


@dataclass(eq=False)
class _Packing:
    """Depth-first search: the largest stage first, each on the cheapest and fullest host.

    `loading` is the cost of a stage on a host.
    """

    case: ServingCase
    stages: Sequence[int]
    loading: Float[np.ndarray, "hosts stages"]
    chosen: dict[int, int] = field(default_factory=dict)
    best: dict[int, int] | None = None
    best_cost: float = np.inf
    tries: int = 0

    def __post_init__(self) -> None:
        """Start with empty hosts, and compute the sizes and least costs of the stages."""
        self.order = sorted(self.stages, key=lambda stage: -self.case.stage_bytes[stage])
        self.free = empty_room(self.case).free_bytes
        self.sizes = self.case.stage_bytes[self.order]
        self.least = self.loading.min(axis=0)[self.order]

    def found(self, skips: int) -> dict[int, int] | None:
        """Choose a host for each stage except `skips` of them; None if no packing was found."""
        self.choose_from(0, 0.0, skips)
        return self.best

    def choose_from(self, position: int, cost: float, skips: int) -> None:
        """Choose hosts for the stages from this place in the order on."""
        sizes = self.sizes[position:]
        needed = len(sizes) - skips
        # The skipped stages may be the most expensive ones.
        least = np.sort(self.least[position:])[: max(needed, 0)].sum()
        if self.tries > MOST_TRIES or cost + least >= self.best_cost:
            return
        if needed <= 0:
            self.best, self.best_cost = dict(self.chosen), cost
            return
        if np.floor(self.free / sizes[-1]).sum() < needed or self.free.sum() < sizes[skips:].sum():
            return
        stage, size = self.order[position], sizes[0]
        for host in np.lexsort((self.free, self.loading[:, stage])).tolist():
            if self.free[host] >= size:
                self.tries += 1
                self.free[host] -= size
                self.chosen[stage] = host
                self.choose_from(position + 1, cost + float(self.loading[host, stage]), skips)
                del self.chosen[stage]
                self.free[host] += size
        if skips:
            self.choose_from(position + 1, cost, skips - 1)
