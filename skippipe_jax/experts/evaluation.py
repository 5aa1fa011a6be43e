"""Perplexities of an ensemble's arms by domain, for each way of mixing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config.data import FOR_PRIORS, FOR_SCORES
from skippipe_jax.experts.config import ExpertsConfig
from skippipe_jax.experts.members import Arm, Member
from skippipe_jax.experts.tasks import Scored, Workspace
from skippipe_jax.inference.scores import Scores, log_prior_of, require_same_text, scores_of_mixture
from skippipe_jax.models.flops import iteration_flops
from skippipe_jax.storage.run_dir import RunDir

CACHED = "posterior, cached prior"
WAYS: dict[str, Mapping[str, str]] = {
    CACHED: {"prior": "cached", "how": "posterior"},
    "posterior, uniform prior": {"prior": "uniform", "how": "posterior"},
    "posterior, decaying prior": {"prior": "decay", "how": "posterior"},
    "top-1, cached prior": {"prior": "cached", "how": "top-1"},
    "cached prior alone": {"prior": "cached", "how": "prior"},
    "simple average": {"prior": "uniform", "how": "prior"},
}
"""Ways of mixing experts; arms are compared by the first."""
OWN = "the domain's own expert"
"""Result of a domain's own expert, as an oracle that knows the domain would select."""
DIGITS = 4


def scored_models(place: Workspace, arm: Arm) -> dict[str, Scored]:
    """Return the models whose scores an arm mixes: its experts, or its only model."""
    if arm.averages:
        return {"averaged": Scored(place, tuple(arm.members.values()))}
    return {name: Scored(place, (member,)) for name, member in arm.members.items()}


def losses_of(models: Mapping[str, Scored], domain: str, decay: float) -> dict[str, float]:
    """Return the loss of a domain [nats per token] by each way of mixing, or of a single model."""
    scores = _scores(models, domain, FOR_SCORES)
    each = [*scores.values()]
    if len(each) == 1:
        return {CACHED: each[0].loss}
    cached = log_prior_of([*_scores(models, domain, FOR_PRIORS).values()], decay)
    losses = {
        name: scores_of_mixture(
            each, **way, log_prior=cached if way["prior"] == "cached" else None, decay=decay
        ).loss
        for name, way in WAYS.items()
    }
    if domain in scores:
        losses[OWN] = scores[domain].loss
    return losses


def _scores(models: Mapping[str, Scored], domain: str, part: str) -> dict[str, Scores]:
    """Return the scores of each model on a part of a domain."""
    scores = {name: model.scores(domain, part) for name, model in models.items()}
    require_same_text(scores)
    return scores


def training_flops(place: Workspace, members: Iterable[Member]) -> float:
    """Return the operations of training these runs, each once, without their parents."""
    each_once = {member.digest: member for member in members}.values()
    return float(sum(_own_flops(place, run) for run in each_once))


def _own_flops(place: Workspace, member: Member) -> float:
    folder = place.run_dir(member)
    config = RunDir(folder).config("folder")
    schedule, data = RunDir(folder).schedule(), config.data
    taken = Counter(map(schedule.name, range(member.steps)))
    return float(
        sum(
            count
            * iteration_flops(
                config.model, schedule.plans[name], data.microbatch_size, data.sequence_length
            )
            for name, count in taken.items()
        )
    )


def results_of(place: Workspace, arms: Sequence[Arm]) -> dict[str, Any]:
    """Return the content of results.json: perplexities by domain, means, steps and compute.

    Raises:
        InputError: if models have scored different texts, such as after a change of the text.
    """
    for domain in place.config.names:
        first = {arm.name: next(iter(scored_models(place, arm).values())) for arm in arms}
        require_same_text(
            {name: scored.scores(domain, FOR_SCORES) for name, scored in first.items()}
        )
    return {arm.name: _of_arm(place, arm) for arm in arms}


def _of_arm(place: Workspace, arm: Arm) -> dict[str, Any]:
    config = place.config
    models = scored_models(place, arm)
    losses = {name: losses_of(models, name, config.evaluation.decay) for name in config.names}
    ways = {
        way: _means(config, {name: by_way[way] for name, by_way in losses.items() if way in by_way})
        for way in losses[config.inside[0]]
    }
    members = list(arm.members.values())
    before = [run for member in members for run in member.lineage()[:-1]]
    return ways[CACHED] | {
        "lanes": {lane: list(domains) for lane, domains in arm.lanes.items()},
        "members": {
            name: {"size": member.size, "steps": member.steps, "begins_with": _begins_with(member)}
            for name, member in arm.members.items()
        },
        "training_flops": training_flops(place, members),
        "training_flops_with_seeds": training_flops(place, [*before, *members]),
        "models_asked": len(models),
        "ways": {way: means for way, means in ways.items() if len(ways) > 1},
    }


def _begins_with(member: Member) -> str | None:
    return member.parent.name if isinstance(member.parent, Member) else member.parent


def _means(config: ExpertsConfig, losses: Mapping[str, float]) -> dict[str, Any]:
    """Return perplexities of the domains, and their means: all, inside, outside (or None)."""
    perplexities = {name: math.exp(loss) for name, loss in losses.items()}

    def mean(names: Sequence[str]) -> float | None:
        known = [perplexities[name] for name in names if name in perplexities]
        return round(float(np.mean(known)), DIGITS) if known and len(known) == len(names) else None

    return {
        "domains": {name: round(value, DIGITS) for name, value in perplexities.items()},
        "mean": mean(config.names),
        "inside": mean(config.inside),
        "outside": mean(config.outside),
        "loss": {name: round(loss, DIGITS + 2) for name, loss in losses.items()},
    }


def table(config: ExpertsConfig, arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Return perplexities as text: a line for each domain, a column for each arm, then means."""
    each = list(arms.values())
    rows = [["perplexity", *arms]]
    for domain in (*config.inside, *config.outside):
        where = " (outside)" if domain in config.outside else ""
        rows.append([domain + where, *_marked([arm["domains"][domain] for arm in each])])
    for mean in ("inside", "outside", "mean"):
        label = "mean" if mean == "mean" else f"mean, {mean}"
        rows.append([label, *_marked([arm[mean] for arm in each])])
    for key, label in (
        ("training_flops", "training compute"),
        ("training_flops_with_seeds", "training compute with seeds"),
    ):
        rows.append([label, *(f"{arm[key] / each[0][key]:.3f}" for arm in each)])
    rows.append(["models evaluated", *(str(arm["models_asked"]) for arm in each)])
    lines = [aligned(rows, [0]), "", "means by mixing method, inside / outside:"]
    ways = [["", *(name for name, arm in arms.items() if arm["ways"])]]
    for way in (*WAYS, OWN):
        mixed = [arm["ways"][way] for arm in each if way in arm["ways"]]
        ways.append(
            [way, *(f"{_figure(one['inside'])} / {_figure(one['outside'])}" for one in mixed)]
        )
    return "\n".join([*lines, aligned(ways, [0])] if len(ways[0]) > 1 else lines[:1])


def _marked(figures: Sequence[float | None]) -> list[str]:
    """Return the figures of all arms as text, with the lowest marked."""
    least = min((figure for figure in figures if figure is not None), default=math.nan)
    return [_figure(figure) + ("*" if figure == least else " ") for figure in figures]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
