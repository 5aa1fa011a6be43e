"""Division of nodes among the lanes of an arm, which train in parallel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.division.lanes import Division, Lane, LaneTraining
from skippipe_sched.division.parts import Whole
from skippipe_sched.division.search import divide
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import load_plan
from skippipe_sched.search.budget import Search

from skippipe_jax.config.resume import json_digest
from skippipe_jax.experts.config import ExpertsConfig, NodesConfig
from skippipe_jax.experts.members import Arm, Member, MemberFactory
from skippipe_jax.experts.tasks import Workspace
from skippipe_jax.models.flops import flops_per_token
from skippipe_jax.models.footprint import stage_parameters
from skippipe_jax.models.planned_case import candidate_cases
from skippipe_jax.storage.files import atomic_write

DIVISION = "division"
"""Folder of divisions, their plans and charts."""


def lanes_of(config: ExpertsConfig, arm: Arm) -> list[Lane]:
    """Return the trainings of each lane of an arm: steps, and costs relative to the case.

    The case is for the size of the probes. For another size, times are multiplied by the ratio of
    operations, and bytes of averaging by the ratio of parameters.
    """
    of_case = _cost(next(iter(MemberFactory(config).probes().values())))

    def training(domain: str) -> LaneTraining:
        compute, size = _cost(arm.members[domain])
        steps = arm.members[domain].steps
        return LaneTraining(domain, steps, compute / of_case[0], size / of_case[1])

    return [
        Lane(lane, tuple(training(domain) for domain in domains))
        for lane, domains in arm.lanes.items()
    ]


def _cost(member: Member) -> tuple[float, float]:
    """Return the operations per token, and the parameters, of the whole model of a run."""
    config = member.config()
    model, length = config.model, config.data.sequence_length
    each = flops_per_token(model, model.layers, length, is_data_stage=True)
    return float(each), float(stage_parameters(model, model.layers, is_data_stage=True))


def divided(place: Workspace, arm: Arm) -> Division:
    """Divide the nodes of the case among the lanes of an arm.

    The division is saved for the training of the experts, unless one is saved already.

    Raises:
        InputError: if there is no case, it cannot be read, or it has too few nodes.
    """
    nodes = place.config.nodes
    if nodes is None:
        raise InputError("nodes", None, "is missing", "Write nodes: {case: FILE}")
    search = Search(seed=place.config.seed, budget_s=nodes.budget_s)
    source, lanes = _source(place.config, nodes), lanes_of(place.config, arm)
    division = divide(source, lanes, search)
    _save_division(place, arm, division)
    return division


def require_case(config: ExpertsConfig, nodes: NodesConfig) -> None:
    """Reject a case of nodes that cannot be read.

    Raises:
        InputError: naming the problem.
    """
    Whole(_source(config, nodes))


def _source(config: ExpertsConfig, nodes: NodesConfig) -> Mapping[str, Any]:
    """Return the case with its link table; missing values follow from the probes' model."""
    run_config = next(iter(MemberFactory(config).probes().values())).config()
    case, folder = nodes.case, Path()
    if isinstance(case, str):
        case, folder = fields.load_yaml(Path(case), "nodes.case"), Path(case).parent
    return candidate_cases(run_config, case, folder)[0].source


def on_nodes(place: Workspace, arm: Arm) -> Arm:
    """Return the arm with experts that train by the plans of its division, made once and saved."""
    plans = _division_plans(place, arm)
    name_of = {id(member): domain for domain, member in arm.members.items()}
    by_domain: dict[str, Member] = {}

    def planned(domain: str) -> Member:
        if domain not in by_domain:
            member, plan = arm.members[domain], plans[domain]
            parent = name_of.get(id(member.parent))
            by_domain[domain] = replace(
                member,
                tree={**member.tree, "plan": {"file": plan}},
                parent=member.parent if parent is None else planned(parent),
                hosts=len(load_plan(Path(plan)).case.nodes),
            )
        return by_domain[domain]

    return replace(arm, members={domain: planned(domain) for domain in arm.members})


def division_path(place: Workspace, arm: Arm) -> Path:
    """Return the path of an arm's division, whether it exists or not."""
    nodes = place.config.nodes
    assert nodes is not None
    lanes = [asdict(lane) for lane in lanes_of(place.config, arm)]
    digest = json_digest([lanes, _source(place.config, nodes), nodes.budget_s, place.config.seed])
    return place.folder / DIVISION / f"{digest}.json"


def _save_division(place: Workspace, arm: Arm, division: Division) -> None:
    """Write a division and its plans, if none is saved for the arm."""
    path = division_path(place, arm)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {}
    for part in division.parts:
        for training, plan in zip(part.lane.trainings, part.plans, strict=True):
            written = plan.to_json()
            name = f"{json_digest(written)}.json"
            atomic_write(path.parent / name, json.dumps(written))
            names[training.name] = str(Path(place.config.folder, path.parent.name, name))
    atomic_write(path, json.dumps({"plans": names, **division.to_json()}, indent=1))


def _division_plans(place: Workspace, arm: Arm) -> dict[str, str]:
    """Return the plan files of an arm's experts, by domain; make them if they are missing."""
    path = division_path(place, arm)
    if not path.exists():
        print(f"dividing the nodes among the lanes of arm {arm.name}", flush=True)
        divided(place, arm)
    return fields.load_json(path, str(path))["plans"]
