"""The faults by which `churn` strikes a run, as a seed draws them, and at whom each is aimed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

PHASES = ("start", "forward", "ring", "prepared", "committed", "save")
FETCH, ASK, REGROUP = "fetch", "ask", "regroup"
"""A newcomer fetches the run, asks to be taken in, and takes its state."""
BEFORE, AFTER = "before", "after"
EDGES = (BEFORE, AFTER)
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, and SIGCONT after 5 s",
    "hang": "SIGSTOP without SIGCONT",
    "cut": "the link between two hosts is cut for a while",
    "partition": "a minority of the hosts is partitioned from the others for a while",
    "leave": "SIGTERM",
    "newcomer": "SIGKILL, and again of the host that replaces it, while that joins",
    "giver": "SIGKILL, and of a host that sends its state to the replacement, or of the leader",
    "reset": "all message connections of a host are reset",
    "sever": "all transfer connections of a host are cut",
    "silent": "the message connection of two hosts drops everything; new ones work",
    "storage": "operations of a host in the run directory fail for 3 s",
}
SIGNALS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "hang": "SIGSTOP",
    "leave": "SIGTERM",
    "newcomer": "SIGKILL",
    "giver": "SIGKILL",
}
RESET, SEVER, STORAGE = "reset", "sever", "storage"
"""Faults that a host has happen to itself, without a signal."""
STORAGE_S = 3.0
"""Seconds for which the folder of the run fails."""
OF_THE_NETWORK = frozenset({"cut", "partition", "silent"})
WHILE_JOINING = {
    "newcomer": ((FETCH, AFTER), (ASK, BEFORE), (REGROUP, BEFORE), (REGROUP, AFTER)),
    "giver": ((ASK, BEFORE), (REGROUP, BEFORE)),
}
"""When a newcomer is struck, or another while it joins."""
LEADER_EVERY = 3
JOINING_SHARE = 2 / 3


@dataclass(frozen=True)
class Fault:
    """What is done, to whom, and when.

    Attributes:
        number: from 0.
        kind: one of `KINDS`.
        phase: of a step, in which the first host is struck.
        edge: whether as the phase begins or as it ends.
        hits_leader: whether the first host is whoever leads then.
        order: of all hosts that may be struck; those that come first are struck before others.
        joining: the phase and the edge of joining at which a second host is struck.
        hits_holder: whether the second host holds the state that the newcomer takes, or leads.
        comes_by_join: whether who was lost comes back by `join`, where it can, or by `--resume`.
    """

    number: int
    kind: str
    phase: str
    edge: str
    hits_leader: bool
    order: tuple[int, ...]
    joining: tuple[str, str] = (ASK, BEFORE)
    hits_holder: bool = False
    comes_by_join: bool = False

    def struck(
        self,
        leader: int,
        members: Collection[int],
        can_spare: Callable[[Collection[int]], bool] = lambda _: True,
    ) -> tuple[int, ...]:
        """The host that is struck; in a network, the far end of its link or those beside it.

        `can_spare` says of hosts whether the run can go on if it loses them at once.
        """
        first = leader
        if not self.hits_leader or leader not in self.order:
            first = next(host for host in self.order if host != leader and host in members)
        others = [host for host in self.order if host != first and host in members]
        if self.kind in ("cut", "silent"):
            return (first, others[0])
        struck = (first,)
        if self.kind == "partition":
            beside = self.number % max(1, (len(members) - 1) // 2)
            for other in others:
                if len(struck) <= beside and can_spare((*struck, other)):
                    struck = (*struck, other)
        return struck


def draw(
    seed: int,
    hosts: int,
    count: int,
    kinds: Sequence[str],
    spared: int | None = None,
) -> list[Fault]:
    """Faults of all kinds equally often, at all phases in turn, a third of them on the leader.

    The `spared` host is never struck, also where it leads.
    """
    chance, of_joining = random.Random(seed), random.Random(f"joining {seed}")
    dealt: list[str] = []
    while len(dealt) < count:
        dealt += chance.sample(kinds, len(kinds))
    faults = []
    on_leader = 0
    for number in range(count):
        if number % LEADER_EVERY == 0:
            on_leader = number + chance.randrange(LEADER_EVERY)
        drawn = chance.sample(range(hosts), hosts)
        order = tuple(host for host in drawn if host != spared)
        edge, phase = chance.choice(EDGES), PHASES[number % len(PHASES)]
        points = WHILE_JOINING.get(dealt[number], ((ASK, BEFORE),))
        joining = of_joining.choice(points), of_joining.random() < 0.5
        comes = of_joining.random() < JOINING_SHARE
        faults.append(
            Fault(number, dealt[number], phase, edge, number == on_leader, order, *joining, comes)
        )
    return faults


def moments(seed: int, count: int, every_s: float) -> list[float]:
    """When faults come, one every `every_s` seconds on average [s, from the first moment].

    They come at any time as likely as at any other: the gaps between them are exponential.
    """
    chance = random.Random(f"moments {seed}")
    return sorted(chance.uniform(0.0, count * every_s) for _ in range(count))


def links_between(struck: Sequence[int], kind: str, hosts: int) -> list[tuple[int, int]]:
    """The directed links that a fault of the network cuts."""
    if kind == "cut":
        one, other = struck
        return [(one, other), (other, one)]
    beyond = [host for host in range(hosts) if host not in struck]
    pairs = [(one, other) for one in struck for other in beyond]
    return pairs + [(other, one) for one, other in pairs]


def aim_of(folder: Path, host: int) -> Path:
    """Where a host looks whether, when and how it shall be struck."""
    return folder / f"aim{host}.json"
