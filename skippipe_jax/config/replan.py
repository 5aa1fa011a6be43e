"""The section `replan`: how a run looks for a better plan when its hosts have changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skippipe_sched import fields
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

from skippipe_jax.config.choices import Choice, require_choices


@dataclass(frozen=True)
class ReplanConfig:
    """How a run of independent hosts gets a better plan when its hosts have changed.

    At once it goes on by a quick plan. In the background, one host searches for a better one, which
    is taken after a step, and stages move to the nodes where that has them.

    Attributes:
        method: the planner's method.
        budget_s: seconds that a search may take, besides compiling it once on a machine. 0: never.
        gain: a plan is taken by which an iteration is shorter by more than this share, and only if
            that saves more time, in what is left of the run, than moving the states takes.
        drift: the search is made too where the seconds of iterations, in the median over a few,
            differ from those of the plan by more than this share of them; for it the seconds of
            nodes are corrected by what they were measured to compute. null: never.
    """

    method: Annotated[str, Choice(METHODS)] = DEFAULT_METHOD
    budget_s: float = DEFAULT_BUDGET_S
    gain: float = 0.03
    drift: float | None = None

    def __post_init__(self):
        """Refuse what is no method, and times and shares below 0."""
        require_choices(self, "replan")
        fields.number(self.budget_s, "replan.budget_s", 0.0)
        fields.number(self.gain, "replan.gain", 0.0)
        if self.drift is not None:
            fields.number(self.drift, "replan.drift", 0.0, above=True)
