"""Comparison of existing runs and scores with the current text and cases.

Runs and scores are identified by their configuration, which contains file names. When a file
changes, they keep their place although they belong to another text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.errors import CorruptCheckpoint
from skippipe_jax.experts.members import Member
from skippipe_jax.experts.tasks import Scored, TrainingTask, Workspace
from skippipe_jax.models.planned_case import matches_configured_case
from skippipe_jax.storage.checkpoint import committed_steps, open_checkpoint
from skippipe_jax.storage.loading import load_data_state
from skippipe_jax.storage.run_dir import RunDir


@dataclass(frozen=True)
class Texts:
    """Identity of the current text.

    Attributes:
        training: fingerprint of the training text, by its domains.
        held_out: digest of the scored text, by domain and part.
    """

    training: Mapping[tuple[str, ...], str]
    held_out: Mapping[tuple[str, str], str]


def require_same_inputs(
    place: Workspace, tasks: Sequence[TrainingTask | Scored], texts: Texts
) -> None:
    """Reject existing runs and scores of another text or another case.

    This includes runs that started from such a run. `tasks` must be ordered after their needs.

    Raises:
        InputError: naming the folders of all these runs and scores.
    """
    changed: dict[str, Path] = {}
    scores: dict[str, Path] = {}
    for task in tasks:
        is_changed = any(name in changed for name in task.needs)
        if isinstance(task, TrainingTask):
            folder = place.run_dir(task.member)
            if folder.exists() and (is_changed or _has_changed(place, task.member, texts)):
                changed[task.name] = folder
            is_changed = task.name in changed
        model = task.model if isinstance(task, TrainingTask) else task
        if model.is_done() and (is_changed or _scored_other_text(model, texts)):
            scores[task.name] = model.folder
    if changed or scores:
        folders = *changed.values(), *scores.values()
        names = (str(folder.relative_to(place.folder)) for folder in folders)
        raise InputError(
            "folder",
            place.config.folder,
            f"contains results of another text or case: {', '.join(names)}",
            "Remove these, restore the text and the case, or set another folder: --set folder=DIR",
        )


def _has_changed(place: Workspace, member: Member, texts: Texts) -> bool:
    """Return whether the folder of a run belongs to another text or another case."""
    run = place.run_dir(member)
    fingerprint = _fingerprint(run)
    if fingerprint not in (None, texts.training[member.domains]):
        return True
    config = member.config()
    if not RunDir(run).is_run or config.plan.measure:
        return False
    plan = RunDir(run).plan()
    if config.plan.file is not None:
        return load_plan(Path(config.plan.file)).to_json() != plan.to_json()
    return not matches_configured_case(config, place.configs, plan.case)


def _fingerprint(run: Path) -> str | None:
    """Return the fingerprint of the text that a run has read; None without a checkpoint."""
    for step in reversed(committed_steps(run)):
        try:
            return load_data_state(open_checkpoint(run, step))["fingerprint"]
        except CorruptCheckpoint:
            continue  # A resumed run skips it too.
    return None


def _scored_other_text(model: Scored, texts: Texts) -> bool:
    """Return whether the scores of a model belong to another text."""
    return any(
        model.scores(domain, part).text != texts.held_out[domain, part]
        for domain, part, _ in model.asked["parts"]
    )
