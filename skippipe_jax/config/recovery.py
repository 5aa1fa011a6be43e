"""The section `recovery`: how a run goes on when hosts are lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skippipe_sched import fields

from skippipe_jax.config.choices import Choice, require_choices

REWIND, BUDDY, AVERAGE, SKIP, STOP = LOST_STAGE = Choice(
    ("rewind", "buddy", "average", "skip", "stop")
)


@dataclass(frozen=True)
class RecoveryConfig:
    """How a run of independent hosts goes on when some are lost.

    Where a replica of every stage is left, the others take over the paths of what is lost at once.

    Attributes:
        lost_stage: what happens when no replica of a stage is left. `rewind`: every stage goes back
            to the last checkpoint, on the hosts that are left. `buddy`: the lost stage goes on with
            a copy that a host of another stage keeps of it, some steps old; the others stay where
            they are. `average`: it gets the mean of the stages before and after it, weighted by the
            norms of their gradients. `skip`: paths lead past it until a host serves it again, which
            reads it from the last checkpoint. `stop`: the run ends. Only `rewind` is exact; it also
            takes the place of `buddy` where the copy is lost too, of `average` for the first stage,
            the last one, and one with another number of blocks than those beside it, and of `skip`
            for the first stage, and before the first checkpoint. With `averaging.mode: outer` there
            are `rewind` and `stop` alone.
        buddy_every: with `buddy`, copies are made of the states after every so many iterations,
            and are on their way during as many: each iteration sends this part of them.
    """

    lost_stage: Annotated[str, LOST_STAGE] = REWIND
    buddy_every: int = 10

    def __post_init__(self):
        """Refuse what is no way to go on, and copies that are never made."""
        require_choices(self, "recovery")
        fields.integer(self.buddy_every, "recovery.buddy_every", 1)
