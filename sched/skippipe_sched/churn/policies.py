"""Policies for a run that loses hosts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Policy(NamedTuple):
    """A recovery policy.

    `survives` says whether the others continue while every stage has a host; otherwise all hosts
    end and restart. `is_exact` says whether the parameters become those of a run without faults.
    """

    about: str
    survives: bool
    is_exact: bool


RESTART, STOP, REWIND = "restart", "stop", "rewind"
BUDDY, AVERAGE, SKIP = "buddy", "average", "skip"

POLICIES = {
    RESTART: Policy("all hosts stop and restart from the last checkpoint", False, True),
    STOP: Policy("remaining hosts continue; if a stage is lost, all restart", True, True),
    REWIND: Policy("if a stage is lost, all hosts return to the last checkpoint", True, True),
    BUDDY: Policy("a lost stage is restored from its last buddy checkpoint", True, False),
    AVERAGE: Policy("a lost stage gets the mean of its neighbors' parameters", True, False),
    SKIP: Policy("a lost stage is bypassed until a host serves it again", True, False),
}


def recovery_of(
    policy: str, lost: Sequence[int], held: Sequence[Collection[int]], copied: Collection[int]
) -> str:
    """Choose the recovery of lost stages: that of the policy, or `REWIND` if it is impossible.

    `held` are the nodes that hold the state of each stage, `copied` the stages whose copy remains.
    """
    last = len(held) - 1
    if policy == BUDDY:
        can = all(stage in copied for stage in lost)
    elif policy == AVERAGE:
        can = all(0 < stage < last and held[stage - 1] and held[stage + 1] for stage in lost)
    elif policy == SKIP:
        can = 0 not in lost
    else:
        can = policy == STOP
    return policy if can else REWIND
