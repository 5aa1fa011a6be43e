"""How many nodes each stage of a case has; a stage that is left out has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError


def sizes_and_left_out(given: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The nodes of each stage of a case, and the stages that are left out.

    Raises:
        InputError: if another stage has no node, or one that is left out has some; the first stage
            cannot be left out.
    """
    sizes = fields.sequence(given["stages"], "case.stages")
    left_out = []
    stages = fields.sequence(given.get("left_out", []), "case.left_out", minimum_length=0)
    for position, stage in enumerate(stages):
        field = f"case.left_out[{position}]"
        left_out.append(fields.integer(stage, field, 1, len(sizes) - 1))
    if sorted(set(left_out)) != left_out:
        remedy = "Name each stage once, in order"
        raise InputError("case.left_out", left_out, "is not ascending", remedy)
    for stage, size in enumerate(sizes):
        field = f"case.stages[{stage}]"
        if stage in left_out:
            fields.integer(size, field, 0, 0)
        else:
            fields.integer(size, field, 1)
    return tuple(sizes), tuple(left_out)


def so_that_they_add_up(nodes: int, stages: Sequence[int]) -> str:
    """What to change where the sizes of the stages do not add up to the nodes."""
    lacking = sum(stages) - nodes
    if lacking < 0:
        return f"Add {-lacking} to the sizes or take {-lacking} from the nodes to make them add up"
    if nodes < len(stages):
        least = len(stages) - nodes
        return (
            f"Each stage needs a node: leave out {least} of the stages, or add {least} to the "
            f"nodes; then make the sizes add up"
        )
    return f"Take {lacking} from the sizes or add {lacking} to the nodes to make them add up"
