"""Several models as a command names them: read, and put together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config
from skippipe_jax.ensemble import posterior, priors
from skippipe_jax.inference.ensemble import Ensemble
from skippipe_jax.inference.model_source import read_model, require_same_split
from skippipe_jax.storage.run_dir import RunDir

FROM_FILE = "file"
"""The prior that a file says, beside `priors.PRIORS`."""


def read_ensemble(
    runs: Sequence[Path],
    folders: Sequence[Path],
    cut: int | None,
    overrides: Sequence[str],
    mix: str | None,
    prior: str,
    allowed: Collection[str],
) -> tuple[Ensemble, Config, list[int | None], str]:
    """Return the models of runs or Hugging Face folders as one ensemble, and its configuration.

    That is the first one's. Returns also the step of each, and which prior is meant: one of those
    `allowed`, or `FROM_FILE`.

    Raises:
        InputError: if one of them cannot be read, they cannot be mixed, there is no such prior, or
            the first holds out text that another run has trained on.
    """
    named = [*runs, *folders]
    for number, path in enumerate(named):
        if path in named[:number]:
            field = "--run" if runs else "--hf"
            raise InputError(field, str(path), "is named twice", "Name each model once")
    kind, log_prior = parse_prior(prior, len(named), allowed)
    read = [read_model(run, None, None, cut, overrides) for run in runs]
    read += [read_model(None, folder, None, cut, overrides) for folder in folders]
    config = read[0][1]
    for run in runs[1:]:
        require_same_split(config.data, RunDir(run).located(RunDir(run).config("--run").data))
    ensemble = Ensemble(
        [model for model, _, _ in read],
        log_prior,
        mix or posterior.POSTERIOR,
        [str(path) for path in named],
    )
    return ensemble, config, [step for _, _, step in read], kind


def parse_prior(
    value: str, experts: int, allowed: Collection[str]
) -> tuple[str, Float[np.ndarray, " expert"] | None]:
    """Parse `--prior`: the name of a prior, or the probabilities in a file.

    Raises:
        InputError: if it is not allowed, or no file with such weights.
    """
    if not value.endswith(".json"):
        if value in priors.PRIORS and value not in allowed:
            problem = "is estimated on text, which this command does not read"
            remedy = "Write uniform, or a FILE.json from evaluate --json"
            raise InputError("--prior", value, problem, remedy)
        if value not in allowed:
            remedy = f"Write {', '.join(allowed)}, or a FILE.json from evaluate --json"
            raise InputError("--prior", value, "is not a prior", remedy)
        return value, None
    content = fields.load_json(Path(value), "--prior")
    field = f"prior of {value}"
    weights = content.get("prior") if isinstance(content, dict) else None
    if not isinstance(weights, list) or len(weights) != experts:
        problem = f"is not a list of {experts} weights, one per model in the order of the options"
        raise InputError(field, weights, problem, "Evaluate these models with --json")
    # A weight of 0 would stay so, whatever the expert foretells.
    weights = [fields.number(one, field, 0.0, above=True) for one in weights]
    if not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
        raise InputError(field, weights, "does not add up to 1", "Evaluate these models again")
    return FROM_FILE, np.log(weights)
