"""How long it takes until hosts that lack the state of a stage have it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from skippipe_sched.problem.case import Case

# Parameters, and the two moments of AdamW.
OF_PARAMETERS = 3.0


def buddies(placement: Sequence[Sequence[int]]) -> dict[int, int]:
    """Who keeps a copy of each stage: the first node of the next stage that has one, in a circle.

    The copy comes from the first node of the stage itself, as in a run.
    """
    further = {
        stage: [*placement[stage + 1 :], *placement[:stage]]
        for stage, nodes in enumerate(placement)
        if nodes
    }
    first = {
        stage: [node for nodes in others for node in nodes] for stage, others in further.items()
    }
    return {stage: nodes[0] for stage, nodes in first.items() if nodes}


class States:
    """Fetches of the states of a case's stages. Each comes over the best link to one who has it.

    Fetches go side by side, and none waits for another: a set of them takes as long as its longest.
    A state is `factor` times `stage_bytes`, which are the gradients that its replicas average.
    """

    def __init__(self, case: Case, factor: float):
        """`factor` of 0: states take no longer than the latency of a link."""
        self._factor = factor
        self._stage_bytes = case.stage_bytes
        self._latency_s, self._bandwidth = case.link_matrices

    def fetched_s(self, stage: int, targets: Iterable[int], holders: Collection[int]) -> float:
        """Seconds until all `targets` have the state of a stage that the `holders` have."""
        return self._seconds(self._factor * self._stage_bytes[stage], targets, holders)

    def averaged_s(self, stage: int, targets: Iterable[int], beside: Sequence[set[int]]) -> float:
        """Seconds until all `targets` have the parameters of two neighbours, one after the other.

        `beside` are the nodes that hold the stage before and the stage after; equal stages have as
        many bytes.
        """
        targets, size = list(targets), self._stage_bytes[stage]
        return sum(self._seconds(size, targets, holders) for holders in beside)

    def copied_s(self, placement: Sequence[Sequence[int]], parts: int) -> float:
        """Seconds until the buddies of all stages have so small a part of their copies."""
        return max(
            (
                self._seconds(
                    self._factor * self._stage_bytes[stage] / parts, [node], placement[stage][:1]
                )
                for stage, node in buddies(placement).items()
            ),
            default=0.0,
        )

    def _seconds(self, size: float, targets: Iterable[int], holders: Collection[int]) -> float:
        lacking = [node for node in targets if node not in holders]
        if not lacking:
            return 0.0
        return float(self._each_s(size, lacking, holders).min(axis=0).max())

    def _each_s(self, size: float, targets: Sequence[int], holders: Collection[int]) -> np.ndarray:
        """Seconds from each holder (row) to each target."""
        pairs = np.ix_(sorted(holders), targets)
        return self._latency_s[pairs] + size / self._bandwidth[pairs]
