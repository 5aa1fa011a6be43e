"""The section `averaging`: when the replicas of a stage average, and what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.averaging import (
    DEFAULTS,
    EXACT,
    MODES,
    WIDTHS,
    AveragingPolicy,
    parse_averaging,
)

from skippipe_jax.config.choices import Choice, require_choices

# More iterations than the delay, so that nobody waits for totals, which are sent after changes.
BEHIND = 4
OF_OUTER_OPTIMIZER = ("rate", "momentum", "exact_steps")


@dataclass(frozen=True)
class AveragingConfig:
    """When the replicas of a stage average, and what.

    All keys beside `mode` are of `outer`. What training means then, the page on training says in
    formulas.

    Attributes:
        mode: `exact`: gradients, in every iteration, which ends when they are averaged; replicas
            never differ. `outer`: each replica takes steps of its own, and what it has changed is
            averaged while the next iterations run, so that nobody waits. It is other training.
        every: iterations in which all parameters are averaged once.
        fragments: parts in which this is done, spread over these iterations. A part is whole blocks
            of each stage, of which every stage has at least as many.
        delay: a part is applied at the end of the iteration that comes so many after the one at
            whose end it was sent, and has all that time to go round. 0: no iteration begins before
            it is applied.
        dtype: as what changes travel. `int8` has a scale for every 128 numbers. What rounding
            leaves is added to the next change.
        rate: of the outer optimizer, which is SGD with Nesterov momentum; the mean change is its
            gradient.
        momentum: of the outer optimizer.
        exact_steps: so many iterations at the beginning are as in `exact`.
    """

    mode: Annotated[str, Choice(MODES)] = EXACT.mode
    every: int = DEFAULTS["every"]
    fragments: int = DEFAULTS["fragments"]
    delay: int = DEFAULTS["delay"]
    dtype: Annotated[str, Choice(WIDTHS)] = DEFAULTS["dtype"]
    rate: float = 0.7
    momentum: float = 0.9
    exact_steps: int = 0

    def __post_init__(self):
        """Refuse what the planner refuses, an outer optimizer that is none, and what is unused."""
        require_choices(self, "averaging")
        given = {key: getattr(self, key) for key in DEFAULTS}
        if self.is_outer:
            parse_averaging({"mode": self.mode, **given}, "averaging")
        else:
            given |= {key: getattr(self, key) for key in OF_OUTER_OPTIMIZER}
            for key, value in given.items():
                if value != getattr(AveragingConfig, key):
                    raise InputError(
                        f"averaging.{key}",
                        value,
                        "is of mode: outer, and this is exact, in which every iteration averages",
                        "Remove it, or write averaging.mode: outer",
                    )
        # At rate 0 nothing is ever learnt.
        fields.number(self.rate, "averaging.rate", 0.0, above=True)
        fields.number(self.momentum, "averaging.momentum", 0.0)
        if self.momentum >= 1.0:
            raise InputError(
                "averaging.momentum",
                self.momentum,
                "must be less than 1",
                "Write a number from 0 on that is less than 1",
            )
        fields.integer(self.exact_steps, "averaging.exact_steps", 0)

    @property
    def is_outer(self) -> bool:
        """Whether replicas take steps of their own, sooner or later."""
        return self.mode != EXACT.mode

    @property
    def policy(self) -> AveragingPolicy:
        """What a case says of it."""
        if not self.is_outer:
            return EXACT
        return AveragingPolicy("outer", self.every, self.fragments, self.delay, self.dtype)

    @property
    def of_case(self) -> dict[str, Any]:
        """The keys by which a case says so: none where that is what it is without them."""
        if not self.is_outer:
            return {}
        return {"averaging": {key: getattr(self, key) for key in ("mode", *DEFAULTS)}}

    @property
    def iterations_apart(self) -> int:
        """So many iterations the hosts of a run are apart at most: 1 where all wait for all.

        Else totals of an iteration travel behind so many others, as changes do.
        """
        return self.delay + BEHIND if self.is_outer else 1

    @property
    def least_steps(self) -> int:
        """After so many iterations of a run every fragment has been applied."""
        return self.exact_steps + self.every + self.delay if self.is_outer else 0

    def is_exact(self, iteration: int) -> bool:
        """Tell whether an iteration, counted from 1, averages gradients before it ends."""
        return not self.is_outer or iteration <= self.exact_steps

    def sent_after(self, iteration: int) -> int | None:
        """The fragment that is sent at the end of an iteration, counted from 1; None if none is."""
        if self.is_exact(iteration):
            return None
        return self.policy.sent_after(iteration - self.exact_steps)

    def blocks_of(self, fragment: int, layers: int) -> range:
        """The blocks of a fragment, of the `layers` of a stage: block l is of l * fragments // L.

        Embedding and, at the other end, final norm and head are of the first and the last fragment.
        """
        ends = (-(-number * layers // self.fragments) for number in (fragment, fragment + 1))
        return range(*ends)

    def require_blocks(self, stage_layers: Sequence[int]) -> None:
        """Refuse more fragments than some stage has blocks, of which each stage has so many.

        Raises:
            InputError: naming the stage.
        """
        least = min(stage_layers)
        # A stage without blocks is refused with its cut.
        if self.is_outer and 1 <= least < self.fragments:
            raise InputError(
                "averaging.fragments",
                self.fragments,
                f"stage {stage_layers.index(least)} has {least} blocks, and a fragment is at least "
                "one block of every stage",
                f"Write {least} or less, or give this stage more in model.stage_layers",
            )
