"""Plan: nodes on stages, a path for every microbatch, an order for every node.

It is the only contract between planner and runtime, so the meaning of a path is defined here once:
`microbatch_chain` lists the operations of a microbatch, and all other code uses that list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.problem.case import Case, parse_case

FORMAT = "skippipe-plan"
VERSION = 1

Kind = Literal["F", "L", "B"]
KINDS: tuple[Kind, ...] = ("F", "L", "B")
# It has the embedding and the head, reads the text, and is on every path.
DATA_STAGE = 0
NodePath = tuple[int, ...]


class Operation(NamedTuple):
    """One unit of work on one node: forward (F), loss and its gradient (L) or backward (B)."""

    kind: Kind
    microbatch: int
    node: int

    def __str__(self) -> str:
        """Name the operation as in messages."""
        return f"{self.kind} of microbatch {self.microbatch} on node {self.node}"


def microbatch_chain(microbatch: int, path: Sequence[int]) -> list[Operation]:
    """List the operations of one microbatch, each after the one that it depends on.

    F on the data node and along the path, L back on the data node, B along the reversed path, last
    on the data node. Between two operations on different nodes there is a transfer.
    """
    return [
        *(Operation("F", microbatch, node) for node in path),
        Operation("L", microbatch, path[0]),
        *(Operation("B", microbatch, node) for node in reversed(path)),
    ]


@dataclass(frozen=True)
class Predicted:
    """Predictions of the timing model for a plan, in seconds.

    `iteration_s` is the time at which the last stage has averaged, `pipeline_s` the end of the last
    backward, `averaging_s` the longest averaging of one stage, and `lower_bound_s` a time that no
    plan of the case can beat, None for a plan that was made too quickly to compute one.

    In `outer` mode, `iteration_s` is the mean of many iterations, `pipeline_s` the same if rings
    took no time, `averaging_s` the longest ring of a fragment, and `late_s` the most by which a
    ring exceeds its delay.

    `placement_bound_s` is a tighter bound, if one was requested.
    """

    iteration_s: float
    pipeline_s: float
    averaging_s: float
    lower_bound_s: float | None
    late_s: float = 0.0
    placement_bound_s: float | None = None

    def to_json(self, averaging: AveragingPolicy) -> dict[str, float | None]:
        """Return the form that a plan stores; `late_s` only in `outer` mode."""
        stored = asdict(self)
        if self.placement_bound_s is None:
            del stored["placement_bound_s"]
        if not averaging.is_outer:
            del stored["late_s"]
        return stored


@dataclass(frozen=True, eq=False)
class Plan:
    """Placement, the path of every microbatch, and the order of operations on each node.

    `stages[s]` are the nodes of stage s (stage 0: the data nodes), none if the case leaves it out,
    `microbatches[m]` is the path of microbatch m as nodes, its data node first, `order[n]` the
    operations of node n, in order.
    """

    method: str
    stages: tuple[tuple[int, ...], ...]
    microbatches: tuple[NodePath, ...]
    order: tuple[tuple[Operation, ...], ...]
    predicted: Predicted
    case: Case

    def __repr__(self) -> str:
        """Show the main values; the full content would fill pages."""
        return (
            f"Plan(method={self.method!r}, stages={tuple(map(len, self.stages))}, "
            f"microbatches={len(self.microbatches)}, iteration_s={self.predicted.iteration_s:.4g})"
        )

    def _repr_svg_(self) -> str:
        """Draw the timeline, for notebooks."""
        # Looked up by name: pictures and the simulation are in higher layers than plans.
        simulated = import_module("skippipe_sched.timing.simulate").simulate_plan(self)
        return import_module("skippipe_sched.figures.gantt").gantt(self, simulated)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Stage that each node serves."""
        return stage_of_nodes(self.stages)

    def fits(self, case: Case, path_length: int) -> bool:
        """Return whether a search for a plan of `case` with paths of this length can start here."""
        sent = tuple(sum(path[0] == node for path in self.microbatches) for node in self.stages[0])
        sizes, lengths = tuple(map(len, self.stages)), {len(path) for path in self.microbatches}
        return (sizes, sent, lengths) == (case.stages, case.microbatches, {path_length})

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object (docs/formats.md)."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "method": self.method,
            "stages": [list(nodes) for nodes in self.stages],
            "microbatches": [list(path) for path in self.microbatches],
            "order": [[[op.kind, op.microbatch] for op in node] for node in self.order],
            "predicted": self.predicted.to_json(self.case.averaging),
            "case": dict(self.case.source),
        }

    def save(self, path: Path) -> None:
        """Write the plan as JSON; replace a file only when the new one is complete.

        A pipe or a device is written to, and a symbolic link still leads to its file.
        """
        replaces = path.is_file() or not path.exists()
        target = Path(os.path.realpath(path)) if replaces else path
        written = target.with_name(target.name + ".partial") if replaces else path
        written.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        if replaces:
            os.replace(written, target)


def stage_of_nodes(stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the stage of each node, from the nodes of each stage."""
    stage_of = [0] * sum(len(nodes) for nodes in stages)
    for stage, nodes in enumerate(stages):
        for node in nodes:
            stage_of[node] = stage
    return tuple(stage_of)


def load_plan(path: Path) -> Plan:
    """Read and check a plan file."""
    return parse_plan(fields.load_json(path, "plan"))


def parse_plan(value: Any) -> Plan:
    """Check a plan given as a mapping.

    The checks cover the form, that every node serves one stage, that every path starts at a data
    node and visits no stage twice (CC1), and that the orders hold exactly the operations of the
    paths. `rules.violations` checks the other rules.

    Raises:
        InputError: naming the field, its value, and what to write instead.
    """
    keys = ("format", "version", "method", "stages", "microbatches", "order", "predicted", "case")
    raw = fields.checked_mapping(value, "plan", keys, keys)
    fields.text(raw["format"], "plan.format", (FORMAT,))
    fields.integer(raw["version"], "plan.version", VERSION, VERSION)
    case = parse_case(raw["case"])
    stages = _stages(raw["stages"], case)
    paths = _paths(raw["microbatches"], stages)
    return Plan(
        method=fields.text(raw["method"], "plan.method"),
        stages=stages,
        microbatches=paths,
        order=_order(raw["order"], len(case.nodes), paths),
        predicted=_predicted(raw["predicted"], case.averaging),
        case=case,
    )


def _stages(value: Any, case: Case) -> tuple[tuple[int, ...], ...]:
    stages: list[tuple[int, ...]] = []
    seen: dict[int, str] = {}
    for stage, nodes in enumerate(fields.sequence(value, "plan.stages")):
        field, least = f"plan.stages[{stage}]", 0 if stage in case.left_out else 1
        for position, node in enumerate(fields.sequence(nodes, field, minimum_length=least)):
            where = f"{field}[{position}]"
            fields.integer(node, where, 0, len(case.nodes) - 1)
            if node in seen:
                raise InputError(where, node, f"is already in {seen[node]}", "List each node once")
            seen[node] = where
        stages.append(tuple(nodes))
    missing = sorted(set(range(len(case.nodes))) - set(seen))
    if missing:
        problem = f"node {missing[0]} serves no stage"
        raise InputError("plan.stages", value, problem, "Add it to a stage")
    return tuple(stages)


def _paths(value: Any, stages: Sequence[Sequence[int]]) -> tuple[NodePath, ...]:
    stage_of = stage_of_nodes(stages)
    paths = []
    for microbatch, path in enumerate(fields.sequence(value, "plan.microbatches")):
        field = f"plan.microbatches[{microbatch}]"
        for position, node in enumerate(fields.sequence(path, field)):
            fields.integer(node, f"{field}[{position}]", 0, len(stage_of) - 1)
        if path[0] not in stages[0]:
            problem = "must be a data node, as every path starts at one (CC1)"
            remedy = f"Start the path at one of {list(stages[0])}"
            raise InputError(f"{field}[0]", path[0], problem, remedy)
        for position, node in enumerate(path):
            earlier = [other for other in path[:position] if stage_of[other] == stage_of[node]]
            if earlier:
                raise InputError(
                    f"{field}[{position}]",
                    node,
                    f"the path visits stage {stage_of[node]} twice (CC1), "
                    f"first on node {earlier[0]}",
                    "Visit each stage at most once",
                )
        paths.append(tuple(path))
    return tuple(paths)


def _order(value: Any, nodes: int, paths: Sequence[NodePath]) -> tuple[tuple[Operation, ...], ...]:
    expected: list[set[Operation]] = [set() for _ in range(nodes)]
    for microbatch, path in enumerate(paths):
        for operation in microbatch_chain(microbatch, path):
            expected[operation.node].add(operation)
    entries = fields.sequence(value, "plan.order")
    if len(entries) != nodes:
        problem = f"must have one entry for each of the {nodes} nodes"
        raise InputError("plan.order", f"{len(entries)} entries", problem, "Add or remove entries")
    order = []
    for node, operations in enumerate(entries):
        missing = set(expected[node])
        ordered = []
        own = fields.sequence(operations, f"plan.order[{node}]", minimum_length=0)
        for position, entry in enumerate(own):
            field = f"plan.order[{node}][{position}]"
            if len(fields.sequence(entry, field)) != 2:
                raise InputError(field, entry, "must be two values", 'Write ["F", microbatch]')
            kind = fields.text(entry[0], field, KINDS)
            operation = Operation(kind, fields.integer(entry[1], field, 0), node)  # pyright: ignore[reportArgumentType]
            if operation not in missing:
                problem = "is a duplicate, or no path has this operation on this node"
                remedy = "List each operation of the paths once, on the node that runs it"
                raise InputError(field, entry, problem, remedy)
            missing.remove(operation)
            ordered.append(operation)
        if missing:
            problem = f"lacks the {min(missing)}"
            raise InputError(f"plan.order[{node}]", operations, problem, "Add it")
        order.append(tuple(ordered))
    return tuple(order)


def _predicted(value: Any, averaging: AveragingPolicy) -> Predicted:
    names = ("iteration_s", "pipeline_s", "averaging_s", "lower_bound_s")
    names += ("late_s",) if averaging.is_outer else ()
    allowed = (*names, "placement_bound_s")
    raw: Mapping[str, Any] = fields.checked_mapping(value, "plan.predicted", allowed, names)
    checked = {
        name: fields.number(seconds, f"plan.predicted.{name}", 0.0)
        for name, seconds in raw.items()
        if (name, seconds) != ("lower_bound_s", None)
    }
    return Predicted(**{"lower_bound_s": None, **checked})  # pyright: ignore[reportArgumentType]
