"""The section `recipe`: several plans in one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
        path_share: instead of `path_length`, the share of all stages that its paths visit, rounded
            up.
        max_swaps: swaps that its paths have at most. null: as the plan's case says.
        from_share: instead of `from_step`, the share of the learning rate's schedule after which it
            begins: of `optimizer.decay_steps`, or else of `train.steps`.
        skipping: the share of its iterations that take its paths. In the others, spread evenly, all
            microbatches visit all stages in order.
    """

    from_step: int = 0
    path_length: int | None = None
    max_swaps: int | None = None
    from_share: float | None = None
    skipping: float = 1.0
    path_share: float | None = None

    def stages_visited(self, stages: int) -> int | None:
        """Count the stages, of so many, that its paths visit; None if as the plan's case says."""
        return self.path_length if self.path_share is None else math.ceil(self.path_share * stages)

    @property
    def name(self) -> str:
        """What the plan of this phase is called."""
        return f"from_{self.from_step}"

    def skips(self, iteration: int) -> bool:
        """Tell whether an iteration, counted from 0, takes the paths of this phase."""
        return int((iteration + 1) * self.skipping) > int(iteration * self.skipping)


PRESETS: dict[str, tuple[Phase, ...]] = {
    "quality": (Phase(from_share=0.4, skipping=0.0),),
    "robust": (Phase(from_share=0.4, path_share=0.5, skipping=0.5),),
}
"""The phases that follow the run's own plan, by the names of presets."""


@dataclass(frozen=True)
class RecipeConfig:
    """Changes of paths while a run trains.

    Attributes:
        preset: phases that were measured. With `quality`, all microbatches visit all stages in the
            last 60% of training: for the full model. With `robust`, every second iteration of that
            part takes paths that visit half of the stages: for inference with stages missing.
        full_every: every so many iterations, all microbatches visit all stages in order.
        phases: parts of training with paths of their own. Before the first, or with null, the
            plan's.
        redraw_every: every so many iterations, the next of the redrawn plans is taken.
        redraws: so many plans are sought for each phase, with different seeds.
        longest_redraw: redrawn plans that take more than so many times as long as the best of them
            are left out. null: none is.
    """

    preset: Annotated[str, Choice(PRESETS)] | None = None
    full_every: int | None = None
    phases: tuple[Phase, ...] | None = None
    redraw_every: int | None = None
    redraws: int = 1
    longest_redraw: float | None = 1.03

    def __post_init__(self):
        """Refuse phases that are out of order, and what has no effect."""
        require_choices(self, "recipe")
        fields.integer(self.redraws, "recipe.redraws", 1)
        if self.longest_redraw is not None:
            fields.number(self.longest_redraw, "recipe.longest_redraw", 1.0)
        for name in ("full_every", "redraw_every"):
            if getattr(self, name) is not None:
                fields.integer(getattr(self, name), f"recipe.{name}", 1)
        if self.preset is not None and self.phases is not None:
            raise InputError(
                "recipe.phases",
                [phase.name for phase in self.phases],
                f"the preset {self.preset} has phases of its own",
                "Remove recipe.phases, or recipe.preset",
            )
        for number, phase in enumerate(self.phases or ()):
            _require_phase(phase, f"recipe.phases[{number}]")
        for number, (before, after) in enumerate(pairwise(self.phases or ()), start=1):
            _require_order(before, after, f"recipe.phases[{number}]")
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

    def in_steps(self, steps: int) -> RecipeConfig:
        """Name the phases of the preset, and count them in iterations of a schedule of `steps`.

        Of phases that begin at the same iteration the last one counts.
        """
        phases = self.phases if self.preset is None else PRESETS[self.preset]
        if phases is None:
            return self
        begins = {
            phase.from_step if phase.from_share is None else round(phase.from_share * steps): phase
            for phase in phases
        }
        counted = [
            replace(phase, from_step=step, from_share=None)
            for step, phase in sorted(begins.items())
        ]
        return replace(self, preset=None, phases=tuple(counted))

    @property
    def begins_with_own(self) -> bool:
        """Whether the run's own plan is taken before the first phase begins."""
        return not self.phases or self.phases[0].from_step > 0

    @property
    def has_full_iterations(self) -> bool:
        """Tell whether all microbatches visit all stages in some iterations."""
        return self.full_every is not None or any(phase.skipping < 1 for phase in self.phases or ())

    @property
    def most_searches(self) -> int:
        """How many plans are sought beside the run's own, at most."""
        skipping = sum(phase.skipping > 0 for phase in self.phases or ())
        of_phases = (self.begins_with_own + skipping) * self.redraws
        return of_phases - self.begins_with_own + self.has_full_iterations


def _require_phase(phase: Phase, field: str) -> None:
    """Raise `InputError` unless a phase, counted in steps or shares, is one."""
    fields.number(phase.skipping, f"{field}.skipping", 0.0)
    if phase.skipping > 1:
        problem = "is more than all iterations"
        raise InputError(f"{field}.skipping", phase.skipping, problem, "Write a number up to 1")
    if phase.from_share is not None:
        fields.number(phase.from_share, f"{field}.from_share", 0.0)
        if phase.from_share >= 1:
            problem = "begins after the last iteration"
            raise InputError(f"{field}.from_share", phase.from_share, problem, "Write less than 1")
        if phase.from_step:
            problem = "says when the phase begins, and so does from_share"
            raise InputError(f"{field}.from_step", phase.from_step, problem, "Remove one of them")
    if phase.path_share is not None:
        fields.number(phase.path_share, f"{field}.path_share", 0.0, above=True)
        if phase.path_share > 1:
            problem = "is more than all stages"
            raise InputError(f"{field}.path_share", phase.path_share, problem, "Write 1 at most")
        if phase.path_length is not None:
            problem = "says how many stages are visited, and so does path_share"
            remedy = "Remove one of them"
            raise InputError(f"{field}.path_length", phase.path_length, problem, remedy)
    for name, least in (("from_step", 0), ("path_length", 1), ("path_share", 0), ("max_swaps", 0)):
        value = getattr(phase, name)
        if value is not None and name != "path_share":
            fields.integer(value, f"{field}.{name}", least)
        if value is not None and name != "from_step" and phase.skipping == 0:
            problem = "has no effect where no iteration of the phase skips"
            raise InputError(f"{field}.{name}", value, problem, "Remove it, or raise skipping")


def _require_order(before: Phase, after: Phase, field: str) -> None:
    """Raise `InputError` unless a phase begins after the one before it."""
    if (before.from_share is None) != (after.from_share is None):
        raise InputError(
            field,
            after.name,
            "its begin is told otherwise than that of the phase before it",
            "Write from_share for all phases, or from_step for all",
        )
    name = "from_step" if after.from_share is None else "from_share"
    earlier, later = getattr(before, name), getattr(after, name)
    if later <= earlier:
        raise InputError(
            f"{field}.{name}",
            later,
            f"the phase before it begins at {earlier}",
            "List the phases in the order in which they begin",
        )


NO_RECIPE = RecipeConfig()
"""Every iteration takes the run's own plan."""
