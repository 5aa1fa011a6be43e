"""A checkpoint that hosts write together, and commit once all of it is there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from skippipe_sched.errors import FULL_DISK, InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.cluster.agreement import Host, from_host_0, gather
from skippipe_jax.errors import CheckpointFailed, GenerationEnded, PeerFailed, StorageError
from skippipe_jax.storage.arrays import PyTree, begin_writing
from skippipe_jax.storage.checkpoint import (
    DATA,
    CheckpointItems,
    CommitRecord,
    commit,
    committed_steps,
    digest,
    is_committed,
    open_checkpoint,
    part_of,
    pending_folder,
    remove,
    remove_unfinished,
    replica_name,
    stage_name,
    step_folder,
)
from skippipe_jax.storage.files import RETRY_PAUSES_S, os_error_behind, retry, synchronize
from skippipe_jax.storage.mirror import Mirror
from skippipe_jax.storage.run_dir import RunDir

T = TypeVar("T")

# Why a file cannot be written that is no fault of this program's, as Orbax tells of it in a text.
OF_THE_DISK = {
    os.strerror(number): number
    for number in (
        *FULL_DISK,
        errno.EROFS,
        errno.EFBIG,
        errno.EACCES,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    )
}

BEST_METRIC = "validation_loss"
"""The checkpoint with the lowest is the best."""

MOST_FAILURES = 3
"""A host ends after so many failed writes in a row, of one checkpoint or several."""


SWEEPS, SWEEP_S = 5, 0.1
"""Orbax raises its error while other writes of its own go on, which may create files once more."""


class NotWritten(StorageError):
    """A part of a checkpoint could not be written, as the file system has failed."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints of a run are kept.

    Attributes:
        keep: how many of the last.
        keep_every: those of every so many steps are kept for good.
    """

    keep: int
    keep_every: int | None = None

    def best(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """Choose the step of lowest validation loss, if one has such a metric; it is kept, too."""
        losses = [(own[BEST_METRIC], step) for step, own in metrics.items() if BEST_METRIC in own]
        return min(losses)[1] if losses else None

    def retained(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Choose from the steps that have checkpoints, each with its metrics."""
        steps = sorted(metrics)
        every = self.keep_every
        regular = () if every is None else (step for step in steps if step % every == 0)
        return {*steps[-self.keep :], *regular, self.best(metrics)} - {None}


class Checkpointer:
    """Writes the parts that this host owns and, with its peers, commits each checkpoint once."""

    def __init__(
        self,
        run_dir: Path,
        host: Host,
        *,
        stage_layers: Sequence[int],
        policy: RetentionPolicy,
        mirror: Mirror | None = None,
        timeout_s: float = 1200,
        generation: int = 0,
        on_commit: Callable[[int], None] = lambda _: None,
    ):
        """Write below ``run_dir``; on host 0, remove what the ``policy`` does not keep.

        On host 0, ``mirror`` is brought up to date after a checkpoint; where that takes longer than
        until the next one, after the last that is there by then. What is being copied is not
        removed. A checkpoint is whole with a stage for each of ``stage_layers``, their blocks, and
        the state of the data. Hosts wait ``timeout_s`` at most for one another's parts. Those of
        another ``generation`` may write the same steps meanwhile; where there are generations two
        checkpoints are kept at least. ``on_commit`` is called with the step of each that is whole.
        """
        self._run_dir = run_dir
        self._host = host
        self._stage_layers = tuple(stage_layers)
        # Hosts that are left may not know that the last one is whole, so the one before is kept.
        self._policy = replace(policy, keep=max(policy.keep, 2)) if generation else policy
        self._mirror = mirror
        self._timeout_s = timeout_s
        self._generation = generation
        self._on_commit = on_commit
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last_save: Future[None] | None = None
        self._step, self._attempt, self._failures = -1, 1, 0
        # Slow links hold up neither training nor the next checkpoint.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_copy")
        self._next_copy: Future[None] | None = None
        self._being_copied: set[int] = set()
        self._removing = threading.Lock()
        self._known_metrics: dict[int, Mapping[str, float]] = {}
        # What best.json says; what it said before this was opened is not known.
        self._best: Mapping[str, float] | None = {}
        if host.index == 0:  # A run that goes on from an earlier step takes later ones anew.
            retry(run_dir, self._write_best)

    def save(
        self,
        step: int,
        items: CheckpointItems,
        data: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Begin a checkpoint; on return its arrays may be donated, and the writing goes on.

        Every host calls this, at the same steps; again for the same step where `wait` says that it
        is not written, which is then tried some time later. One checkpoint is written at a time:
        this waits for the one before.

        Args:
            step: iterations done so far.
            items: what this host writes.
            data: how far the data has been read, fit for JSON, from one host and None from others.
            metrics: from host 0, what was measured after the step: finite numbers.

        Raises:
            InputError: the step is saved already.
            Exception: the checkpoint before was not committed, see `wait`.
        """
        self.wait()
        whole = step_folder(self._run_dir, step)
        if is_committed(whole):
            raise InputError(
                str(whole), step, "is saved already", "Resume the run, or name a new run folder"
            )
        self._attempt = self._attempt + 1 if step == self._step else 1
        self._step = step
        if self._attempt > 1:
            time.sleep(RETRY_PAUSES_S[min(self._attempt, len(RETRY_PAUSES_S)) - 1])
        folder = pending_folder(self._run_dir, step, self._generation, self._attempt)
        texts = {} if data is None else {DATA: json.dumps(data)}
        parts = {stage_name(stage): state for stage, state in items.stages.items()}
        parts |= {replica_name(*of): state for of, state in items.replicas.items()}
        writes, error = contextlib.ExitStack(), None
        try:
            if parts or texts:
                folder.mkdir(parents=True, exist_ok=True)
            for name, state in parts.items():
                writes.enter_context(begin_writing(folder / name, state))
        except Exception as raised:
            # Raised by the background thread, which tells the other hosts that wait for this part.
            error = raised
        names = [*parts]  # The states themselves are held by who writes them, and as long as that.

        def complete() -> dict[str, str]:
            with writes:  # Leaving it waits for all files, also where one could not be begun.
                if error is not None:
                    raise error
            return _complete_part(folder, names, texts)

        record = CommitRecord(
            step=step,
            stage_layers=self._stage_layers,
            files={},
            stale_stages=dict(items.stale_stages),
            replica_states=items.replica_states,
            metrics=dict(metrics or {}),
        )
        self._last_save = self._background.submit(
            self._finish, folder, complete, record, [*names, *texts]
        )

    def wait(self) -> bool:
        """Wait until the last save is committed; on all hosts False if one could not write it.

        Training goes on then. What is there of it is removed, and the next checkpoint, or the same
        once more, may be written.

        Raises:
            TemporaryError: this host has failed to write its part three times in a row.
            TimeoutError: it was not, since another host has not done its part in time.
            GenerationEnded: it was not, since hosts are lost, and those that are left save again.
            CheckpointFailed: it was not, for another reason, on this host or another.
        """
        last_save, self._last_save = self._last_save, None
        if last_save is None:
            return True
        try:
            last_save.result()
        except (TimeoutError, GenerationEnded):
            raise
        except NotWritten as error:
            self._failures += 1
            problem = f"a checkpoint cannot be written there: {error}"
            if self._failures == MOST_FAILURES:
                remedy = "Mend that, and --resume goes on from the checkpoint before"
                raise TemporaryError("run_dir", str(self._run_dir), problem, remedy) from error
            log.warning(f"{self._run_dir}, step {self._step}: {problem}. Training goes on")
            return False
        except Exception as error:
            if isinstance(error, PeerFailed) and f"{NotWritten.__name__}: " in str(error):
                return False
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointFailed(f"a checkpoint is not committed: {problem}") from error
        self._failures = 0
        return True

    def complete_copy(self) -> None:
        """Return when the copy has all that is held on to, or could not be written.

        Whoever led before may have been lost while it copied.
        """
        if self._mirror is not None:
            self._copying.submit(self._complete_copy, self._mirror).result()

    def _complete_copy(self, mirror: Mirror) -> None:
        if self._not_copied(mirror):
            self._copy(mirror)

    def _not_copied(self, mirror: Mirror) -> list[int]:
        return sorted(self._retained(committed_steps(self._run_dir)) - mirror.copied)

    def close(self) -> None:
        """Wait for the last save and its copy, and end the background threads.

        Says which of the checkpoints that are kept could not be copied.
        """
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._copying.shutdown()
        if self._mirror is not None and (missing := self._not_copied(self._mirror)):
            log.warning(f"not copied to {self._mirror.url}: the checkpoints of steps {missing}")

    def _finish(
        self,
        folder: Path,
        complete: Callable[[], dict[str, str]],
        record: CommitRecord,
        own_parts: Collection[str],
    ) -> None:
        """Complete this host's part, and have host 0 commit once all parts are there."""
        again = f".{self._attempt}" if self._attempt > 1 else ""
        name = f"checkpoint/{record.step}{again}"
        try:
            parts = gather(self._host, f"{name}/part", lambda: _written(complete), self._timeout_s)
            whole = msgspec.structs.replace(record, files=dict(ChainMap(*parts.values())))
            from_host_0(
                self._host,
                f"{name}/whole",
                lambda: _written(lambda: self._commit(folder, whole)),
                self._timeout_s,
            )
        except (NotWritten, PeerFailed):
            # All hosts know that it comes to nothing; on a full disk it would be in the way.
            _discard(folder, own_parts)
            raise
        # In an elastic group this tells the consensus to which step it may go back.
        self._on_commit(record.step)

    def _commit(self, pending: Path, record: CommitRecord) -> None:
        """Commit a checkpoint, if all of it is there; drop old ones."""
        written, expected = {part_of(name) for name in record.files}, record.parts()
        if written != expected:
            raise RuntimeError(f"hosts wrote {sorted(written)}, expected {sorted(expected)}")

        def commit_and_rank() -> None:
            if self._generation:
                RunDir(self._run_dir).require_leads(self._generation)
            commit(pending, step_folder(self._run_dir, record.step), record)
            self._write_best()

        retry(self._run_dir, commit_and_rank)
        self._remove_old(record.step)
        if self._mirror is None:
            return
        if self._next_copy is None or self._next_copy.running() or self._next_copy.done():
            # One that waits copies this checkpoint too.
            self._next_copy = self._copying.submit(self._copy, self._mirror)

    def _copy(self, mirror: Mirror) -> None:
        """Bring the copy up to date, and only then remove what it may have been copying."""
        try:
            # Where the run was fetched from there, it has not brought all of its checkpoints.
            there = mirror.steps()
            with self._removing:
                steps = self._retained([*committed_steps(self._run_dir), *there])
                self._being_copied = steps
            mirror.update(self._run_dir, steps)
        except Exception as error:
            # Training goes on whatever a remote file system raises, and the next copy tries again.
            log.warning(f"checkpoints not copied to {mirror.url}: {type(error).__name__}: {error}")
        self._being_copied = set()
        self._remove_old()

    def _retained(self, steps: Iterable[int]) -> set[int]:
        """Choose those of some saved steps that are kept."""
        return self._policy.retained({step: self._metrics(step) for step in steps})

    def _metrics(self, step: int) -> Mapping[str, float]:
        """Read what was measured after a step, from its commit record if it is here."""
        if step not in self._known_metrics:
            try:
                metrics = open_checkpoint(self._run_dir, step).record.metrics
            except InputError:  # It is damaged, or only in the copy.
                return {}
            if metrics is None:  # A former version has left it to the file of losses.
                losses = RunDir(self._run_dir).validation_losses()
                metrics = {BEST_METRIC: losses[step]} if step in losses else {}
            self._known_metrics[step] = metrics
        return self._known_metrics[step]

    def _write_best(self) -> None:
        """Write which of the checkpoints that are there is the best, if one can be that."""
        metrics = {step: self._metrics(step) for step in committed_steps(self._run_dir)}
        step = self._policy.best(metrics)
        best = None if step is None else {"step": step, **metrics[step]}
        if best != self._best:
            RunDir(self._run_dir).write_best(best)
            self._best = best

    def _remove_old(self, step: int | None = None) -> None:
        """Remove old checkpoints, and what was not finished before that of `step`, which is."""
        try:
            if step is not None:
                remove_unfinished(self._run_dir, up_to=(step, self._generation))
            with self._removing:
                steps = committed_steps(self._run_dir)
                for old in set(steps) - self._retained(steps) - self._being_copied:
                    remove(step_folder(self._run_dir, old))
        except OSError as error:  # The next checkpoint tries again.
            log.warning(f"old checkpoints in {self._run_dir} are not removed: {error.strerror}")


def write_initial_checkpoint(
    run_dir: Path,
    step: int,
    stage_layers: Sequence[int],
    state_of: Callable[[int], Mapping[str, PyTree]],
) -> None:
    """Write a whole checkpoint from this process alone, when no data has been read.

    The states, like those of `Checkpointer.save`, are asked for and written one by one: no two
    need be held at a time.
    """
    folder = pending_folder(run_dir, step, 0)
    folder.mkdir(parents=True)
    files: dict[str, str] = {}
    for stage in range(len(stage_layers)):
        name = stage_name(stage)
        with begin_writing(folder / name, state_of(stage)):
            pass
        files |= _complete_part(folder, [name], {})
    record = CommitRecord(step=step, stage_layers=tuple(stage_layers), files=files, metrics={})
    commit(folder, step_folder(run_dir, step), record)


def _complete_part(
    folder: Path, parts: Collection[str], texts: Mapping[str, str]
) -> dict[str, str]:
    """Write the texts of a part whose arrays are in files, and return the digest of every file.

    All of it is on the disk then: a checkpoint that counts is whole even after a power cut.
    """
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [folder / name for name in texts]
    paths += [path for name in parts for path in (folder / name).rglob("*") if path.is_file()]
    folders = {folder / above for path in paths for above in path.relative_to(folder).parents}
    synchronize(*paths, *folders)
    return {path.relative_to(folder).as_posix(): digest(path) for path in paths}


def _written(act: Callable[[], T]) -> T:
    """Run `act`, and mark errors of the file system for all hosts.

    Raises:
        NotWritten: then.
    """
    try:
        return act()
    except Exception as error:
        failure = os_error_behind(error)  # Orbax knows no OSError.
        reason = next((text for text in OF_THE_DISK if text in str(error)), None)
        if failure is None and reason is None:
            raise
        raise NotWritten(str(reason if failure is None else failure.strerror)) from error


def _discard(folder: Path, parts: Collection[str]) -> None:
    """Remove what this host has written of a checkpoint that comes to nothing."""

    def is_own(name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in parts)

    def there() -> list[Path]:
        try:
            return [folder / name for name in os.listdir(folder) if is_own(name)]
        except FileNotFoundError:  # Another host has removed it.
            return []

    for _ in range(SWEEPS):
        for path in there():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        time.sleep(SWEEP_S)
        if not there():
            break
    with contextlib.suppress(OSError):  # The others have parts there, or it is gone.
        folder.rmdir()
