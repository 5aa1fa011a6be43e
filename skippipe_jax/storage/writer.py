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
from pathlib import Path
from typing import Any, Protocol, TypeVar

from skippipe_sched.errors import FULL_DISK, InputError, TemporaryError

from skippipe_jax.cluster.agreement import Host, HostFailed, from_host_0, gather
from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.storage.array_files import PyTree, Writing, begin_writing
from skippipe_jax.storage.layout import (
    DATA,
    OwnStates,
    declare_whole,
    digest,
    is_committed,
    part_of,
    remove,
    remove_unfinished,
    replica_name,
    replicas_named,
    saved_steps,
    stage_name,
    step_folder,
    unfinished_folder,
)
from skippipe_jax.storage.retrying import PAUSES_S, failure_of_storage, retried
from skippipe_jax.storage.run_folder import require_no_later
from skippipe_jax.storage.warning import warn
from skippipe_jax.storage.whole_file import synchronize

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

MOST_FAILURES = 3
"""A host ends when it could not write its part of so many checkpoints, one after another."""


class NotCommitted(RuntimeError):
    """A checkpoint is not committed, for no reason that the user could mend."""


class NotWritten(RuntimeError):
    """A part of a checkpoint could not be written, as the file system has failed."""


class Copy(Protocol):
    """A copy of a run elsewhere; it may raise whatever a file system raises."""

    @property
    def url(self) -> str:
        """Where it is."""
        ...

    @property
    def copied(self) -> frozenset[int]:
        """The steps whose checkpoints were there when it was last looked at or written."""
        ...

    def steps(self) -> list[int]:
        """Look which steps have whole checkpoints there."""
        ...

    def update(self, run_dir: Path, steps: Collection[int]) -> None:
        """Copy the run, with the checkpoints of these steps and no others."""
        ...


class CheckpointWriter:
    """Writes the parts that this host owns and, with its peers, commits each checkpoint once."""

    def __init__(
        self,
        run_dir: Path,
        host: Host,
        *,
        stage_layers: Sequence[int],
        keep: int,
        keep_every: int | None = None,
        mirror: Copy | None = None,
        timeout_s: float = 1200,
        generation: int = 0,
        when_whole: Callable[[int], None] = lambda _: None,
    ):
        """Write below ``run_dir``, holding on to the last ``keep`` checkpoints.

        Those of every ``keep_every`` steps are kept for good. On host 0, ``mirror`` is brought up
        to date after a checkpoint; where that takes longer than until the next one, after the last
        that is there by then. What is being copied is not removed. A checkpoint is whole with
        a stage for each of ``stage_layers``, their blocks, and the state of the data. Hosts wait
        ``timeout_s`` at most for one another's parts. Those of another ``generation`` may write the
        same steps meanwhile; where there are generations two checkpoints are held on to at least,
        since those that are left may not have heard yet that the last one is whole. ``when_whole``
        is called with the step of each checkpoint that is.
        """
        self._run_dir = run_dir
        self._host = host
        self._stage_layers = tuple(stage_layers)
        self._keep = max(keep, 2) if generation else keep
        self._keep_every = keep_every
        self._protected: int | None = None
        self._mirror = mirror
        self._timeout_s = timeout_s
        self._generation = generation
        self._when_whole = when_whole
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last_save: Future[None] | None = None
        self._step, self._attempt, self._failures = -1, 1, 0
        # Slow links hold up neither training nor the next checkpoint.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_copy")
        self._copy_under_way = self._next_copy = _done()
        self._being_copied: set[int] = set()
        self._removing = threading.Lock()

    def save(
        self,
        step: int,
        stages: Mapping[int, Mapping[str, PyTree]],
        data: Mapping[str, Any] | None,
        left_out: Mapping[int, int] | None = None,
        replicas: Mapping[tuple[int, int], Mapping[str, PyTree]] | None = None,
        own: OwnStates | None = None,
    ) -> None:
        """Begin a checkpoint; on return its arrays may be donated, and the writing goes on.

        Every host calls this, at the same steps; again for the same step where `wait` says that it
        is not written, which is then tried some time later. One checkpoint is written at a time:
        this waits for the one before.

        Args:
            step: iterations done so far.
            stages: by index, the state of each stage that this host writes: trees under a few
                top-level names, whose leaves are jax.Array on one device each.
            data: how far the data has been read, fit for JSON, from one host and None from others.
            left_out: from host 0, stages that are as they were after an earlier step, and which.
            replicas: the own states that this host writes, by stage and place in it.
            own: which of them all hosts write together, if there are any.

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
            time.sleep(PAUSES_S[min(self._attempt, len(PAUSES_S)) - 1])
        folder = unfinished_folder(self._run_dir, step, self._generation, self._attempt)
        texts = {} if data is None else {DATA: json.dumps(data)}
        writes: Future[dict[str, Writing]] = Future()
        parts = {stage_name(stage): state for stage, state in stages.items()}
        parts |= {replica_name(*of): state for of, state in (replicas or {}).items()}
        try:
            if parts or texts:
                folder.mkdir(parents=True, exist_ok=True)
            writes.set_result({name: begin_writing(folder / name, parts[name]) for name in parts})
        except Exception as error:
            # Raised by the background thread, which tells the other hosts that wait for this part.
            writes.set_exception(error)
        given = step, writes, texts, left_out, own, [*parts, *texts]
        self._last_save = self._background.submit(self._finish, *given)

    def protect(self, step: int) -> None:
        """Hold on to the checkpoint of ``step`` too, and no longer to the one protected before.

        Called on host 0, which removes checkpoints.
        """
        self._protected = step

    def wait(self) -> bool:
        """Wait until the last save is committed; on all hosts False if one could not write it.

        Training goes on then. What is there of it is removed, and the next checkpoint, or the same
        once more, may be written.

        Raises:
            TemporaryError: this host could not write its part of the last three.
            TimeoutError: it was not, since another host has not done its part in time.
            TeamEnded: it was not, since hosts are lost, and those that are left save again.
            NotCommitted: it was not, for another reason, on this host or another.
        """
        last_save, self._last_save = self._last_save, None
        if last_save is None:
            return True
        try:
            last_save.result()
        except (TimeoutError, TeamEnded):
            raise
        except NotWritten as error:
            self._failures += 1
            problem = f"a checkpoint cannot be written there: {error}"
            if self._failures == MOST_FAILURES:
                remedy = "Mend that, and --resume goes on from the checkpoint before"
                raise TemporaryError("run_dir", str(self._run_dir), problem, remedy) from error
            warn(f"{self._run_dir}, step {self._step}: {problem}. Training goes on")
            return False
        except Exception as error:
            if isinstance(error, HostFailed) and f"{NotWritten.__name__}: " in str(error):
                return False
            problem = f"{type(error).__name__}: {error}"
            raise NotCommitted(f"a checkpoint is not committed: {problem}") from error
        self._failures = 0
        return True

    def complete_copy(self) -> None:
        """Return when the copy has all that is held on to, or could not be written.

        Whoever led before may have been lost while it copied.
        """
        self._copy_under_way.result()
        self._next_copy.result()
        if self._mirror is not None and self._not_copied(self._mirror):
            self._copy(self._mirror)

    def _not_copied(self, mirror: Copy) -> list[int]:
        return sorted(self._kept(saved_steps(self._run_dir)) - mirror.copied)

    def close(self) -> None:
        """Wait for the last save and its copy, and end the background threads.

        Says which of the checkpoints that are held on to could not be copied.
        """
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._copying.shutdown()
        self._copy_under_way.result()
        self._next_copy.result()
        if self._mirror is not None and (missing := self._not_copied(self._mirror)):
            warn(f"not copied to {self._mirror.url}: the checkpoints of steps {missing}")

    def _finish(
        self,
        step: int,
        writes: Future[dict[str, Writing]],
        texts: Mapping[str, str],
        left_out: Mapping[int, int] | None,
        own: OwnStates | None,
        own_parts: Collection[str],
    ) -> None:
        """Complete this host's part, and have host 0 commit once all parts are there."""
        again = f".{self._attempt}" if self._attempt > 1 else ""
        folder = unfinished_folder(self._run_dir, step, self._generation, self._attempt)
        try:
            parts = gather(
                self._host,
                f"checkpoint/{step}{again}/part",
                lambda: _written(lambda: _complete_part(folder, writes.result(), texts)),
                self._timeout_s,
            )
            files = dict(ChainMap(*parts.values()))
            from_host_0(
                self._host,
                f"checkpoint/{step}{again}/whole",
                lambda: _written(lambda: self._commit(step, folder, files, left_out, own)),
                self._timeout_s,
            )
        except (NotWritten, HostFailed):
            # All hosts know that it comes to nothing; on a full disk it would be in the way.
            _discard(folder, own_parts)
            raise
        self._when_whole(step)

    def _commit(
        self,
        step: int,
        folder: Path,
        files: Mapping[str, str],
        left_out: Mapping[int, int] | None,
        own: OwnStates | None,
    ) -> None:
        """Declare the checkpoint of these files whole, if it is; drop old ones."""
        expected = {stage_name(stage) for stage in range(len(self._stage_layers))}
        expected |= {DATA, *replicas_named(own)}
        written = {part_of(name) for name in files}
        if written != expected:
            raise RuntimeError(f"hosts wrote {sorted(written)}, expected {sorted(expected)}")
        whole = step_folder(self._run_dir, step)

        def declare() -> None:
            if self._generation:
                require_no_later(self._run_dir, self._generation)
            declare_whole(folder, whole, self._stage_layers, files, left_out, own)

        retried(self._run_dir, declare)
        self._remove_old(step)
        if self._mirror is not None and (self._next_copy.running() or self._next_copy.done()):
            # One that waits copies this checkpoint too.
            self._copy_under_way = self._next_copy
            self._next_copy = self._copying.submit(self._copy, self._mirror)

    def _copy(self, mirror: Copy) -> None:
        """Bring the copy up to date, and only then remove what it may have been copying."""
        try:
            # Where the run was fetched from there, it has not brought all of its checkpoints.
            there = mirror.steps()
            with self._removing:
                steps = self._kept([*saved_steps(self._run_dir), *there])
                self._being_copied = steps
            mirror.update(self._run_dir, steps)
        except Exception as error:
            # Training goes on whatever a remote file system raises, and the next copy tries again.
            warn(f"checkpoints not copied to {mirror.url}: {type(error).__name__}: {error}")
        self._being_copied = set()
        self._remove_old()

    def _kept(self, steps: Iterable[int]) -> set[int]:
        """Of these saved steps, those to hold on to."""
        ordered = sorted(set(steps))
        return {
            step
            for step in ordered
            if step in ordered[-self._keep :]
            or step == self._protected
            or (self._keep_every is not None and step % self._keep_every == 0)
        }

    def _remove_old(self, step: int | None = None) -> None:
        """Remove old checkpoints, and what was not finished before that of `step`, which is."""
        try:
            if step is not None:
                remove_unfinished(self._run_dir, up_to=(step, self._generation))
            with self._removing:
                steps = saved_steps(self._run_dir)
                for old in set(steps) - self._kept(steps) - self._being_copied:
                    remove(step_folder(self._run_dir, old))
        except OSError as error:  # The next checkpoint tries again.
            warn(f"old checkpoints in {self._run_dir} are not removed: {error.strerror}")


def write_checkpoint(
    run_dir: Path,
    step: int,
    stage_layers: Sequence[int],
    state_of: Callable[[int], Mapping[str, PyTree]],
) -> None:
    """Write a whole checkpoint from this process alone, when no data has been read.

    The states, like those of `CheckpointWriter.save`, are asked for and written one by one: no two
    need be held at a time.
    """
    folder = unfinished_folder(run_dir, step, 0)
    folder.mkdir(parents=True)
    files: dict[str, str] = {}
    for stage in range(len(stage_layers)):
        name = stage_name(stage)
        files |= _complete_part(folder, {name: begin_writing(folder / name, state_of(stage))}, {})
    declare_whole(folder, step_folder(run_dir, step), stage_layers, files)


def _complete_part(
    folder: Path, writes: Mapping[str, Writing], texts: Mapping[str, str]
) -> dict[str, str]:
    """Wait for the stages, write the texts, and return the digest of every file.

    All of it is on the disk then: a checkpoint that counts is whole even after a power cut.
    """
    with contextlib.ExitStack() as stack:
        for write in writes.values():
            stack.enter_context(write)  # leaving it waits for its files
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [folder / name for name in texts]
    paths += [path for name in writes for path in (folder / name).rglob("*") if path.is_file()]
    folders = {folder / above for path in paths for above in path.relative_to(folder).parents}
    synchronize(*paths, *folders)
    return {path.relative_to(folder).as_posix(): digest(path) for path in paths}


def _written(act: Callable[[], T]) -> T:
    """What an act returns; where the file system fails in it, all hosts can tell that from others.

    Raises:
        NotWritten: then.
    """
    try:
        return act()
    except Exception as error:
        failure = failure_of_storage(error)  # Orbax knows no OSError.
        reason = next((text for text in OF_THE_DISK if text in str(error)), None)
        if failure is None and reason is None:
            raise
        raise NotWritten(reason if failure is None else failure.strerror) from error


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _discard(folder: Path, parts: Iterable[str]) -> None:
    """Remove what this host has written of a checkpoint that comes to nothing."""
    for part in parts:
        for path in (folder / part, *folder.glob(f"{part}.*")):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # The others have parts there, or it is gone.
        folder.rmdir()
