"""Which checkpoint is gone on from: the newest whose files are as they were committed.

One that is damaged gives way to the one before it, unless its step was named. All hosts go on from
the same: what is damaged for one of them, whoever reads which part, counts for none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import Host, from_host_0, gather
from skippipe_jax.storage.layout import (
    DATA,
    Checkpoint,
    DamagedCheckpoint,
    is_committed,
    open_checkpoint,
    remove,
    remove_unfinished,
    require_intact,
    saved_steps,
    set_aside,
    stage_name,
    step_folder,
    steps_with_folders,
)
from skippipe_jax.storage.retrying import retried
from skippipe_jax.storage.warning import warn

Parts = Callable[[Checkpoint], Collection[str]]
"""Which parts of a checkpoint, stages and the state of the data, a host is going to read."""


class Spare(Protocol):
    """A copy of a run elsewhere, from which a damaged checkpoint can be had again."""

    def restore(self, run_dir: Path, step: int) -> bool:
        """Put the checkpoint of a step in the place of the damaged one, if there is such a copy."""
        ...

    def before(self, step: int) -> list[int]:
        """The steps before `step` of which there are copies, ascending."""
        ...

    def forget(self, step: int) -> None:
        """Remove the copy of a checkpoint, which is damaged too."""
        ...


def every_part(checkpoint: Checkpoint) -> list[str]:
    """All stages and the state of the data."""
    return [*every_stage(checkpoint), DATA]


def newest_whole(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint of `step`, by default the newest whose stages are whole.

    Says on stderr which are not, and which stages of it are older.

    Raises:
        InputError: if there is none, as `open_checkpoint` and `require_intact` say it.
    """
    found = open_checkpoint(run_dir, step) if step is not None else _newest_whole(run_dir)
    for sentence in found.about_left_out():
        warn(sentence)
    return found


def _newest_whole(run_dir: Path) -> Checkpoint:
    steps: list[int | None] = [*saved_steps(run_dir)] or [None]
    damages: list[DamagedCheckpoint] = []
    while steps:
        try:
            found = verified(open_checkpoint(run_dir, steps.pop()), every_stage)
        except DamagedCheckpoint as error:
            damages.append(error)
        else:
            for damage in damages:
                warn(str(damage.with_remedy(f"Step {found.step} is read, before it")))
            return found
    raise damages[-1]


def prepare_run(
    run_dir: Path,
    host: Host,
    step: int | None = None,
    *,
    parts: Parts = every_part,
    spare: Spare | None = None,
    timeout_s: float = 3600,
) -> Checkpoint | None:
    """Make the run folder ready to go on from ``step``, by default from its newest that is whole.

    Every host calls this before it trains, and looks at those `parts` of a checkpoint that it will
    read. Host 0 removes folders that a crash left without a COMMITTED, and checkpoints after the
    one that is gone on from, whose steps the run will take anew. A damaged one it sets aside, says
    so on stderr, and puts its `spare` copy in that place where there is one. When that is done all
    hosts return the checkpoint to resume from, or None when the run has none.

    Raises:
        InputError: on all hosts, before anything is removed, when ``step`` cannot be opened, or all
            checkpoints are damaged.
        TimeoutError: another host has not looked within `timeout_s`.
    """
    if step is not None:
        open_checkpoint(run_dir, step)
    search = _Search(run_dir, host, parts, spare, timeout_s)
    last = search.named(step) if step is not None else search.newest()

    def clear() -> None:
        search.tell(last)
        _clear(run_dir, last, search.damages.keys())

    from_host_0(host, "checkpoint/prepared", clear, timeout_s)
    return last


def go_back(
    run_dir: Path,
    host: Host,
    up_to: int,
    *,
    parts: Parts | None,
    require_leads: Callable[[], None],
    spare: Spare | None = None,
    timeout_s: float = 3600,
) -> tuple[int, Checkpoint | None]:
    """The newest checkpoint `up_to` a step that is whole for all hosts, which go back to it.

    Like `prepare_run`, while a run trains. Hosts without `parts` read none, and may not reach the
    folder; they are told the step only. Before host 0 removes anything it calls `require_leads`,
    which raises where others go on without it.

    Raises:
        InputError: on all hosts, before anything is removed, when there is none, or all are
            damaged.
        TimeoutError: another host has not looked within `timeout_s`.
    """
    search = _Search(run_dir, host, parts, spare, timeout_s, up_to)
    last = search.newest()
    if last is None:
        problem, remedy = "there is no checkpoint to go back to", "Start a new run"
        raise InputError("run_dir", str(run_dir), problem, remedy)

    def clear() -> None:
        require_leads()
        search.tell(last)
        retried(run_dir, lambda: _clear(run_dir, last, search.damages.keys()))

    from_host_0(host, "checkpoint/prepared", clear, timeout_s)
    return last.step, None if parts is None else last


class _Search:
    """The way of all hosts together to a checkpoint that is whole for each.

    Attributes:
        damages: what was damaged here, by step.
        useless: the steps whose copies are damaged too.
    """

    def __init__(
        self,
        run_dir: Path,
        host: Host,
        parts: Parts | None,
        spare: Spare | None,
        timeout_s: float,
        up_to: int | None = None,
    ):
        self.run_dir = run_dir
        self.host = host
        self.parts = parts
        self.spare = spare
        self.timeout_s = timeout_s
        self.up_to = up_to
        self.damages: dict[int, DamagedCheckpoint] = {}
        self.useless: list[int] = []

    def named(self, step: int) -> Checkpoint:
        """That of a step, or its damage is raised."""
        found = self._seen(step, "found")
        if isinstance(found, DamagedCheckpoint):
            raise found
        return found

    def newest(self) -> Checkpoint | None:
        """The newest that is whole here or in the copy; None if there is none at all."""
        steps = self._of_host_0("steps", self._saved)
        for step in reversed(steps):
            found = self._seen(step, "found")
            if isinstance(found, Checkpoint):
                return found
            self.damages[step] = found
            found = self._restored(step)
            if found is not None:
                return found
        if not steps:
            return None
        # A run that was fetched from its copy has not brought all that is there.
        spare = self.spare
        copies = self._of_host_0("copies", lambda: [] if spare is None else spare.before(steps[0]))
        for step in reversed(copies):
            found = self._restored(step)
            if found is not None:
                return found
        raise self.damages[steps[0]]

    def _saved(self) -> list[int]:
        saved = retried(self.run_dir, lambda: saved_steps(self.run_dir))
        return [step for step in saved if self.up_to is None or step <= self.up_to]

    def tell(self, last: Checkpoint | None) -> None:
        """Say what was damaged or is old, and remove damaged copies; on host 0."""
        for step, damage in self.damages.items():
            remedy = "It was fetched from the copy again"
            if last is not None and step != last.step:
                remedy = f"The run goes on from step {last.step}"
            warn(str(damage.with_remedy(remedy)))
        for sentence in [] if last is None else last.about_left_out():
            warn(sentence)
        for step in self.useless:
            assert self.spare is not None
            self.spare.forget(step)

    def _seen(self, step: int, when: str) -> Checkpoint | DamagedCheckpoint:
        """A checkpoint whose parts are intact on all hosts, or what one of them finds damaged."""
        # What a host that reads nothing knows of it.
        opened = [Checkpoint(step_folder(self.run_dir, step), step, (), {})]

        def look() -> list[str] | None:
            if self.parts is None:
                return None
            parts = self.parts

            def see() -> Checkpoint:
                return verified(open_checkpoint(self.run_dir, step), parts)

            try:
                opened[0] = retried(self.run_dir, see)
            except DamagedCheckpoint as error:
                return error.parts()
            return None

        told = gather(self.host, f"checkpoint/{step}/{when}", look, self.timeout_s)
        damaged = [parts for parts in told.values() if parts is not None]
        return DamagedCheckpoint(step, *damaged[0]) if damaged else opened[0]

    def _restored(self, step: int) -> Checkpoint | None:
        """The checkpoint as the copy has it, if that is whole."""
        spare = self.spare
        is_restored = self._of_host_0(
            f"{step}/is_restored", lambda: spare is not None and spare.restore(self.run_dir, step)
        )
        if not is_restored:
            return None
        found = self._seen(step, "restored")
        if isinstance(found, Checkpoint):
            return found
        self.damages.setdefault(step, found)
        self.useless.append(step)
        return None

    def _of_host_0(self, name: str, make: Callable[[], Any]) -> Any:
        return from_host_0(self.host, f"checkpoint/{name}", make, self.timeout_s)


def _clear(run_dir: Path, last: Checkpoint | None, damaged: Collection[int]) -> None:
    """Leave no folder of a step after the last, and none that is not whole."""
    remove_unfinished(run_dir)
    for found in steps_with_folders(run_dir):
        folder = step_folder(run_dir, found)
        is_last = last is not None and found == last.step
        if found in damaged and not is_last and is_committed(folder):
            set_aside(folder)
        elif last is None or found > last.step or not is_committed(folder):
            remove(folder)


def verified(checkpoint: Checkpoint, parts: Parts) -> Checkpoint:
    """The checkpoint, some of whose parts have been found as they were committed.

    Raises:
        DamagedCheckpoint: if they are not.
    """
    names = frozenset(parts(checkpoint))
    for part in sorted(names):
        require_intact(checkpoint, part)
    return replace(checkpoint, intact=names)


def every_stage(checkpoint: Checkpoint) -> list[str]:
    """All stages."""
    return [stage_name(stage) for stage in range(len(checkpoint.stage_layers))]
