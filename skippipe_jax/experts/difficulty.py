"""Difficulty of domains by a short probe of a seed on each, and lanes and steps to match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config.data import FOR_PRIORS
from skippipe_jax.experts.config import MEASURED, ArmConfig, ExpertsConfig
from skippipe_jax.experts.members import MemberFactory
from skippipe_jax.experts.tasks import Scored, Workspace


def measured_losses(place: Workspace) -> dict[str, float]:
    """Return the loss [nats per token] of each domain's probe on it, after the probes are scored.

    The loss is on the text for priors, so that no choice depends on the text of the reported
    perplexities.
    """
    probes = MemberFactory(place.config).probes()
    return {
        domain: Scored(place, (member,)).scores(domain, FOR_PRIORS).loss
        for domain, member in probes.items()
    }


def proposal(config: ExpertsConfig, difficulty: Mapping[str, float], steps: int) -> dict[str, Any]:
    """Return lanes by difficulty, with steps for their experts that keep the compute the same.

    The steps of a lane are proportional to the mean difficulty of its domains, and their mean is
    `steps`. If there is a size for each lane, the sizes are assigned in order, the first to the
    easiest lane.
    """
    lanes = MemberFactory(config, difficulty).lanes(ArmConfig(lanes=MEASURED))
    hard = {
        lane: float(np.mean([difficulty[domain] for domain in of])) for lane, of in lanes.items()
    }
    mean = float(np.mean([difficulty[domain] for of in lanes.values() for domain in of]))
    proposed: dict[str, Any] = {
        "lanes": {lane: list(domains) for lane, domains in lanes.items()},
        "steps": {
            lane: max(1, round(steps * mean_loss / mean)) for lane, mean_loss in hard.items()
        },
    }
    if len(config.sizes) >= len(lanes):
        proposed["size"] = dict(zip(lanes, config.sizes, strict=False))
    return proposed


def report_text(config: ExpertsConfig, difficulty: Mapping[str, float], steps: int) -> str:
    """Return the results of the probe as a table, and the proposal as YAML to paste."""
    rows = [["domain", "nats per token"]]
    rows += [
        [name, f"{loss:.4f}"] for name, loss in sorted(difficulty.items(), key=lambda one: one[1])
    ]
    written = yaml.safe_dump(proposal(config, difficulty, steps), sort_keys=False)
    return "\n".join(
        [
            aligned(rows, [0]),
            "",
            f"# for experts with {steps} steps on average, at equal compute:",
            written.rstrip(),
        ]
    )
