"""The case that a configuration is planned for: its bytes follow from what is trained. No JAX.

What a hop carries and what replicas average are known where the model, the data and the formats
that travel are, so a case inside a configuration leaves them out, or says `auto`. A case that has
figures of its own, or a plan that was made for one, is held against them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.auto import candidates
from skippipe_sched.problem.case import AUTO, Case

from skippipe_jax.config import Config
from skippipe_jax.models.footprint import averaged_bytes, hop_bytes

# Of what follows from the configuration: a figure that is rounded is none to be warned of.
TOLERANCE = 0.05
SIZES = ("activation_bytes", "stage_bytes")


def cases_of(config: Config, config_folder: Path) -> Sequence[Case]:
    """The candidates of the case in `plan.case`, with the sizes that it leaves open.

    `config_folder` is where the link table of a case inside the configuration lies.

    Raises:
        InputError: if there is no case, or for what is wrong with it.
    """
    given, folder = config.plan.case, config_folder
    if given is None:
        raise InputError(
            "plan.case", None, "there is no plan to train by", "Give plan.case or plan.file"
        )
    if isinstance(given, str):
        given, folder = fields.load_yaml(Path(given), "case"), Path(given).parent
    return candidates(_with_sizes(config, given) if isinstance(given, dict) else given, folder)


def differing_sizes(config: Config, case: Case) -> list[str]:
    """What a case says of bytes otherwise than the configuration has it: a sentence for each key.

    A size that nothing depends on, of a stage with one replica, say, is not looked at.
    """
    stages, found = len(case.stages), []
    hop, averaged = hop_bytes(config), averaged_bytes(config, stages)
    if stages > 1 and _differs(case.activation_bytes, hop):
        found.append(_sentence(config, "activation_bytes", "", case.activation_bytes, hop, hop))
    differing = [
        stage
        for stage in range(stages)
        if case.stages[stage] > 1 and _differs(case.stage_bytes[stage], averaged[stage])
    ]
    if differing:
        worst = max(differing, key=lambda stage: abs(case.stage_bytes[stage] / averaged[stage] - 1))
        given, own = case.stage_bytes[worst], averaged[worst]
        found.append(_sentence(config, "stage_bytes", f"[{worst}]", given, own, averaged))
    return found


def _with_sizes(config: Config, case: dict[str, Any]) -> dict[str, Any]:
    """The case with the sizes that it leaves open."""
    left_open = [size for size in SIZES if case.get(size, AUTO) == AUTO]
    filled = dict(case)
    if "activation_bytes" in left_open:
        filled["activation_bytes"] = hop_bytes(config)
    if "stage_bytes" in left_open:
        stages = _stage_count(case)
        # Stages that cannot be counted are refused by whoever reads the case.
        filled["stage_bytes"] = averaged_bytes(config, stages) if stages else 0
    return filled


def _stage_count(case: dict[str, Any]) -> int | None:
    """How many stages a case has, if that can be told."""
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
        remedy = f"Leave it out, or write {key}: {AUTO}"
    return (
        f"case.{key}{place} = {given:.0f}, and by the configuration it is {own}: the plan is for "
        f"other transfers than those of this run. {remedy}"
    )
