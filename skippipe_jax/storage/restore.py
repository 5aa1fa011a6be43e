"""Selection of the checkpoint to restore: the newest with intact files on all hosts.

A damaged checkpoint is replaced by the previous one, unless its step was requested. All hosts
restore the same one: a checkpoint that is damaged on any host, in any part, is used by none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax import log
from skippipe_jax.cluster.agreement import Host, from_host_0, gather
from skippipe_jax.errors import CorruptCheckpoint
from skippipe_jax.storage.checkpoint import (
    Checkpoint,
    CommitRecord,
    committed_steps,
    is_committed,
    open_checkpoint,
    quarantine,
    remove,
    remove_unfinished,
    require_intact,
    step_folder,
    steps_with_folders,
)
from skippipe_jax.storage.files import retry
from skippipe_jax.storage.mirror import Mirror

Parts = Callable[[Checkpoint], Collection[str]]
"""Function that returns the parts of a checkpoint (stages, data state) that a host will read."""


def latest_intact(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint of `step`, by default the newest whose stages are intact.

    Warns of newer damaged checkpoints, and of stages older than the checkpoint.

    Raises:
        InputError: if there is none, as raised by `open_checkpoint` and `require_intact`.
    """
    checkpoint = open_checkpoint(run_dir, step) if step is not None else _latest_intact(run_dir)
    for sentence in checkpoint.staleness_warnings():
        log.warning(sentence)
    return checkpoint


def _latest_intact(run_dir: Path) -> Checkpoint:
    steps: list[int | None] = [*committed_steps(run_dir)] or [None]
    damages: list[CorruptCheckpoint] = []
    while steps:
        try:
            checkpoint = verify(open_checkpoint(run_dir, steps.pop()), every_stage)
        except CorruptCheckpoint as error:
            damages.append(error)
        else:
            for damage in damages:
                log.warning(str(damage.with_remedy(f"Step {checkpoint.step} is read instead")))
            return checkpoint
    raise damages[-1]


def rewind(
    run_dir: Path,
    host: Host,
    up_to: int,
    *,
    parts: Parts | None,
    require_leads: Callable[[], None],
    mirror: Mirror | None = None,
    timeout_s: float = 3600,
) -> tuple[int, Checkpoint | None]:
    """Roll all hosts back to the newest checkpoint `up_to` a step that is intact on all of them.

    All hosts call this together during a run. Hosts without `parts` read nothing and need no access
    to the folder; they only get the step. Before host 0 removes anything it calls `require_leads`,
    which raises if others continue without it.

    Raises:
        InputError: on all hosts, before anything is removed, if there is none or all are damaged.
        TimeoutError: if another host has not verified its parts within `timeout_s`.
    """
    search = CheckpointSearch(run_dir, host, parts, mirror, timeout_s=timeout_s, up_to=up_to)
    last = search.newest()
    if last is None:
        problem, remedy = "there is no checkpoint to roll back to", "Start a new run"
        raise InputError("run_dir", str(run_dir), problem, remedy)

    def clear() -> None:
        require_leads()
        search.clear(last)

    from_host_0(host, "checkpoint/prepared", clear, timeout_s)
    return last.step, None if parts is None else last


class CheckpointSearch:
    """Search of all hosts together for a checkpoint that is intact on each.

    Attributes:
        opened: the checkpoints that `look` has found intact on this host, by step.
        damages: the errors of damaged checkpoints, by step.
        unusable_copies: the steps whose copies are damaged too.
    """

    def __init__(
        self,
        run_dir: Path,
        host: Host,
        parts: Parts | None,
        mirror: Mirror | None = None,
        *,
        timeout_s: float = 3600,
        up_to: int | None = None,
    ):
        """Store the arguments; read nothing yet.

        This host will read `parts` of a checkpoint, or nothing. Host 0 may have a `mirror`.
        Checkpoints after the step `up_to` are ignored.
        """
        self.run_dir, self.host, self.parts, self.mirror = run_dir, host, parts, mirror
        self.timeout_s, self.up_to = timeout_s, up_to
        self.opened: dict[int, Checkpoint] = {}
        self.damages: dict[int, CorruptCheckpoint] = {}
        self.unusable_copies: list[int] = []

    def newest(
        self,
        steps: Sequence[int] | None = None,
        damaged: Sequence[Sequence[str] | None] | None = None,
    ) -> Checkpoint | None:
        """Return the newest checkpoint that is intact here or in the copy; None if there is none.

        All hosts call this together. If already exchanged, `steps` are the steps of the checkpoints
        on host 0, and `damaged` are the results of `look` at the newest, of all hosts.

        Raises:
            InputError: on all hosts, before anything is removed, if all checkpoints are damaged.
            TimeoutError: if another host has not verified its parts within `timeout_s`.
        """
        if steps is None:
            steps = list[int](self._of_host_0("steps", self.saved))
        for step in reversed(steps):
            result = self._verified_by_all(step, "found", damaged)
            damaged = None
            if isinstance(result, Checkpoint):
                return result
            self.damages[step] = result
            result = self._restored(step)
            if result is not None:
                return result
        if not steps:
            return None
        # A run that was fetched from its copy has only some of its checkpoints here.
        mirror = self.mirror
        copies = self._of_host_0(
            "copies", lambda: [] if mirror is None else mirror.before(steps[0])
        )
        for step in reversed(copies):
            restored = self._restored(step)
            if restored is not None:
                return restored
        raise self.damages[steps[0]]

    def saved(self) -> list[int]:
        """Return the steps of the existing checkpoints, ascending."""
        saved = retry(self.run_dir, lambda: committed_steps(self.run_dir))
        return [step for step in saved if self.up_to is None or step <= self.up_to]

    def clear(self, last: Checkpoint | None) -> None:
        """Remove checkpoints after `last`, whose steps are repeated, and unfinished ones.

        Called on host 0. Quarantines damaged checkpoints, and warns of them and of stale stages.
        """
        for step, damage in self.damages.items():
            remedy = "It was fetched again from the copy"
            if last is not None and step != last.step:
                remedy = f"The run continues from step {last.step}"
            log.warning(str(damage.with_remedy(remedy)))
        for sentence in [] if last is None else last.staleness_warnings():
            log.warning(sentence)
        for step in self.unusable_copies:
            assert self.mirror is not None
            self.mirror.forget(step)
        retry(self.run_dir, lambda: _clear(self.run_dir, last, self.damages.keys()))

    def look(self, step: int) -> list[str] | None:
        """Verify a checkpoint on this host; return the fields of its error, or None if intact."""
        parts = self.parts
        if parts is None:  # A host that reads nothing has no record.
            self.opened[step] = Checkpoint(
                step_folder(self.run_dir, step), CommitRecord(step=step, stage_layers=(), files={})
            )
            return None

        def verify_local() -> Checkpoint:
            return verify(open_checkpoint(self.run_dir, step), parts)

        try:
            self.opened[step] = retry(self.run_dir, verify_local)
        except CorruptCheckpoint as error:
            return error.fields()
        return None

    def _verified_by_all(
        self, step: int, when: str, damaged: Sequence[Sequence[str] | None] | None = None
    ) -> Checkpoint | CorruptCheckpoint:
        """Return the checkpoint if it is intact on all hosts, else the first error."""
        if damaged is None:
            name = f"checkpoint/{step}/{when}"
            damaged = [*gather(self.host, name, lambda: self.look(step), self.timeout_s).values()]
        for fields in damaged:
            if fields is not None:
                return CorruptCheckpoint(step, *fields)
        return self.opened[step]

    def _restored(self, step: int) -> Checkpoint | None:
        """Fetch the checkpoint from the copy again; return it if it is intact, else None."""
        mirror = self.mirror
        is_restored = self._of_host_0(
            f"{step}/is_restored", lambda: mirror is not None and mirror.restore(self.run_dir, step)
        )
        if not is_restored:
            return None
        result = self._verified_by_all(step, "restored")
        if isinstance(result, Checkpoint):
            return result
        self.damages.setdefault(step, result)
        self.unusable_copies.append(step)
        return None

    def _of_host_0(self, name: str, make: Callable[[], Any]) -> Any:
        return from_host_0(self.host, f"checkpoint/{name}", make, self.timeout_s)


def _clear(run_dir: Path, last: Checkpoint | None, damaged: Collection[int]) -> None:
    """Remove folders of steps after `last` and uncommitted ones; quarantine damaged ones."""
    remove_unfinished(run_dir)
    for step in steps_with_folders(run_dir):
        folder = step_folder(run_dir, step)
        is_last = last is not None and step == last.step
        if step in damaged and not is_last and is_committed(folder):
            quarantine(folder)
        elif last is None or step > last.step or not is_committed(folder):
            remove(folder)


def verify(checkpoint: Checkpoint, parts: Parts) -> Checkpoint:
    """Verify some parts of a checkpoint, and return it with these marked as intact.

    Raises:
        CorruptCheckpoint: if a part is damaged.
    """
    names = frozenset(parts(checkpoint))
    for part in sorted(names):
        require_intact(checkpoint, part)
    return replace(checkpoint, intact=names)


def every_stage(checkpoint: Checkpoint) -> set[str]:
    """Return the names of all stages, as the parts to read."""
    return checkpoint.record.stages()
