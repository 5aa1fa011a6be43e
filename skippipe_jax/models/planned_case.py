"""The case that a configuration is planned for: its bytes follow from what is trained. No JAX.

What a hop carries and what replicas average are known where the model, the data and the formats
that travel are, and when they average is of the training. So a case inside a configuration leaves
them out, or says `auto`. A case that has figures of its own, or a plan that was made for one, is
held against them. How many microbatches a node may hold follows from them and from the bytes of its
device, where it says `memory: auto`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.auto import candidates
from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.problem.case import AUTO, MEMORY_BYTES, Case, parse_case

from skippipe_jax.config import Config
from skippipe_jax.models.footprint import averaged_bytes, hop_bytes
from skippipe_jax.models.in_flight import holding, most_in_flight, rooms, ways_out

# Of what follows from the configuration: a figure that is rounded is none to be warned of.
TOLERANCE = 0.05
LEFT_OPEN = ("activation_bytes", "gradient_bytes", "stage_bytes", "averaging", "memory")
"""What a case may leave to the configuration, or say `auto`."""


def cases_of(config: Config, config_folder: Path) -> Sequence[Case]:
    """The candidates of the case in `plan.case`, with what it leaves open and a model decides.

    `config_folder` is where the link table of a case inside the configuration lies.

    Raises:
        InputError: if there is no case, or for what is wrong with it.
    """
    return candidates_of(config, *_given(config, config_folder))


def is_of_case(config: Config, config_folder: Path, case: Case) -> bool:
    """Tell whether a case is one of `cases_of`, but for what is left open there.

    Another version of this program may have filled that in otherwise.

    Raises:
        InputError: as `cases_of` does.
    """
    given, folder = _given(config, config_folder)
    cases = candidates_of(config, given, folder)
    left_open = {key for key in LEFT_OPEN if given.get(key, AUTO) == AUTO}
    if _nodes_without_memory(given, len(cases[0].nodes)):
        left_open.add("memory")

    def told(own: Case) -> str:
        source = {key: value for key, value in own.source.items() if key not in left_open}
        if "memory" in left_open and isinstance(source["nodes"], list):
            source["nodes"] = [{**node, "memory": AUTO} for node in source["nodes"]]
        return json.dumps(source, sort_keys=True)

    return told(case) in map(told, cases)


def _given(config: Config, config_folder: Path) -> tuple[Any, Path]:
    """Return what `plan.case` says, and the folder in which its link table would lie."""
    given = config.plan.case
    if given is None:
        raise InputError(
            "plan",
            None,
            "is missing, and several hosts need one",
            "Write plan: auto, by which they measure their links and plan when the run starts; "
            "plan: {case: FILE}, a case that skippipe measure writes or you do; or plan: {file: "
            "FILE}, a plan by skippipe plan",
        )
    if isinstance(given, str):
        return fields.load_yaml(Path(given), "case"), Path(given).parent
    return given, config_folder


def candidates_of(config: Config, given: Any, folder: Path = Path()) -> Sequence[Case]:
    """The candidates of a case given as a mapping, with what it leaves open and a model decides.

    Those are left out in which some node could not hold a single microbatch. `folder` is where a
    link table would lie.

    Raises:
        InputError: if that leaves none, or for what is wrong with the case.
    """
    if not isinstance(given, dict):
        return candidates(given, folder)
    cases = candidates(_with_sizes(config, given), folder)
    if config.averaging.is_outer:
        config.averaging.require_blocks(config.model.layers_of_stages(len(cases[0].stages)))
    left_open = _nodes_without_memory(given, len(cases[0].nodes))
    if not left_open:
        return cases
    for node in left_open:
        if cases[0].nodes[node].memory_bytes is None:
            raise InputError(
                f"case.{MEMORY_BYTES}",
                None,
                f"is missing, and the memory of node {node} is to follow from it",
                f"Add {MEMORY_BYTES}: to case, the bytes of each node's device, or write memory as "
                f"a number of microbatches",
            )
    counts = [most_in_flight(config, case, left_open) for case in cases]
    possible = [
        _with_memory(case, own, given)
        for case, own in zip(cases, counts, strict=True)
        if all(own.values())
    ]
    if not possible:
        raise _too_small(config, cases[0], counts[0], given)
    return possible


def differing_sizes(config: Config, case: Case) -> list[str]:
    """Return what a case says otherwise than the configuration has it: a sentence for each key.

    A size that nothing depends on, of a stage with one replica, say, is not looked at.
    """
    stages, found = len(case.stages), []
    hop, averaged = hop_bytes(config), averaged_bytes(config, stages)
    if stages > 1 and _differs(case.activation_bytes, hop.activation):
        given, own = case.activation_bytes, hop.activation
        found.append(_sentence(config, "activation_bytes", "", given, own, own))
    # A case that does not speak of gradients says that they have what activations have.
    speaks = "gradient_bytes" in case.source or hop.gradient != hop.activation
    if stages > 1 and speaks and _differs(case.gradient_bytes, hop.gradient):
        given, own = case.gradient_bytes, hop.gradient
        found.append(_sentence(config, "gradient_bytes", "", given, own, own))
    differing = [
        stage
        for stage in range(stages)
        if case.stages[stage] > 1 and _differs(case.stage_bytes[stage], averaged[stage])
    ]
    if differing:
        worst = max(differing, key=lambda stage: abs(case.stage_bytes[stage] / averaged[stage] - 1))
        given, own = case.stage_bytes[worst], averaged[worst]
        found.append(_sentence(config, "stage_bytes", f"[{worst}]", given, own, averaged))
    if case.averaging != config.averaging.policy:
        found.append(_sentence_of_averaging(config, case))
    return found


def _with_sizes(config: Config, case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with what it leaves open, but for memory."""
    filled, hop = _with_any_memory(case), hop_bytes(config)
    of_activations = case.get("activation_bytes", AUTO)
    if of_activations == AUTO:
        filled["activation_bytes"] = hop.activation
    # Beside a figure for activations, none for gradients means the same one.
    if case.get("gradient_bytes", of_activations) == AUTO:
        filled["gradient_bytes"] = hop.gradient
    if case.get("stage_bytes", AUTO) == AUTO:
        stages = _stage_count(case)
        # Stages that cannot be counted are refused by whoever reads the case.
        filled["stage_bytes"] = averaged_bytes(config, stages) if stages else 0
    if case.get("averaging", AUTO) == AUTO:
        filled.pop("averaging", None)
        filled |= config.averaging.of_case
    return filled


def _with_any_memory(case: dict[str, Any]) -> dict[str, Any]:
    """The case with a number where it leaves memory open: stages and paths do not depend on it."""
    filled = dict(case)
    if filled.get("memory") == AUTO:
        filled["memory"] = 1
    if isinstance(filled.get("nodes"), list):
        filled["nodes"] = [
            node | {"memory": 1} if _says_auto(node) else node for node in filled["nodes"]
        ]
    return filled


def _says_auto(node: Any) -> bool:
    return isinstance(node, dict) and node.get("memory") == AUTO


def _nodes_without_memory(given: Mapping[str, Any], count: int) -> list[int]:
    """Return the nodes of a case, which has so many, whose memory is to follow from their bytes."""
    described = given["nodes"] if isinstance(given["nodes"], list) else [{}] * count
    of_all = given.get("memory")
    return [index for index, node in enumerate(described) if node.get("memory", of_all) == AUTO]


def _with_memory(case: Case, counts: Mapping[int, int], given: Mapping[str, Any]) -> Case:
    """A candidate of the given case with these numbers as the memory of its nodes."""
    source = dict(case.source)
    if not isinstance(source["nodes"], list):
        # All of them are alike.
        return parse_case(source | {"memory": counts[0]})
    source["nodes"] = [
        {**node, "memory": counts[index]} if index in counts else node
        for index, node in enumerate(source["nodes"])
    ]
    if given.get("memory") == AUTO:
        del source["memory"]
    return parse_case(source)


def _too_small(
    config: Config, case: Case, counts: Mapping[int, int], given: Mapping[str, Any]
) -> InputError:
    """Says of the first node that could not hold a single microbatch what that would take."""
    node = min(index for index, count in counts.items() if count == 0)
    nodes = (
        replace(own, memory=1) if index in counts else own for index, own in enumerate(case.nodes)
    )
    one_each = replace(case, nodes=tuple(nodes))
    [room] = [room for room in rooms(config, one_each) if node in room.nodes]
    own = given["nodes"][node] if isinstance(given["nodes"], list) else {}
    says_itself = MEMORY_BYTES in own
    return InputError(
        f"case.nodes[{node}].{MEMORY_BYTES}" if says_itself else f"case.{MEMORY_BYTES}",
        (own if says_itself else given)[MEMORY_BYTES],
        f"not one microbatch fits on node {node}: {holding(room)}",
        f"Write {ways_out(config, one_each, room)}; or, if this node is to serve another stage, "
        f"the number of microbatches as its memory",
    )


def _stage_count(case: dict[str, Any]) -> int | None:
    """Return how many stages a case has, if that can be told."""
    stages = case.get("stages")
    count = case.get("stage_count") if stages == AUTO else stages
    if isinstance(count, list):
        return len(count)
    return count if stages == AUTO and isinstance(count, int) and count > 0 else None


def _differs(given: float, own: int) -> bool:
    return abs(given - own) > TOLERANCE * own


def _sentence(
    config: Config, key: str, place: str, given: float, own: int, right: int | list[int]
) -> str:
    remedy = f"Make the plan again with {key}: {json.dumps(right)}"
    if config.plan.case is not None:
        remedy = f"Write {key}: {AUTO}"
        # Left out, this one would be what the case says of activations.
        if key != "gradient_bytes":
            remedy = f"Leave it out, or write {key}: {AUTO}"
    return (
        f"case.{key}{place} = {given:.0f}, and by the configuration it is {own}: the plan is for "
        f"other transfers than those of this run. {remedy}"
    )


def _sentence_of_averaging(config: Config, case: Case) -> str:
    right = config.averaging.of_case
    remedy = "Leave it out, or write averaging: auto"
    if config.plan.case is None:
        remedy = "Make the plan again " + (
            f"with averaging: {json.dumps(right['averaging'])}" if right else "without it"
        )
    return (
        f"case.averaging = {_in_words(case.averaging)}, and by the configuration it is "
        f"{_in_words(config.averaging.policy)}: the plan is for another averaging than that of "
        f"this run. {remedy}"
    )


def _in_words(averaging: AveragingPolicy) -> str:
    return json.dumps(asdict(averaging)) if averaging.is_outer else averaging.mode
