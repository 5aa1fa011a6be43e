"""How hard domains are, by a short probe of a seed on each, and what that proposes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config.data import FOR_PRIORS
from skippipe_jax.experts.config import MEASURED, ArmConfig, ExpertsConfig
from skippipe_jax.experts.members import Members
from skippipe_jax.experts.tasks import Place, Scored


def measured(place: Place) -> dict[str, float]:
    """The loss [nats per token] of each domain's probe on it, once the probes have been scored.

    It is taken on the text for priors, so nothing is chosen by what perplexities are reported of.
    """
    probes = Members(place.config).probes()
    return {
        domain: Scored(place, (own,), own.name).scores(domain, FOR_PRIORS).loss
        for domain, own in probes.items()
    }


def proposal(config: ExpertsConfig, difficulty: Mapping[str, float], steps: int) -> dict[str, Any]:
    """Lanes by difficulty, and steps of their experts: their mean is `steps`, so is the compute.

    The steps of a lane are in proportion to the mean difficulty of its domains; the sizes are those
    that there are, from the first for the easiest, where there is one for each lane.
    """
    lanes = Members(config, difficulty).lanes(ArmConfig(lanes=MEASURED))
    hard = {lane: float(np.mean([difficulty[own] for own in of])) for lane, of in lanes.items()}
    mean = float(np.mean([difficulty[own] for of in lanes.values() for own in of]))
    proposed: dict[str, Any] = {
        "lanes": {lane: list(domains) for lane, domains in lanes.items()},
        "steps": {lane: max(1, round(steps * own / mean)) for lane, own in hard.items()},
    }
    if len(config.sizes) >= len(lanes):
        proposed["size"] = dict(zip(lanes, config.sizes, strict=False))
    return proposed


def told(config: ExpertsConfig, difficulty: Mapping[str, float], steps: int) -> str:
    """Return what the probe has found, for a reader, and the proposal as YAML to paste."""
    rows = [["domain", "nats per token"]]
    rows += [
        [name, f"{own:.4f}"] for name, own in sorted(difficulty.items(), key=lambda one: one[1])
    ]
    written = yaml.safe_dump(proposal(config, difficulty, steps), sort_keys=False)
    return "\n".join(
        [
            aligned(rows, [0]),
            "",
            f"# of experts with {steps} iterations on average, at the same compute:",
            written.rstrip(),
        ]
    )
