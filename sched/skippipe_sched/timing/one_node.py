"""Least time in which one node does its work, if nothing else delays it."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

# Above this number of interleavings of its operations, a weaker bound is used.
MOST_INTERLEAVINGS = 1_000


class NodeWork(NamedTuple):
    """Work of one node: number of microbatches, its memory, and all durations [s].

    `away_s` is the least time between a forward and the loss, `away_back_s` between the loss and
    the backward. On an inner node the loss takes no time.
    """

    microbatches: int
    memory: int
    forward_s: float
    away_s: float
    loss_s: float
    away_back_s: float
    backward_s: float


@lru_cache(maxsize=1024)
def busy_s(work: NodeWork) -> float:
    """Find the least time [s] from first forward to last backward, on a node by itself.

    The node runs one operation at a time, and at most `memory` microbatches are between the start
    of their forward and the end of their backward. Microbatches differ only in when they are away,
    so the first forward may be paired with the first loss and the first backward, and so on:
    sorting keeps every least distance. The search then covers the interleavings of the three
    sequences, and follows every interleaving that is not dominated, unless they become too many.
    """
    microbatches, memory, forward_s, away_s, loss_s, away_back_s, backward_s = work
    # By numbers of started operations: when the node is free, and when losses and backwards can
    # start.
    states = {(0, 0, 0): [((0.0,), (), ())]}
    followed = 0
    for _ in range(3 * microbatches):
        longer = defaultdict(set)
        for (forwards, losses, backwards), futures in states.items():
            followed += len(futures)
            for (free_s,), to_loss, to_backward in futures:
                if forwards < microbatches and forwards - backwards < memory:
                    end_s = free_s + forward_s
                    future = _future(end_s, (*to_loss, end_s + away_s), to_backward)
                    longer[forwards + 1, losses, backwards].add(future)
                if to_loss:
                    end_s = max(free_s, to_loss[0]) + loss_s
                    future = _future(end_s, to_loss[1:], (*to_backward, end_s + away_back_s))
                    longer[forwards, losses + 1, backwards].add(future)
                if to_backward:
                    end_s = max(free_s, to_backward[0]) + backward_s
                    future = _future(end_s, to_loss, to_backward[1:])
                    longer[forwards, losses, backwards + 1].add(future)
        if followed > MOST_INTERLEAVINGS:
            return relaxed_busy_s(work)
        states = {key: _undominated(futures) for key, futures in longer.items()}
    (ends,) = states.values()
    return min(free_s for (free_s,), _, _ in ends)


_Future = tuple[tuple[float], tuple[float, ...], tuple[float, ...]]


def _future(free_s: float, to_loss: tuple[float, ...], to_backward: tuple[float, ...]) -> _Future:
    """Raise times to the time at which the node is free: earlier ones make no difference."""
    return (
        (free_s,),
        tuple(max(free_s, time_s) for time_s in to_loss),
        tuple(max(free_s, time_s) for time_s in to_backward),
    )


def _undominated(futures: set[_Future]) -> list[_Future]:
    kept: list[tuple[float, ...]] = []
    result = []
    for future in sorted(futures):
        times = sum(future, ())
        if not any(all(a <= b for a, b in zip(k, times, strict=True)) for k in kept):
            kept.append(times)
            result.append(future)
    return result


def relaxed_busy_s(work: NodeWork) -> float:
    """Bound `busy_s` from below [s]: forwards, losses and backwards as if each on its own node."""
    microbatches, memory, forward_s, away_s, loss_s, away_back_s, backward_s = work
    forward = loss = backward = 0.0
    ends: list[float] = []
    for number in range(microbatches):
        forward += forward_s
        if number >= memory:
            forward = max(forward, ends[number - memory] + forward_s)
        loss = max(loss, forward + away_s) + loss_s
        backward = max(backward, loss + away_back_s) + backward_s
        ends.append(backward)
    return max(backward, microbatches * (forward_s + loss_s + backward_s))
