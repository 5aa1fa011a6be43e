"""Rebuilding of stages that no host holds any more, by `recovery.lost_stage`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from skippipe_jax.config import Config
from skippipe_jax.config.cluster import AVERAGE, BUDDY, REWIND, SKIP, STOP
from skippipe_jax.consensus.generations import (
    Copies,
    Generation,
    HostsOfStages,
    RebuiltStage,
    Remakes,
)
from skippipe_jax.consensus.next_generation import lost
from skippipe_jax.errors import RebuildImpossible


def rebuild_rule(config: Config, stages: int) -> Remakes | None:
    """Return the function that rebuilds stages that no host holds; None if the policy has none."""
    if config.recovery.lost_stage == AVERAGE:
        return partial(_from_neighbors, config.model.stage_partition(stages))
    return _from_buddy_checkpoints if config.recovery.lost_stage == BUDDY else None


def describe_rebuilds(generation: Generation) -> str:
    """Describe in words how lost stages are rebuilt or left out."""
    rebuilt = {made.stage: _describe_rebuild(made) for made in generation.remade}
    bypassed = "bypassed until a host serves it"
    return "".join(
        f"; stage {stage} {rebuilt.get(stage, bypassed)}"
        for stage in generation.lost
        if stage in rebuilt or stage in generation.left_out
    )


def describe_rollback(generation: Generation, done: int) -> str:
    """Describe in words the rollback of hosts that had made `done` steps; "" without a rollback."""
    if not generation.is_rewound:
        return ""
    to = f"the checkpoint of step {generation.step}" if generation.step else "the start"
    repeated = done - generation.step
    steps = "1 step" if repeated == 1 else f"{repeated} steps"
    rollback = f"rolled back from step {done} to {to}, {steps} to repeat"
    if repeated <= 0:
        rollback = f"rolled back to {to}"
    if not generation.lost:
        return f". All hosts {rollback}"
    return f". {_stages(generation.lost)} had no other replica: {rollback}"


def single_host_warning(stages: Sequence[Collection[int]], host_of: Sequence[int], by: str) -> str:
    """Return a warning of stages served by a single host; "" if their loss causes no rollback.

    `by` is `recovery.lost_stage`.
    """
    hosts = [{host_of[node] for node in nodes} for nodes in stages]
    single = [stage for stage, own in enumerate(hosts) if len(own) == 1]
    if not single or by not in (REWIND, STOP):
        return ""
    has = "has only one host" if len(single) == 1 else "have only one host each"
    follows = "all hosts roll back to the last checkpoint" if by == REWIND else "the run ends"
    serving = [host_of[node] for nodes in stages for node in nodes]
    most = max(serving.count(host) for stage in single for host in hosts[stage])
    if by == REWIND and len(serving) - most < len(stages):
        follows = "the run may end, as too few nodes are left for all stages"
    return (
        f"{_stages(single)} {has}: if it fails, {follows} (recovery.lost_stage = {by}). To prevent "
        "this, place replicas of each stage on two hosts"
    )


def _stages(numbers: Collection[int]) -> str:
    """Return the names of stages as the beginning of a sentence."""
    *most, last = map(str, numbers)
    return f"Stages {', '.join(most)} and {last}" if most else f"Stage {last}"


def _describe_rebuild(made: RebuiltStage) -> str:
    if made.by == AVERAGE:
        return f"rebuilt as the mean of stages {made.stage - 1} and {made.stage + 1}"
    if made.by == SKIP:
        return f"restored from the checkpoint of step {made.step}"
    return f"restored from its buddy checkpoint of step {made.step}"


def _from_neighbors(
    layers: Sequence[int], held: HostsOfStages, copies: Mapping[int, Copies], step: int
) -> tuple[RebuiltStage, ...]:
    """Rebuild each lost stage as the mean of the stages before and after it."""
    del copies
    gone = lost(held)
    for stage in gone:
        why = _mean_problem(stage, layers, gone)
        if why is not None:
            raise RebuildImpossible(f"; stage {stage} cannot be averaged: {why}")
    return tuple(
        RebuiltStage(stage, AVERAGE, step, (min(held[stage - 1]), min(held[stage + 1])))
        for stage in gone
    )


def _mean_problem(stage: int, layers: Sequence[int], lost: Collection[int]) -> str | None:
    if stage == 0:
        return "only it has embedding and head"
    if stage == len(layers) - 1:
        return "no stage follows it"
    for beside in (stage - 1, stage + 1):
        if beside in lost:
            return f"stage {beside} is lost too"
        if layers[beside] != layers[stage]:
            return f"it has {layers[stage]} blocks, and stage {beside} has {layers[beside]}"
    return None


def _from_buddy_checkpoints(
    held: HostsOfStages, copies: Mapping[int, Copies], step: int
) -> tuple[RebuiltStage, ...]:
    """Rebuild each lost stage from its newest buddy checkpoint."""
    newest: dict[int, tuple[int, int]] = {}
    for host in sorted(copies):
        for stage, of_step in copies[host]:
            if of_step <= step and of_step > newest.get(stage, (-1, 0))[0]:
                newest[stage] = of_step, host
    gone = lost(held)
    for stage in gone:
        if stage not in newest:
            raise RebuildImpossible(f"; no copy of stage {stage} is left")
    return tuple(
        RebuiltStage(stage, BUDDY, newest[stage][0], (newest[stage][1],)) for stage in gone
    )
