"""Trains LLaMA models over partial, reordered pipeline paths, on one machine or on many hosts.

``import skippipe_jax as sp`` offers what `__all__` names, and loads nothing until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import end_quietly_on_interrupt

if TYPE_CHECKING:
    from skippipe_sched.errors import InputError
    from skippipe_sched.problem.plan import Plan, load_plan

    from skippipe_jax.config import Config, load_config, parse_config
    from skippipe_jax.config.sampling import Sampling
    from skippipe_jax.inference.ensemble import Ensemble
    from skippipe_jax.inference.run import Run
    from skippipe_jax.inference.staged_model import StagedModel
    from skippipe_jax.training.callback import Callback
    from skippipe_jax.training.planning import make_plan
    from skippipe_jax.training.trainer import Ending, Trainer

__all__ = [
    "Callback",
    "Config",
    "Ending",
    "Ensemble",
    "InputError",
    "Plan",
    "Run",
    "Sampling",
    "StagedModel",
    "Trainer",
    "load_config",
    "load_plan",
    "make_plan",
    "parse_config",
]

_PLACES = {
    "Callback": "skippipe_jax.training.callback",
    "Config": "skippipe_jax.config",
    "Ending": "skippipe_jax.training.trainer",
    "Ensemble": "skippipe_jax.inference.ensemble",
    "InputError": "skippipe_sched.errors",
    "Plan": "skippipe_sched.problem.plan",
    "Run": "skippipe_jax.inference.run",
    "Sampling": "skippipe_jax.config.sampling",
    "StagedModel": "skippipe_jax.inference.staged_model",
    "Trainer": "skippipe_jax.training.trainer",
    "load_config": "skippipe_jax.config",
    "load_plan": "skippipe_sched.problem.plan",
    "make_plan": "skippipe_jax.training.planning",
    "parse_config": "skippipe_jax.config",
}

end_quietly_on_interrupt()


def __getattr__(name: str) -> Any:
    """Load what is offered when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
