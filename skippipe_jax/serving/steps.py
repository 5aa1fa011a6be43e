"""Steps in flight along the hosts of a service, tracked by its front."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from skippipe_sched.serving.case import FRONT

from skippipe_jax.errors import PeerError
from skippipe_jax.serving.routing import Route

Hop = tuple[int, int]
"""Source host and target host of a transfer."""


class RouteFailed(PeerError):
    """Route whose host is gone or cannot be reached by another host on it."""


@dataclass(frozen=True)
class PendingStep:
    """Step whose result has not returned.

    Attributes:
        group: group of its sequences.
        epoch: epoch of the group's route.
        number: greater than the numbers of all earlier steps.
        route: the part of the route that it runs along.
        is_decoding: whether it is a token of each sequence, not a span of a prompt.
        done: its result.
    """

    group: int
    epoch: int
    number: int
    route: Route
    is_decoding: bool
    done: Future[np.ndarray]

    @property
    def hops(self) -> set[Hop]:
        """Hops of the step, from the front and back to it."""
        return {*pairwise([FRONT, *(leg.host for leg in self.route), FRONT])}


class PendingSteps:
    """Steps whose results have not returned, by group in the order of sending."""

    def __init__(self):
        """Start without steps."""
        self._by_group: dict[int, deque[PendingStep]] = defaultdict(deque)
        self._numbers = itertools.count()

    def new(self, group: int, epoch: int, route: Route, *, is_decoding: bool) -> PendingStep:
        """Create a step to be sent; any thread may call this."""
        return PendingStep(group, epoch, next(self._numbers), route, is_decoding, Future())

    def add(self, step: PendingStep) -> None:
        """Add a step as it is sent; drop the group's steps of abandoned routes."""
        sent = self._by_group[step.group]
        while sent and sent[0].epoch < step.epoch:
            sent.popleft()
        sent.append(step)

    def take(self, group: int, number: int) -> PendingStep | None:
        """Remove and return the step whose result has arrived; None if its route was abandoned."""
        sent = self._by_group[group]
        if not sent or number < sent[0].number:
            return None
        if sent[0].number < number:
            # A host has reconnected to the next one, and the steps in between are lost.
            self.fail(sent[0].hops, "a step was lost between hosts")
            return None
        return sent.popleft()

    def fail(self, hops: set[Hop], why: str) -> None:
        """Fail all steps of each group that has a step with one of these hops."""
        for sent in self._by_group.values():
            if any(step.hops & hops for step in sent):
                while sent:
                    sent.popleft().done.set_exception(RouteFailed(why))

    def fail_host(self, host: int) -> None:
        """Fail all steps of each group that has a step on this host."""
        hops = {hop for sent in self._by_group.values() for step in sent for hop in step.hops}
        self.fail({hop for hop in hops if host in hop}, f"host {host} failed")
