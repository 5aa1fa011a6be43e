"""Steps of ``skippipe experts``: text, seeds, probes, experts, scores, and the comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.campaign.running import Task, run_all
from skippipe_jax.data.batches import (
    TrainingBatches,
    check_vocabulary,
    tokenizer_of,
)
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.experts import difficulty, evaluation
from skippipe_jax.experts.members import EXPERT, Arm, Member, MemberFactory, naming
from skippipe_jax.experts.nodes import division_path, on_nodes, require_case
from skippipe_jax.experts.picture import picture
from skippipe_jax.experts.stale_results import Texts, require_same_inputs
from skippipe_jax.experts.tasks import Scored, TrainingTask, Workspace, data_of
from skippipe_jax.inference.scores import text_of
from skippipe_jax.interop.conversion import to_huggingface
from skippipe_jax.models.estimate import planned_case_and_visits
from skippipe_jax.storage.files import atomic_write
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.initial_weights import open_initial_weights

RESULTS, PICTURE, DIFFICULTY = "results.json", "results.svg", "difficulty.json"
PREPARED = "prepared.json"


def train(place: Workspace) -> dict[str, Any]:
    """Train and score everything that is missing, and compare; return the content of results.json.

    Ctrl-C, or a crash, loses at most the progress of runs since their last checkpoint; the next
    call continues.

    Raises:
        InputError: if the configuration, the text or a model cannot be used, before any training;
            or if a run fails.
    """
    with RunLock(place.folder, "folder") as lock:
        lock.acquire()
        prepare(place)
        texts = require_usable(place)
        probes = probings(place) if place.config.is_probed else []
        if not all(task.is_done() for task in probes):
            # The other runs depend on the results of the probes.
            require_same_inputs(place, probes, texts)
        hard = probed(place) if place.config.is_probed else None
        arms = arms_of(place, hard)
        tasks = [*trainings(place, arms), *averagings(place, arms)]
        require_same_inputs(place, [*probes, *tasks], texts)
        for arm in arms if place.config.nodes else []:
            shared = side_by_side(place, arm)
            _run(shared, trainings(shared, [arm]))
        _run(place, tasks)
        return compare(place, arms, hard)


def side_by_side(place: Workspace, arm: Arm) -> Workspace:
    """Return the place with all lanes of an arm training in parallel, each on its own nodes."""
    config = replace(place.config, at_once=max(1, len(arm.lanes)))
    return replace(place, config=config)


def probe(place: Workspace) -> dict[str, float]:
    """Train the probed seed and its probes; return the difficulty of each domain."""
    with RunLock(place.folder, "folder") as lock:
        lock.acquire()
        prepare(place)
        require_same_inputs(place, probings(place), require_usable(place))
        return probed(place)


def evaluate(place: Workspace) -> dict[str, Any]:
    """Compare existing runs and scores.

    Raises:
        InputError: if something is missing.
    """
    hard = _known_difficulty(place)
    arms = _known_arms(place, hard)
    _require_done([*trainings(place, arms), *averagings(place, arms)])
    return compare(place, arms, hard)


def prepare(place: Workspace) -> None:
    """Run the module that writes the text, once.

    Raises:
        InputError: if it fails.
    """
    module, text = place.config.prepare, place.folder / "text"
    written = text / PREPARED
    if module is None:
        return
    if written.exists() and fields.load_json(written, str(written)) == {"by": module}:
        return
    print(f"writing text: python -m {module} {text}", flush=True)
    text.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", module, str(text)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no output on stderr"])[-1]
        problem = f"exited with code {done.returncode}: {last_line.removesuffix('.')}"
        remedy = f"Run python -m {module} {text} to see all output"
        raise InputError("prepare", module, problem, remedy)
    atomic_write(written, json.dumps({"by": module}))


def require_usable(place: Workspace) -> Texts:
    """Check all inputs of the runs and of the comparison before training; return the current text.

    Raises:
        InputError: naming what cannot be used.
    """
    config = place.config
    # Assume equal difficulties: these checks do not depend on the lanes.
    assumed = {name: 1.0 for name in config.inside}
    arms = MemberFactory(config, assumed).arms()
    members = [run for arm in arms for member in arm.members.values() for run in member.lineage()]
    if config.is_probed:
        members += MemberFactory(config).probes().values()
    each = {member.digest: member for member in members}.values()
    tokenizers: dict[str, str] = {}
    # Check one member of each kind and size: the others differ only in text and steps.
    for member in {(member.kind, member.size): member for member in each}.values():
        run_config = member.config()
        name = tokenizer_of(run_config.data)
        tokenizer = load_tokenizer(name)
        tokenizers.setdefault(tokenizer.digest, f"{member.size} ({name})")
        check_vocabulary(run_config.model.vocabulary_size, tokenizer)
        open_initial_weights(run_config, anew=True)
        if not run_config.plan.measure and not (config.nodes and member.kind == EXPERT):
            case, _ = planned_case_and_visits(run_config, place.configs)
            run_config.model.stage_partition(len(case.stages))
    if len(tokenizers) > 1:
        problem = "tokenizers differ, so the predictions of experts cannot be mixed"
        remedy = "Set the same data.tokenizer for all sizes"
        raise InputError("sizes", ", ".join(tokenizers.values()), problem, remedy)
    texts = _require_text(place, each)
    if config.nodes is not None:
        require_case(config, config.nodes)
    return texts


def _require_text(place: Workspace, members: Iterable[Member]) -> Texts:
    """Return the current text; reject a domain without text in one of its parts."""
    asked = place.asked()
    data = data_of(next(iter(members)).config().data, asked)
    with naming(place.config.names):
        held_out = {
            (domain, part): text_of(data, domain, part, sequences)
            for domain, part, sequences in asked["parts"]
        }
    training = {}
    for member in {member.domains: member for member in members}.values():
        with naming(member.domains):
            training[member.domains] = TrainingBatches(member.config().data).fingerprint
    return Texts(training, held_out)


def probed(place: Workspace) -> dict[str, float]:
    """Return the difficulty of each domain, measured if it has not been."""
    _run(place, probings(place))
    losses = difficulty.measured_losses(place)
    atomic_write(place.folder / DIFFICULTY, json.dumps(losses, indent=1) + "\n")
    return losses


def arms_of(place: Workspace, hard: Mapping[str, float] | None) -> list[Arm]:
    """Return all arms; with shared nodes, experts train by the plans of a division."""
    arms = MemberFactory(place.config, hard).arms()
    if place.config.nodes is None:
        return arms
    return [on_nodes(place, arm) if arm.lanes else arm for arm in arms]


def divisible_arms(place: Workspace) -> list[Arm]:
    """Return the arms of experts, for whose lanes nodes can be divided.

    Raises:
        InputError: if lanes need the measured difficulty, and it has not been measured.
    """
    arms = MemberFactory(place.config, _known_difficulty(place)).arms()
    return [arm for arm in arms if arm.lanes and not arm.averages]


def trainings(place: Workspace, arms: Iterable[Arm]) -> list[TrainingTask]:
    """Return the training of all runs of the arms, and of the runs that they start from."""
    return trainings_of(place, [member for arm in arms for member in arm.members.values()])


def trainings_of(place: Workspace, members: Iterable[Member]) -> list[TrainingTask]:
    """Return the training of these runs, and of the runs that they start from, each once."""
    asked = list(members)
    needed = {run.name: run for member in asked for run in member.lineage()}
    names = {member.name for member in asked}
    return [TrainingTask(place, run, scored=name in names) for name, run in needed.items()]


def probings(place: Workspace) -> list[TrainingTask]:
    """Return the training of the probes, and of their seed."""
    return trainings_of(place, MemberFactory(place.config).probes().values())


def averagings(place: Workspace, arms: Iterable[Arm]) -> list[Scored]:
    """Return the models that are means of others; the mean of one run is the run."""
    return [
        Scored(place, tuple(arm.members.values()))
        for arm in arms
        if arm.averages and len(arm.members) > 1
    ]


def compare(
    place: Workspace, arms: Sequence[Arm], hard: Mapping[str, float] | None
) -> dict[str, Any]:
    """Write results.json and the chart; return the content of results.json."""
    results = {
        "seed": place.config.seed,
        "difficulty": hard,
        "evaluation": asdict(place.config.evaluation),
        "arms": evaluation.results_of(place, arms),
    }
    atomic_write(place.folder / RESULTS, json.dumps(results, indent=1) + "\n")
    drawn = picture(place.config.inside, place.config.outside, results["arms"])
    atomic_write(place.folder / PICTURE, drawn)
    return results


def export(place: Workspace) -> list[Path]:
    """Write every run of the arms as a Hugging Face model; averaged models are not runs.

    Existing models are not overwritten.

    Raises:
        InputError: if a run has not been trained.
    """
    hard = _known_difficulty(place)
    members = [member for arm in _known_arms(place, hard) for member in arm.members.values()]
    each = {member.name: member for member in members}
    _require_done(trainings_of(place, each.values()))
    folders = []
    for name, member in each.items():
        folders.append(place.folder / "huggingface" / name)
        if not folders[-1].exists():
            folders[-1].parent.mkdir(exist_ok=True)
            to_huggingface(place.run_dir(member), folders[-1])
    return folders


def _known_difficulty(place: Workspace) -> dict[str, float] | None:
    """Return the difficulty of the domains if it is needed, after the probes are done.

    Raises:
        InputError: if they are not.
    """
    if not place.config.is_probed:
        return None
    _require_done(probings(place))
    return difficulty.measured_losses(place)


def _known_arms(place: Workspace, hard: Mapping[str, float] | None) -> list[Arm]:
    """Return all arms, after nodes have been divided if that is configured.

    Raises:
        InputError: if they have not.
    """
    for arm in MemberFactory(place.config, hard).arms() if place.config.nodes else []:
        if arm.lanes and not division_path(place, arm).exists():
            problem = "has no division of nodes yet"
            raise InputError("arms", arm.name, problem, "Run skippipe experts CONFIG")
    return arms_of(place, hard)


def _run(place: Workspace, tasks: Sequence[Task]) -> None:
    run_all(tasks, place.folder / "logs", place.config.at_once)


def _require_done(tasks: Sequence[Task]) -> None:
    missing = [task.name for task in tasks if not task.is_done()]
    if missing:
        problem = f"has not been trained and scored ({len(missing)} of {len(tasks)} runs)"
        raise InputError("folder", missing[0], problem, "Run skippipe experts CONFIG")
