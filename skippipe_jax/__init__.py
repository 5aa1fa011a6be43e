"""Training of LLaMA models over partial, reordered pipeline paths, on one machine or on many hosts.

``import skippipe_jax as sp`` provides the names in `__all__`; each loads its module at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import end_quietly_on_interrupt

if TYPE_CHECKING:
    from skippipe_sched.errors import InputError
    from skippipe_sched.problem.plan import Plan, load_plan

    from skippipe_jax.cluster.joining import connect
    from skippipe_jax.config import Config, load_config
    from skippipe_jax.config.sampling import Sampling as SamplingParams
    from skippipe_jax.inference.ensemble import Ensemble
    from skippipe_jax.inference.model_source import load_model
    from skippipe_jax.inference.run import Run
    from skippipe_jax.inference.staged_model import StagedModel as Model
    from skippipe_jax.storage.records import StepMetrics
    from skippipe_jax.training.callbacks.base import Callback, RunView
    from skippipe_jax.training.planning import make_plan
    from skippipe_jax.training.trainer import RunResult, Trainer

__all__ = [
    "Callback",
    "Config",
    "Ensemble",
    "InputError",
    "Model",
    "Plan",
    "Run",
    "RunResult",
    "RunView",
    "SamplingParams",
    "StepMetrics",
    "Trainer",
    "connect",
    "load_config",
    "load_model",
    "load_plan",
    "make_plan",
]

_MODULES = {
    "Callback": "skippipe_jax.training.callbacks.base",
    "Config": "skippipe_jax.config",
    "Ensemble": "skippipe_jax.inference.ensemble",
    "InputError": "skippipe_sched.errors",
    "Model": "skippipe_jax.inference.staged_model:StagedModel",
    "Plan": "skippipe_sched.problem.plan",
    "Run": "skippipe_jax.inference.run",
    "RunResult": "skippipe_jax.training.trainer",
    "RunView": "skippipe_jax.training.callbacks.base",
    "SamplingParams": "skippipe_jax.config.sampling:Sampling",
    "StepMetrics": "skippipe_jax.storage.records",
    "Trainer": "skippipe_jax.training.trainer",
    "connect": "skippipe_jax.cluster.joining",
    "load_config": "skippipe_jax.config",
    "load_model": "skippipe_jax.inference.model_source",
    "load_plan": "skippipe_sched.problem.plan",
    "make_plan": "skippipe_jax.training.planning",
}
_FORMER = {
    "Ending": "RunResult",
    "Sampling": "SamplingParams",
    "StagedModel": "Model",
    "parse_config": "Config.from_dict",
}

end_quietly_on_interrupt()


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _MODULES:
        now = f"; it is now {_FORMER[name]}" if name in _FORMER else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{now}")
    module, _, own = _MODULES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), own or name)
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
