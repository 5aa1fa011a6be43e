"""The section `plan`: where the plan comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

from skippipe_jax.config.choices import Choice, require_choices


@dataclass(frozen=True)
class PlanConfig:
    """Where the plan comes from: a plan file, or a case that is planned for when the run starts.

    `plan: auto` is short for `plan: {measure: true}`, and what a single host does where no plan is
    named.

    Attributes:
        file: a plan (JSON).
        case: a case: the path of a YAML file, or the case itself, whose link table then lies beside
            the config file. `activation_bytes`, `stage_bytes` and `averaging` follow from the
            model, the data, the network and the section `averaging` where it leaves them out or
            says `auto`; `memory: auto` follows from `memory_bytes` besides.
        measure: links, seconds, bytes and memory are measured when the run starts, and a plan is
            made for them. `case`, or the case of the plan in `file`, says what cannot be measured:
            names of locations, stages, path lengths, microbatches and rules, as far as the defaults
            of `skippipe measure` do not suit; what else it says is left aside.
        method: the planner's method.
        seed: of the search.
        budget_s: seconds that the search for one plan may take.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"measure": True}}

    file: str | None = None
    case: str | dict | None = None
    measure: bool = False
    method: Annotated[str, Choice(METHODS)] = DEFAULT_METHOD
    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S

    @property
    def is_missing(self) -> bool:
        """Tell whether it says nowhere where the plan comes from."""
        return self.file is None and self.case is None and not self.measure

    def __post_init__(self):
        """Refuse a plan from two places, or from none."""
        require_choices(self, "plan")
        fields.integer(self.seed, "plan.seed", 0, fields.LARGEST_SEED)
        fields.number(self.budget_s, "plan.budget_s", 0.0, above=True)
        if self.file is not None and self.case is not None:
            problem = "plan.case is given too, and a plan holds its case"
            remedy = "Set plan.case=null to take the plan, or plan.file=null to plan for the case"
            raise InputError("plan.file", self.file, problem, remedy)
