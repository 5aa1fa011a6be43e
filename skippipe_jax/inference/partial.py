"""Stages that a partial model runs, and their order: any subset, the data stage first."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Plan

StageOrder = tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """Variant of the model: the stages that run, in order, and how it differs from others.

    `microbatches` of an iteration take it, `swapped` are two neighbours in reversed order, and
    `left_out` is the only stage that does not run.
    """

    stages: StageOrder
    microbatches: int | None = None
    swapped: tuple[int, int] | None = None
    left_out: int | None = None


@dataclass(frozen=True)
class Question:
    """Variants of the model that are compared with the full one.

    `name` is the argument that asks, `share` that of the stages that `keep` keeps. There are
    `possible` variants: more than `variants` if these are a sample.
    """

    name: str
    variants: tuple[Variant, ...]
    possible: int
    share: float | None = None


def full(stages: int) -> StageOrder:
    """Return every stage, in order."""
    return tuple(range(stages))


def kept(stages: int, share: float, limit: int, seed: int) -> Question:
    """Return all variants that keep a share of the stages, or `limit` of them, drawn by the seed.

    The number of stages is rounded to the nearest, and the data stage is always one of them.

    Raises:
        InputError: for a share that is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InputError(
            "--keep-fraction",
            share,
            "must be above 0 and at most 1",
            "Write a fraction such as 0.75",
        )
    inner = range(1, stages)
    count = max(math.floor(share * stages + 0.5), 1) - 1
    possible = math.comb(len(inner), count)
    if possible <= limit:
        chosen = set(itertools.combinations(inner, count))
    else:
        draw, chosen = random.Random(seed), set()
        while len(chosen) < limit:
            chosen.add(tuple(sorted(draw.sample(inner, count))))
    variants = tuple(Variant((0, *subset)) for subset in sorted(chosen))
    return Question("keep", variants, possible, share)


def path_variants(plan: Plan, stages: int) -> Question:
    """Return the different paths of a plan, each with the number of microbatches that take it.

    Raises:
        InputError: if the plan is for another number of stages.
    """
    if len(plan.stages) != stages:
        raise InputError(
            "--paths",
            f"{len(plan.stages)} stages",
            f"the checkpoint has {stages} stages",
            "Choose a step that was saved under the current plan, or leave it out",
        )
    counts = Counter(tuple(plan.stage_of[node] for node in path) for path in plan.microbatches)
    variants = tuple(Variant(order, microbatches=count) for order, count in sorted(counts.items()))
    return Question("paths", variants, len(variants))


def swapped(stages: int) -> Question:
    """Return every stage, each pair of neighboring inner stages in turn in reversed order.

    Raises:
        InputError: if there are no two inner stages.
    """
    if stages < 3:
        raise InputError(
            "--swaps", f"{stages} stages", "there are no two inner stages to swap", "Leave it out"
        )
    order = full(stages)
    variants = tuple(
        Variant((*order[:s], s + 1, s, *order[s + 2 :]), swapped=(s, s + 1))
        for s in range(1, stages - 1)
    )
    return Question("swaps", variants, len(variants))


def leave_one_out_variants(stages: int) -> Question:
    """Return every stage but one, each inner stage left out in turn.

    Raises:
        InputError: if there is no inner stage.
    """
    if stages < 2:
        raise InputError(
            "--importance", f"{stages} stage", "there is no inner stage to skip", "Leave it out"
        )
    order = full(stages)
    variants = tuple(Variant((*order[:s], *order[s + 1 :]), left_out=s) for s in range(1, stages))
    return Question("importance", variants, len(variants))


def parse_stage_order(named: str | None, share: float | None, stages: int, seed: int) -> StageOrder:
    """Return the stages that a user names (``0,2,1``), a share drawn by the seed, or all.

    Raises:
        InputError: if these are not different stages of the model, the data stage first.
    """
    if named is None:
        return full(stages) if share is None else kept(stages, share, 1, seed).variants[0].stages
    try:
        order = tuple(map(int, named.split(",")))
    except ValueError as error:
        raise InputError(
            "--stage-order", named, "is not a list of stages", "Write 0,1,3"
        ) from error
    return checked_order(order, stages, "--stage-order", named)


def checked_order(order: Sequence[int], stages: int, field: str, value: Any) -> StageOrder:
    """Return the order, if it is of different stages of the model, the data stage first.

    Raises:
        InputError: if it is not; `field` and `value` are what the user has given.
    """
    for stage in order:
        fields.integer(stage, field, 0, stages - 1)
    if not order or order[0] != 0:
        raise InputError(
            field, value, "must start with stage 0, which embeds the tokens", "Start with 0"
        )
    if len(set(order)) < len(order):
        raise InputError(field, value, "contains a stage twice", "Write each stage once")
    return tuple(order)
