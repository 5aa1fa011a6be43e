"""The section `recipe`: several plans in one run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import Choice, require_choices


@dataclass(frozen=True)
class Phase:
    """A part of training, which lasts until the next begins.

    Attributes:
        from_step: it begins after so many iterations.
        path_length: stages that its paths visit. null: as the plan's case says.
        max_swaps: swaps that its paths have at most. null: as the plan's case says.
    """

    from_step: int = 0
    path_length: int | None = None
    max_swaps: int | None = None

    @property
    def name(self) -> str:
        """What the plan of this phase is called."""
        return f"from_{self.from_step}"


@dataclass(frozen=True)
class RecipeConfig:
    """How paths change while a run trains, and how stages make up for it.

    Attributes:
        full_every: every so many iterations, all microbatches visit all stages in order.
        phases: parts of training with paths of their own. Before the first, or with null, the
            plan's.
        redraw_every: every so many iterations, the next of the redrawn plans is taken.
        redraws: so many plans are sought for each phase, with different seeds.
        longest_redraw: redrawn plans that take more than so many times as long as the best of them
            are left out. null: none is.
        skip_scaling: with `inverse`, what a stage adds to its input is divided, in training, by the
            share of the iteration's microbatches that visit it (stochastic depth). With `none` it
            is not. Evaluation always uses stages as they are.
    """

    full_every: int | None = None
    phases: tuple[Phase, ...] | None = None
    redraw_every: int | None = None
    redraws: int = 1
    longest_redraw: float | None = 1.03
    skip_scaling: Annotated[str, Choice(("none", "inverse"))] = "none"

    def __post_init__(self):
        """Refuse phases that are out of order, and what has no effect."""
        require_choices(self, "recipe")
        fields.integer(self.redraws, "recipe.redraws", 1)
        if self.longest_redraw is not None:
            fields.number(self.longest_redraw, "recipe.longest_redraw", 1.0)
        for name in ("full_every", "redraw_every"):
            if getattr(self, name) is not None:
                fields.integer(getattr(self, name), f"recipe.{name}", 1)
        for number, phase in enumerate(self.phases or ()):
            for name, least in (("from_step", 0), ("path_length", 1), ("max_swaps", 0)):
                if getattr(phase, name) is not None:
                    field = f"recipe.phases[{number}].{name}"
                    fields.integer(getattr(phase, name), field, least)
        for number, (before, after) in enumerate(pairwise(self.phases or ()), start=1):
            if after.from_step <= before.from_step:
                raise InputError(
                    f"recipe.phases[{number}].from_step",
                    after.from_step,
                    f"the phase before it begins at {before.from_step}",
                    "List the phases in the order in which they begin",
                )
        for name, other, alone in (
            ("redraws", "redraw_every", self.redraws > 1 and self.redraw_every is None),
            ("redraw_every", "redraws", self.redraws == 1 and self.redraw_every is not None),
        ):
            if alone:
                raise InputError(
                    f"recipe.{name}",
                    getattr(self, name),
                    f"has no effect without recipe.{other}",
                    f"Write recipe.{other} too, or remove it",
                )

    @property
    def begins_with_own(self) -> bool:
        """Whether the run's own plan is taken before the first phase begins."""
        return not self.phases or self.phases[0].from_step > 0

    @property
    def most_searches(self) -> int:
        """How many plans are sought beside the run's own, at most."""
        of_phases = (self.begins_with_own + len(self.phases or ())) * self.redraws
        return of_phases - self.begins_with_own + (self.full_every is not None)


NO_RECIPE = RecipeConfig()
"""Every iteration takes the run's own plan."""
