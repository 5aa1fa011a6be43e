"""Writing of checkpoints by all hosts together, committed once all parts are written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.cluster.agreement import Host, from_host_0, gather
from skippipe_jax.config.run import CheckpointConfig
from skippipe_jax.errors import CheckpointFailed, GenerationEnded, PeerFailed, StorageError
from skippipe_jax.storage.arrays import PyTree, begin_writing
from skippipe_jax.storage.checkpoint import (
    DATA,
    CheckpointItems,
    CommitRecord,
    checkpoint_part,
    commit,
    committed_steps,
    file_digest,
    is_committed,
    open_checkpoint,
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

# TensorStore, with which Orbax writes arrays, raises ValueErrors without a cause: only their texts
# have the errno, or that of `os.strerror` in other versions.
OS_ERROR = re.compile(r"\bos_error_code='(\d+)'|\[OS error: ([^]]+)\]")

BEST_METRIC = "validation_loss"
"""Metric whose lowest value marks the best checkpoint."""

MAX_FAILURES = 3
"""Number of consecutive failed writes, of one checkpoint or several, after which a host ends."""


SWEEPS, SWEEP_S = 5, 0.1
"""Number and pause in seconds of removals after a failed write.

Orbax raises an error while its other writes continue, which may create files again.
"""


class NotWritten(StorageError):
    """Error: the file system failed to write a part of a checkpoint."""


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """Return the first step with the lowest validation loss; None if no loss is known."""
    known = {step: loss for step, loss in sorted(losses.items()) if loss is not None}
    return min(known, key=known.__getitem__, default=None)


def retained(config: CheckpointConfig, losses: Mapping[int, float | None]) -> set[int]:
    """Return the steps to keep, given the validation loss of each step with a checkpoint.

    These are the last ones, those that `config` keeps permanently, and the best.
    """
    steps, every = sorted(losses), config.keep_every
    regular = () if every is None else (step for step in steps if step % every == 0)
    return {*steps[-config.keep :], *regular, best_step(losses)} - {None}


class Checkpointer:
    """Writer of this host's parts of checkpoints, each committed once together with its peers."""

    def __init__(
        self,
        run_dir: Path,
        host: Host,
        *,
        stage_layers: Sequence[int],
        config: CheckpointConfig,
        mirror: Mirror | None = None,
        generation: int = 0,
        on_commit: Callable[[int], None] = lambda _: None,
    ):
        """Write below ``run_dir``; on host 0, remove what ``config`` does not keep.

        On host 0, ``mirror`` is updated after a checkpoint; if a copy is still running then, one
        more copy follows it with all checkpoints up to then. Checkpoints are not removed while they
        are copied. ``stage_layers`` are the blocks of each stage of a complete checkpoint. Hosts of
        another ``generation`` may write the same steps concurrently; with generations at least two
        checkpoints are kept.
        ``on_commit`` is called with the step of each committed checkpoint.
        """
        self._run_dir = run_dir
        self._host = host
        self._stage_layers = tuple(stage_layers)
        # Remaining hosts may not know that the last one is committed, so keep the one before too.
        self._config = replace(config, keep=max(config.keep, 2)) if generation else config
        self._mirror = mirror
        self._generation = generation
        self._on_commit = on_commit
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last_save: Future[None] | None = None
        self._step, self._attempt, self._failures = -1, 1, 0
        # A thread of its own, so that slow links delay neither training nor the next checkpoint.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_copy")
        self._next_copy: Future[None] | None = None
        self._being_copied: set[int] = set()
        self._removing = threading.Lock()
        self._known_losses: dict[int, float | None] = {}
        # Content of best.json; {} as its content before this object is unknown.
        self._best: Mapping[str, Any] | None = {}
        if host.index == 0:  # After a rollback later steps are repeated.
            retry(run_dir, self._write_best)

    def save(
        self,
        step: int,
        items: CheckpointItems,
        data: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Start a checkpoint; on return its arrays may be donated while the writing continues.

        Every host calls this at the same steps, and again for the same step if `wait` returns
        False; the retry starts after a pause. One checkpoint is written at a time: this waits for
        the previous one.

        Args:
            step: number of completed iterations.
            items: the items that this host writes.
            data: the position in the data, JSON-serializable, from one host; None from others.
            metrics: from host 0, finite numbers measured after the step.

        Raises:
            InputError: if the step is already saved.
            Exception: what `wait` raises; a previous one that was not written is only warned of.
        """
        self.wait()
        committed = step_folder(self._run_dir, step)
        if is_committed(committed):
            raise InputError(
                str(committed), step, "already exists", "Resume the run, or set another run_dir"
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
                # Without the run's other files, which it had, its folder would be of no use.
                folder.parent.mkdir(exist_ok=True)
                folder.mkdir(exist_ok=True)
            for name, state in parts.items():
                writes.enter_context(begin_writing(folder / name, state))
        except Exception as raised:
            # Raise it in the background thread, which notifies the hosts that wait for this part.
            error = raised
        names = [*parts]  # Do not keep the states alive longer than their writers do.

        def complete() -> dict[str, str]:
            with writes:  # The exit waits for all files, even after an error.
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
        """Wait until the last save is committed; return False on all hosts if one failed to write.

        After a failure training continues. The parts of the checkpoint are removed, and the next
        checkpoint, or the same one again, may be written.

        Raises:
            TemporaryError: if this host has failed to write its part three times in a row.
            TimeoutError: if another host has not written its part in time.
            GenerationEnded: if hosts are lost; the remaining hosts save again.
            CheckpointFailed: if it failed for another reason, on this host or another.
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
            problem = f"the checkpoint could not be written: {error}"
            if self._failures == MAX_FAILURES:
                remedy = "Fix the storage, then continue from the previous checkpoint with --resume"
                raise TemporaryError("run_dir", str(self._run_dir), problem, remedy) from error
            log.warning(f"{self._run_dir}, step {self._step}: {problem}. Training continues")
            return False
        except Exception as error:
            if isinstance(error, PeerFailed) and error.kind == NotWritten.__name__:
                return False
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointFailed(f"the checkpoint was not committed: {problem}") from error
        self._failures = 0
        return True

    def complete_copy(self) -> None:
        """Copy all kept checkpoints that are not copied yet; return when done, or on failure.

        A previous leader may have been lost while it copied.
        """
        mirror, copying = self._mirror, self._copying
        if mirror is not None and copying.submit(self._not_copied, mirror).result():
            copying.submit(self._copy, mirror).result()

    def _not_copied(self, mirror: Mirror) -> list[int]:
        return sorted(self._retained(committed_steps(self._run_dir)) - mirror.copied)

    def close(self) -> None:
        """Wait for the last save and its copy, and stop the background threads.

        Warns of kept checkpoints that could not be copied.
        """
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._copying.shutdown()
        if self._mirror is not None and (missing := self._not_copied(self._mirror)):
            log.warning(f"checkpoints of steps {missing} not copied to {self._mirror.url}")

    def _finish(
        self,
        folder: Path,
        complete: Callable[[], dict[str, str]],
        record: CommitRecord,
        local_parts: Collection[str],
    ) -> None:
        """Complete this host's part; host 0 commits once all parts are written."""
        again = f".{self._attempt}" if self._attempt > 1 else ""
        name = f"checkpoint/{record.step}{again}"
        try:
            parts = gather(
                self._host, f"{name}/part", lambda: _attempt_write(complete), self._config.timeout_s
            )
            whole = msgspec.structs.replace(record, files=dict(ChainMap(*parts.values())))
            from_host_0(
                self._host,
                f"{name}/whole",
                lambda: _attempt_write(lambda: self._commit(folder, whole)),
                self._config.timeout_s,
            )
        except (NotWritten, PeerFailed):
            # The checkpoint has failed on all hosts; its files would fill the disk.
            _discard(folder, local_parts)
            raise
        # In an elastic group this gives the consensus a step to roll back to.
        self._on_commit(record.step)

    def _commit(self, pending: Path, record: CommitRecord) -> None:
        """Commit a checkpoint if it is complete; remove old ones and start the copy."""
        written, expected = {checkpoint_part(name) for name in record.files}, record.parts()
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
            # A copy that is still queued would include this checkpoint.
            self._next_copy = self._copying.submit(self._copy, self._mirror)

    def _copy(self, mirror: Mirror) -> None:
        """Update the copy, and only then remove checkpoints that it may have been copying."""
        try:
            # A run that was fetched from the copy has only some of its checkpoints here.
            copied_steps = mirror.steps()
            with self._removing:
                steps = self._retained([*committed_steps(self._run_dir), *copied_steps])
                self._being_copied = steps
            mirror.update(self._run_dir, steps)
        except Exception as error:
            # Any error of a remote file system is tolerated; the next copy retries.
            log.warning(f"checkpoints not copied to {mirror.url}: {type(error).__name__}: {error}")
        self._being_copied = set()
        self._remove_old()

    def _retained(self, steps: Iterable[int]) -> set[int]:
        """Return those of the saved `steps` that are kept."""
        return retained(self._config, {step: self._loss(step) for step in steps})

    def _loss(self, step: int) -> float | None:
        """Return the validation loss in the commit record of a step; None if it has none."""
        if step not in self._known_losses:
            try:
                metrics = open_checkpoint(self._run_dir, step).record.metrics
            except InputError:  # Damaged, or only in the copy.
                return None
            # Former versions: only in validation.jsonl.
            losses = RunDir(self._run_dir).validation_losses() if metrics is None else {}
            self._known_losses[step] = (metrics or {}).get(BEST_METRIC, losses.get(step))
        return self._known_losses[step]

    def _write_best(self) -> None:
        """Write the best of the existing checkpoints to best.json, if there is one."""
        losses = {step: self._loss(step) for step in committed_steps(self._run_dir)}
        step = best_step(losses)
        best = None if step is None else {"step": step, BEST_METRIC: losses[step]}
        if best != self._best:
            RunDir(self._run_dir).write_best(best)
            self._best = best

    def _remove_old(self, step: int | None = None) -> None:
        """Remove old checkpoints, and unfinished ones up to the committed `step`."""
        try:
            if step is not None:
                remove_unfinished(self._run_dir, up_to=(step, self._generation))
            with self._removing:
                steps = committed_steps(self._run_dir)
                for old in set(steps) - self._retained(steps) - self._being_copied:
                    remove(step_folder(self._run_dir, old))
        except OSError as error:  # The next checkpoint retries.
            log.warning(f"old checkpoints in {self._run_dir} were not removed: {error.strerror}")


def write_initial_checkpoint(
    run_dir: Path,
    step: int,
    stage_layers: Sequence[int],
    state_of: Callable[[int], Mapping[str, PyTree]],
) -> None:
    """Write a complete checkpoint from this process alone, before any data is read.

    The states, as in `Checkpointer.save`, are created and written one by one, so that only one is
    in memory at a time.
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
    """Write the texts of a part whose arrays are written, and return the digest of every file.

    All files are synchronized, so that a committed checkpoint survives a power cut.
    """
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [folder / name for name in texts]
    paths += [path for name in parts for path in (folder / name).rglob("*") if path.is_file()]
    folders = {folder / above for path in paths for above in path.relative_to(folder).parents}
    synchronize(*paths, *folders)
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in paths}


def _attempt_write(act: Callable[[], T]) -> T:
    """Run `act`, and translate errors of the file system to `NotWritten` for all hosts.

    Raises:
        NotWritten: if the file system fails.
    """
    try:
        return act()
    except Exception as error:
        reason = _file_system_reason(error)
        if reason is None:
            raise
        raise NotWritten(reason) from error


def _file_system_reason(error: BaseException | None) -> str | None:
    """Return the text of the file system error behind an error; None if there is none."""
    if error is None:
        return None
    if (failure := os_error_behind(error)) is not None:
        return str(failure.strerror)
    if (found := OS_ERROR.search(str(error))) is not None:
        return found[2] or os.strerror(int(found[1]))
    # The writer of one part may fail to close after the file system has failed for another.
    return _file_system_reason(error.__cause__ if error.__suppress_context__ else error.__context__)


def _discard(folder: Path, parts: Collection[str]) -> None:
    """Remove the parts that this host has written of a failed checkpoint."""

    def is_local(name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in parts)

    def remaining() -> list[Path]:
        try:
            return [folder / name for name in os.listdir(folder) if is_local(name)]
        except FileNotFoundError:  # Another host has removed it.
            return []

    for _ in range(SWEEPS):
        for path in remaining():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        time.sleep(SWEEP_S)
        if not remaining():
            break
    with contextlib.suppress(OSError):  # It is not empty, or already removed.
        folder.rmdir()
