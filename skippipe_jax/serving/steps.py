"""The steps of a service that are on their way along hosts, as its front sees them."""

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
"""From a host to another."""


class RouteLost(PeerError):
    """A host along a route is gone, or one that another host there does not reach."""


@dataclass(frozen=True)
class PendingStep:
    """A step that has not come back.

    Attributes:
        group: whose sequences it is of.
        epoch: that of the group's route.
        number: greater than those of all steps before.
        route: the part of the route that it runs along.
        is_decoding: whether it is a token of each sequence, not a span of a prompt.
        done: what comes back of it.
    """

    group: int
    epoch: int
    number: int
    route: Route
    is_decoding: bool
    done: Future[np.ndarray]

    @property
    def hops(self) -> set[Hop]:
        """The hops that it makes, from the front and back to it."""
        return {*pairwise([FRONT, *(leg.host for leg in self.route), FRONT])}


class PendingSteps:
    """All steps that have not come back, each group's in the order in which they were sent."""

    def __init__(self):
        """Begin with none."""
        self._of_groups: dict[int, deque[PendingStep]] = defaultdict(deque)
        self._numbers = itertools.count()

    def new(self, group: int, epoch: int, route: Route, *, is_decoding: bool) -> PendingStep:
        """Return a step that is to be sent; any thread may call this."""
        return PendingStep(group, epoch, next(self._numbers), route, is_decoding, Future())

    def add(self, step: PendingStep) -> None:
        """Take in a step as it is sent; nobody waits for those of routes that were given up."""
        sent = self._of_groups[step.group]
        while sent and sent[0].epoch < step.epoch:
            sent.popleft()
        sent.append(step)

    def take(self, group: int, number: int) -> PendingStep | None:
        """Return the step that has come back; None if its route was given up."""
        sent = self._of_groups[group]
        if not sent or number < sent[0].number:
            return None
        if sent[0].number < number:
            # A host has connected anew to the next one, and what was on its way there is lost.
            self.lose(sent[0].hops, "a step has got lost between hosts")
            return None
        return sent.popleft()

    def lose(self, hops: set[Hop], why: str) -> None:
        """Give up the steps of all groups of which one makes such a hop."""
        for sent in self._of_groups.values():
            if any(step.hops & hops for step in sent):
                while sent:
                    sent.popleft().done.set_exception(RouteLost(why))

    def lose_host(self, host: int) -> None:
        """Give up the steps of all groups of which one goes by a host."""
        hops = {hop for sent in self._of_groups.values() for step in sent for hop in step.hops}
        self.lose({hop for hop in hops if host in hop}, f"host {host} is lost")
