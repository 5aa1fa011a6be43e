"""Case of a configuration, with sizes that follow from the model and the data. No JAX.

The sizes of hops and of gradient averaging follow from the model, the data and the transfer dtypes;
the schedule of averaging follows from `averaging`. A case inside a configuration omits these keys
or sets them to `auto`. If a case, or the case of an existing plan, has values of its own, they are
compared with those of the configuration. With `memory: auto`, the number of microbatches that a
node may hold follows from these sizes and from the bytes of its device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.problem.case import AUTO, MEMORY_BYTES, Case, parse_case
from skippipe_sched.problem.open_case import candidates

from skippipe_jax.config import Config
from skippipe_jax.models.footprint import averaged_bytes, hop_bytes
from skippipe_jax.models.in_flight import (
    holding,
    memory_remedies,
    memory_use,
    most_in_flight,
    with_in_flight,
)

# Fraction of the configuration's size: rounded values in a case cause no warning.
TOLERANCE = 0.05
LEFT_OPEN = ("activation_bytes", "gradient_bytes", "stage_bytes", "averaging", "memory")
"""Keys of a case that follow from the configuration if they are missing or `auto`."""


def configured_cases(config: Config, config_folder: Path) -> Sequence[Case]:
    """Return the candidates of the case in `plan.case`, with open keys filled in.

    `config_folder` is the folder of the link table of a case inside the configuration.

    Raises:
        InputError: if there is no case, or it is invalid.
    """
    return candidate_cases(config, *_given(config, config_folder))


def matches_configured_case(config: Config, config_folder: Path, case: Case) -> bool:
    """Return whether a case is one of `configured_cases`, apart from the keys that are open there.

    Another version of this program may have filled these in differently.

    Raises:
        InputError: as `configured_cases` does.
    """
    given, folder = _given(config, config_folder)
    cases = candidate_cases(config, given, folder)
    left_open = {key for key in LEFT_OPEN if given.get(key, AUTO) == AUTO}
    if _nodes_without_memory(given, len(cases[0].nodes)):
        left_open.add("memory")

    def fixed_keys(own: Case) -> str:
        source = {key: value for key, value in own.source.items() if key not in left_open}
        if "memory" in left_open and isinstance(source["nodes"], list):
            source["nodes"] = [{**node, "memory": AUTO} for node in source["nodes"]]
        return json.dumps(source, sort_keys=True)

    return fixed_keys(case) in map(fixed_keys, cases)


def _given(config: Config, config_folder: Path) -> tuple[Any, Path]:
    """Return the value of `plan.case`, and the folder of its link table."""
    given = config.plan.case
    if given is None:
        raise InputError(
            "plan",
            None,
            "is missing, but several hosts need a plan",
            "Write plan: auto, to measure the links and plan at startup; plan: {case: FILE}, with "
            "a case that you or skippipe measure wrote; or plan: {file: FILE}, with a plan by "
            "skippipe plan",
        )
    if isinstance(given, str):
        return fields.load_yaml(Path(given), "case"), Path(given).parent
    return given, config_folder


def candidate_cases(config: Config, given: Any, folder: Path = Path()) -> Sequence[Case]:
    """Return the candidates of a case given as a mapping, with open keys filled in.

    Candidates in which a node cannot hold a single microbatch are left out. `folder` is the folder
    of a link table.

    Raises:
        InputError: if no candidate remains, or the case is invalid.
    """
    if not isinstance(given, dict):
        return candidates(given, folder)
    cases = candidates(_with_sizes(config, given), folder)
    if config.averaging.is_outer:
        config.averaging.require_blocks(config.model.stage_partition(len(cases[0].stages)))
    left_open = _nodes_without_memory(given, len(cases[0].nodes))
    if not left_open:
        return cases
    for node in left_open:
        if cases[0].nodes[node].memory_bytes is None:
            raise InputError(
                f"case.{MEMORY_BYTES}",
                None,
                f"is missing, but the memory of node {node} is {AUTO}",
                f"Set {MEMORY_BYTES} to the bytes of each node's device, or memory to a number of "
                f"microbatches",
            )
    counts = [most_in_flight(config, case, left_open) for case in cases]
    possible = [
        _with_memory(case, own, given)
        for case, own in zip(cases, counts, strict=True)
        if all(own.values())
    ]
    if not possible:
        raise _memory_error(config, cases[0], counts[0], given)
    return possible


def size_mismatches(config: Config, case: Case) -> list[str]:
    """Return a sentence for each key of a case that differs from the configuration.

    Sizes without effect, such as that of a stage with one replica, are not compared.
    """
    stages = len(case.stages)
    hop, averaged = hop_bytes(config), averaged_bytes(config, stages)
    sizes = [("activation_bytes", case.activation_bytes, hop.activation)]
    # Without `gradient_bytes`, a case gives gradients the size of activations.
    if "gradient_bytes" in case.source or hop.gradient != hop.activation:
        sizes.append(("gradient_bytes", case.gradient_bytes, hop.gradient))
    found = [
        _sentence(config, key, "", given, own, own)
        for key, given, own in sizes
        if stages > 1 and _differs(given, own)
    ]
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
    """Return the case with all open keys filled in, except memory."""
    filled, hop = _with_any_memory(case), hop_bytes(config)
    of_activations = case.get("activation_bytes", AUTO)
    if of_activations == AUTO:
        filled["activation_bytes"] = hop.activation
    # If only `activation_bytes` has a number, gradients have the same size.
    if case.get("gradient_bytes", of_activations) == AUTO:
        filled["gradient_bytes"] = hop.gradient
    if case.get("stage_bytes", AUTO) == AUTO:
        stages = _stage_count(case)
        # The parser of the case refuses stages that cannot be counted.
        filled["stage_bytes"] = averaged_bytes(config, stages) if stages else 0
    if case.get("averaging", AUTO) == AUTO:
        filled.pop("averaging", None)
        filled |= config.averaging.of_case
    return filled


def _with_any_memory(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with a number for open memory; stages and paths do not depend on it."""
    filled = dict(case)
    if filled.get("memory") == AUTO:
        filled["memory"] = 1
    if isinstance(filled.get("nodes"), list):
        filled["nodes"] = [
            node | {"memory": 1} if _has_auto_memory(node) else node for node in filled["nodes"]
        ]
    return filled


def _has_auto_memory(node: Any) -> bool:
    return isinstance(node, dict) and node.get("memory") == AUTO


def _nodes_without_memory(given: Mapping[str, Any], count: int) -> list[int]:
    """Return the nodes of a case with `count` nodes whose memory is `auto`."""
    described = given["nodes"] if isinstance(given["nodes"], list) else [{}] * count
    of_all = given.get("memory")
    return [index for index, node in enumerate(described) if node.get("memory", of_all) == AUTO]


def _with_memory(case: Case, counts: Mapping[int, int], given: Mapping[str, Any]) -> Case:
    """Return a candidate of the given case with `counts` as the memory of its nodes."""
    source = dict(case.source)
    if not isinstance(source["nodes"], list):
        # All nodes are alike.
        return parse_case(source | {"memory": counts[0]})
    source["nodes"] = [
        {**node, "memory": counts[index]} if index in counts else node
        for index, node in enumerate(source["nodes"])
    ]
    if given.get("memory") == AUTO:
        del source["memory"]
    return parse_case(source)


def _memory_error(
    config: Config, case: Case, counts: Mapping[int, int], given: Mapping[str, Any]
) -> InputError:
    """Return an error on the first node that cannot hold one microbatch, with the bytes needed."""
    node = min(index for index, count in counts.items() if count == 0)
    one_each = with_in_flight(case, dict.fromkeys(counts, 1))
    [use] = [use for use in memory_use(config, one_each) if node in use.nodes]
    own = given["nodes"][node] if isinstance(given["nodes"], list) else {}
    has_own_bytes = MEMORY_BYTES in own
    return InputError(
        f"case.nodes[{node}].{MEMORY_BYTES}" if has_own_bytes else f"case.{MEMORY_BYTES}",
        (own if has_own_bytes else given)[MEMORY_BYTES],
        f"node {node} cannot hold one microbatch: {holding(use)}",
        f"Use {memory_remedies(config, one_each, use)}; or set the memory of this node to a "
        f"number of microbatches, if it serves another stage",
    )


def _stage_count(case: dict[str, Any]) -> int | None:
    """Return the number of stages of a case; None if it is unknown."""
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
    remedy = f"Plan again with {key}: {json.dumps(right)}"
    if config.plan.case is not None:
        remedy = f"Set it to {AUTO}"
        # If omitted, it would be the `activation_bytes` of the case.
        if key != "gradient_bytes":
            remedy = f"Remove it, or set it to {AUTO}"
    return (
        f"case.{key}{place} = {given:.0f}, but the configuration gives {own}: predicted times are "
        f"wrong. {remedy}"
    )


def _sentence_of_averaging(config: Config, case: Case) -> str:
    right = config.averaging.of_case
    remedy = f"Remove it, or set it to {AUTO}"
    if config.plan.case is None:
        remedy = "Plan again " + (
            f"with averaging: {json.dumps(right['averaging'])}" if right else "without averaging"
        )
    return (
        f"case.averaging = {_averaging_text(case.averaging)}, but the configuration gives "
        f"{_averaging_text(config.averaging.policy)}: predicted times are wrong. {remedy}"
    )


def _averaging_text(averaging: AveragingPolicy) -> str:
    return json.dumps(asdict(averaging)) if averaging.is_outer else averaging.mode
