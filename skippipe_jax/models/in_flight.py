"""Number of microbatches that a node may hold: `memory: auto` in a case. No JAX.

The planner needs this number before its plan decides which stage a node serves, so the stage that
takes most memory determines it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skippipe_sched.figures.amounts import size_text
from skippipe_sched.problem.case import AUTO, Case

from skippipe_jax.config import Config, NodeMesh
from skippipe_jax.config.hardware import ITERATION, MICROBATCH, ONE_DEVICE
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.models.node_memory import (
    USABLE_SHARE,
    NodeMemory,
    memory_of_stages,
    mesh_of_node,
)


@dataclass(frozen=True)
class MemoryUse:
    """Memory of nodes that are alike, and its use with `held.in_flight` microbatches in flight.

    Attributes:
        nodes: all nodes that are alike.
        memory_bytes: bytes of each of their devices; None where the case does not say.
        mesh: mesh of each node.
        stage: stage that takes most memory, of those that the nodes may serve.
        held: memory of each device of a node of that stage.
        one_more_bytes: bytes that one more microbatch would take, with the transfers that it adds.
            None where an iteration has no more.
    """

    nodes: Sequence[int]
    memory_bytes: float | None
    mesh: NodeMesh
    stage: int
    held: NodeMemory
    one_more_bytes: int | None

    @property
    def usable_bytes(self) -> float | None:
        """Bytes of each device that may be filled."""
        return None if self.memory_bytes is None else USABLE_SHARE * self.memory_bytes

    @property
    def is_short(self) -> bool:
        """True if the bytes held do not fit."""
        return self.usable_bytes is not None and self.held.total > self.usable_bytes


NodeKind = tuple[float, NodeMesh]
"""Properties that nodes of one kind share: bytes of each device, and the mesh of these."""


def most_in_flight(config: Config, case: Case, nodes: Collection[int]) -> dict[int, int]:
    """Return the most microbatches that fit on each of `nodes`; 0 where not even one fits.

    The `memory` that the case gives for `nodes` is ignored. That of all others counts, because all
    data nodes together may send to one node. If nodes differ, those with most bytes hold as many
    microbatches as leave room for one on every other node that can hold one at all.

    Raises:
        InputError: if the layers cannot be divided among the stages.
    """
    kinds: dict[int, NodeKind] = {
        node: (case.nodes[node].memory_bytes or 0.0, mesh_of_node(config, case, node))
        for node in nodes
    }

    def holds(own: NodeKind, level: Case, count: int) -> bool:
        memory_bytes, mesh = own
        held = memory_of_stages(config, level, count, mesh=mesh, memory_bytes=memory_bytes)
        return max(stage.total for stage in held) <= USABLE_SHARE * memory_bytes

    with_one = with_in_flight(case, dict.fromkeys(nodes, 1))
    with_room = {own for own in kinds.values() if holds(own, with_one, 1)}
    if not with_room:
        return dict.fromkeys(nodes, 0)

    def fits(count: int) -> bool:
        level = with_in_flight(case, dict.fromkeys(nodes, count))
        return any(holds(own, level, count) for own in with_room) and all(
            holds(own, level, 1) for own in with_room
        )

    level = _greatest(sum(case.microbatches), fits)
    at_level = with_in_flight(case, dict.fromkeys(nodes, level))
    found = {
        own: _greatest(level, lambda count, own=own: holds(own, at_level, count))
        for own in with_room
    }
    return {node: found.get(own, 0) for node, own in kinds.items()}


def memory_use(
    config: Config, case: Case, stage_of: Sequence[int] | None = None
) -> list[MemoryUse]:
    """Return the memory of all nodes, grouped by kind, in order of the first node of each.

    `stage_of` is the stage that each node serves, if a plan has decided it.

    Raises:
        InputError: if the layers cannot be divided among the stages.
    """
    alike: dict[tuple, list[int]] = {}
    for index, node in enumerate(case.nodes):
        served = None if stage_of is None else stage_of[index]
        mesh = mesh_of_node(config, case, index)
        alike.setdefault((node.memory, node.memory_bytes, mesh, served), []).append(index)
    found, all_of_them = [], sum(case.microbatches)
    for (memory, memory_bytes, mesh, served), nodes in alike.items():
        held_with = partial(memory_of_stages, config, case, mesh=mesh, memory_bytes=memory_bytes)
        in_flight = min(memory, all_of_them)
        of_stages = held_with(in_flight)
        may_serve = range(len(of_stages)) if served is None else [served]
        stage = max(may_serve, key=lambda stage, own=of_stages: own[stage].total)
        held, one_more_bytes = of_stages[stage], None
        if in_flight < all_of_them:
            then = held_with(in_flight + 1)
            one_more_bytes = max(then[own].total for own in may_serve) - held.total
        found.append(MemoryUse(tuple(nodes), memory_bytes, mesh, stage, held, one_more_bytes))
    return found


def memory_warnings(config: Config, case: Case, stage_of: Sequence[int] | None = None) -> list[str]:
    """Return a sentence for each kind of node whose `memory` is more than its bytes allow.

    `stage_of` is the stage that each node serves, if a plan has decided it.
    """
    return [
        f"{_memory_given(case, use)} is more than {names(use.nodes)} can hold: "
        f"{holding(use)}. Use {'' if use.held.in_flight == 1 else f'less, memory: {AUTO}, '}"
        f"{memory_remedies(config, case, use)}"
        for use in memory_use(config, case, stage_of)
        if use.is_short
    ]


def _memory_given(case: Case, use: MemoryUse) -> str:
    """Return the key and value of a case that set the `memory` of these nodes."""
    node, given = use.nodes[0], case.nodes[use.nodes[0]].memory
    is_of_all = case.source.get("memory") == given
    return f"case.{'' if is_of_all else f'nodes[{node}].'}memory = {given}"


def holding(use: MemoryUse) -> str:
    """Describe the bytes that are held, and the bytes that may be filled."""
    held = use.held
    of_each = "" if use.mesh == ONE_DEVICE else f" on each of {use.mesh.devices} devices"
    gathered = f"{size_text(held.gathered)} gathered, " if held.gathered else ""
    in_transit = f"{size_text(held.changes)} in transit, " if held.changes else ""
    text = (
        f"stage {use.stage} takes {size_text(held.total)}{of_each} with {held.in_flight} in "
        f"flight ({size_text(held.state)} always, {gathered}"
        f"{size_text(held.in_flight * held.kept)} in flight, "
        f"{size_text(held.waiting)} waiting, {in_transit}{size_text(held.working)} working)"
    )
    if use.memory_bytes is None or use.usable_bytes is None:
        return text
    return (
        f"{text}; {size_text(use.usable_bytes)} are usable, {USABLE_SHARE:g} of "
        f"{size_text(use.memory_bytes)}"
    )


def memory_remedies(config: Config, case: Case, use: MemoryUse) -> str:
    """Describe how nodes would hold less, as the end of a remedy."""

    def held_with(recompute: str) -> tuple[int, int]:
        other = replace(config, model=replace(config.model, recompute=recompute))
        options = {"mesh": use.mesh, "memory_bytes": use.memory_bytes}
        held = memory_of_stages(other, case, use.held.in_flight, **options)[use.stage]
        return held.total, held.host

    remedies = ["more stages"]
    # The best one depends on the case: what is not kept is recomputed, and takes memory then.
    least = min(RECOMPUTE, key=held_with)
    if held_with(least)[0] < use.held.total:
        remedies.insert(0, f"model.recompute: {least}")
    if use.held.gathered and config.node.gather == ITERATION:
        remedies.insert(0, f"node.gather: {MICROBATCH}")
    if config.data.microbatch_size > 1:
        remedies.append("a smaller data.microbatch_size")
    else:
        remedies.append("a shorter data.sequence_length")
    return f"{', '.join(remedies[:-1])} or {remedies[-1]}"


def names(nodes: Sequence[int]) -> str:
    """Format node numbers, which are in order, as "nodes 0-4, 7"."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and node == runs[-1][-1] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    ranges = (f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(ranges)}"


def with_in_flight(case: Case, counts: Mapping[int, int]) -> Case:
    """Return the case with `counts` as the memory of its nodes, where they have one."""
    nodes = (
        replace(node, memory=counts.get(index, node.memory))
        for index, node in enumerate(case.nodes)
    )
    return replace(case, nodes=tuple(nodes))


def _greatest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the greatest number up to `most` that fits, if all smaller ones do; 0 if none fits."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))
