"""Copy of a run folder on another file system, such as a bucket, that outlives the machine.

    URL/config.yaml, plan.json, metrics.jsonl, ..    the files of the run besides checkpoints
    URL/checkpoints/00000020/..                      a checkpoint, its COMMITTED written last

A folder without COMMITTED is not a checkpoint, as in the run folder itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.implementations.local import LocalFileSystem
from skippipe_sched.errors import InputError, error_class

from skippipe_jax import log
from skippipe_jax.config.parsing import CONFIG
from skippipe_jax.storage.checkpoint import (
    CHECKPOINTS,
    COMMITTED,
    committed_steps,
    latest_step,
    open_checkpoint,
    quarantine,
    step_folder,
    step_name,
    steps_named,
)
from skippipe_jax.storage.files import PARTIAL, safe_join
from skippipe_jax.storage.run_dir import BEST, PLANS, RunDir


class Mirror:
    """Copy of a run below a URL.

    Attributes:
        url: the URL as configured.
        copied: the steps whose checkpoints were in the copy when it was last listed or written.
    """

    def __init__(self, url: str):
        """Open the file system.

        Raises:
            InputError: if fsspec does not support it, or its package or credentials are missing.
        """
        self.url = url
        self.copied: frozenset[int] = frozenset()
        # State of each source file when it was last copied: inode, modification time, size.
        self._written: dict[str, tuple[int, int, int]] = {}
        try:
            self._files, root = fsspec.url_to_fs(url)
        except Exception as error:  # whatever the file system raises
            raise self._unusable(error) from error
        self._root = root.rstrip("/")

    def prepare(self, run_dir: Path, *, resume: bool) -> None:
        """Prepare the copy for a run; fetch a resumed run if `run_dir` does not hold it.

        The latest and the best of its checkpoints are fetched.

        Raises:
            InputError: if a run cannot be fetched, or the copy cannot be used for a new one, or
                holds later checkpoints than the run.
        """
        if isinstance(self._files, LocalFileSystem) and Path(self._root).is_relative_to(
            run_dir.absolute()
        ):
            problem = f"is inside {run_dir}, the folder to copy"
            raise InputError("checkpoint.copy_to", self.url, problem, "Name another folder")
        is_local = resume and RunDir(run_dir).is_run
        try:
            steps = self.steps()
            if resume and not is_local and steps:
                self._fetch(run_dir, {steps[-1], *self._best(steps)})
                log.output(f"fetched step {steps[-1]} of the run from {self.url} into {run_dir}")
                return
        except InputError:
            raise
        except Exception as error:  # whatever the file system raises
            if is_local:
                log.warning(str(self._unusable(error)))
                return
            raise self._unusable(error) from error
        if resume and not is_local:
            problem, remedy = "has no checkpoint, and neither has run_dir", "Name the copy of a run"
        elif steps and steps[-1] > (latest_step(run_dir) or 0):
            problem = f"has a checkpoint of step {steps[-1]}, which this run has not reached"
            remedy = f"Name another folder, or resume the copied run where {run_dir} does not exist"
        else:
            return
        raise InputError("checkpoint.copy_to", self.url, problem, remedy)

    def steps(self) -> list[int]:
        """Return the steps with committed checkpoints in the copy, ascending.

        Raises:
            Exception: any error of the file system, here and in `update`.
        """
        self._files.invalidate_cache()
        steps = [s for s in self._step_folders() if self._files.isfile(self._path(s, COMMITTED))]
        self.copied = frozenset(steps)
        return steps

    def update(self, run_dir: Path, steps: Collection[int]) -> None:
        """Copy the changed files of the run, and its checkpoints of `steps` that are missing here.

        Plans that the run no longer has are removed, and finally all other checkpoints and the
        remains of interrupted copies.
        """
        missing = sorted(set(steps) & set(committed_steps(run_dir)) - set(self.steps()))
        local_files = {
            path.relative_to(run_dir).as_posix(): path for path in RunDir(run_dir).files_to_mirror()
        }
        for name, path in local_files.items():
            status = path.stat()
            state = status.st_ino, status.st_mtime_ns, status.st_size
            if self._written.get(name) != state:
                self._write(name, path.read_bytes())
                self._written[name] = state
        for path in self._files.find(f"{self._root}/{PLANS}"):
            if PurePosixPath(path).relative_to(self._root).as_posix() not in local_files:
                self._files.rm(path)
        for step in missing:
            self._copy(run_dir, step)
            self.copied |= {step}
        for step in set(self._step_folders()) - set(steps):
            self._remove(step)

    def restore(self, run_dir: Path, step: int) -> bool:
        """Fetch the checkpoint of a step again if it is committed here; quarantine the old one."""
        try:
            if step not in self.steps():
                return False
            folder = PurePosixPath(CHECKPOINTS, step_name(step))
            names = [name for name in self._file_names() if name.is_relative_to(folder)]
            mark = folder / COMMITTED
            if step_folder(run_dir, step).exists():
                quarantine(step_folder(run_dir, step))
            self._fetch_files(run_dir, [name for name in names if name != mark], [mark])
        except Exception as error:  # whatever the file system raises
            log.warning(
                f"step {step} was not fetched from {self.url}: {type(error).__name__}: {error}"
            )
            return False
        return True

    def before(self, step: int) -> list[int]:
        """Return the steps before `step` with committed checkpoints here; [] on an error."""
        try:
            return [other for other in self.steps() if other < step]
        except Exception as error:  # whatever the file system raises
            log.warning(f"no earlier step was fetched: {self._unusable(error)}")
            return []

    def forget(self, step: int) -> None:
        """Remove the checkpoint of a step; warn if that fails."""
        try:
            self._remove(step)
        except Exception as error:  # whatever the file system raises
            log.warning(
                f"step {step} was not removed from {self.url}: {type(error).__name__}: {error}"
            )

    def _remove(self, step: int) -> None:
        # Remove the mark first, so that an interruption leaves no incomplete checkpoint.
        for path in (self._path(step, COMMITTED), self._path(step)):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _copy(self, run_dir: Path, step: int) -> None:
        checkpoint = open_checkpoint(run_dir, step)
        names = checkpoint.record.files
        targets = [self._path(step, name) for name in names]
        for folder in {str(PurePosixPath(target).parent) for target in targets}:
            self._files.makedirs(folder, exist_ok=True)
        self._files.put([str(checkpoint.folder / name) for name in names], targets)
        mark = f"{CHECKPOINTS}/{checkpoint.folder.name}/{COMMITTED}"
        self._write(mark, (checkpoint.folder / COMMITTED).read_bytes())

    def _best(self, steps: Collection[int]) -> set[int]:
        """Return the recorded best step if it is one of `steps`, else the empty set."""
        path = f"{self._root}/{BEST}"
        if not self._files.isfile(path):
            return set()
        return {json.loads(self._files.cat_file(path))["step"]} & set(steps)

    def _fetch(self, run_dir: Path, steps: Collection[int]) -> None:
        """Fetch the run with some checkpoints; the files that mark each as complete come last."""
        folders = [PurePosixPath(self._path(step)).relative_to(self._root) for step in steps]
        marks = [*(folder / COMMITTED for folder in folders), PurePosixPath(CONFIG)]
        names = [
            name
            for name in self._file_names()
            if (name.parts[0] != CHECKPOINTS or any(map(name.is_relative_to, folders)))
            and name not in marks
        ]
        self._fetch_files(run_dir, names, marks)

    def _file_names(self) -> list[PurePosixPath]:
        """Return the names of all files in the copy."""
        paths = self._files.find(self._root)
        return [PurePosixPath(path).relative_to(self._root) for path in paths]

    def _fetch_files(
        self, run_dir: Path, names: list[PurePosixPath], marks: list[PurePosixPath]
    ) -> None:
        """Fetch files, then atomically each file that marks them as complete."""
        try:  # Any writer of the copy may have chosen the names.
            for name in (*names, *marks):
                safe_join(run_dir, str(name))
        except ValueError as error:
            problem = f"cannot be fetched: {error}"
            remedy = "Check who can write to it, and remove files that are not part of a run"
            raise InputError("checkpoint.copy_to", self.url, problem, remedy) from error
        for name in (*names, *marks):
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        self._get(names, [run_dir / name for name in names])
        for name in marks:
            partial = run_dir / f"{name}{PARTIAL}"
            self._get([name], [partial])
            os.replace(partial, run_dir / name)

    def _get(self, names: list[PurePosixPath], paths: list[Path]) -> None:
        self._files.get([f"{self._root}/{name}" for name in names], [str(path) for path in paths])

    def _write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        target = f"{self._root}/{name}"
        self._files.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        self._files.pipe_file(target + PARTIAL, content)
        self._files.mv(target + PARTIAL, target)

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{CHECKPOINTS}/{step_name(step)}/{name}".rstrip("/")

    def _step_folders(self) -> list[int]:
        """Return the steps with a folder in the copy, ascending."""
        try:
            paths = self._files.ls(f"{self._root}/{CHECKPOINTS}", detail=False)
        except FileNotFoundError:
            return []
        return steps_named({PurePosixPath(path).name for path in paths})

    def _unusable(self, error: Exception) -> InputError:
        return error_class(error)(
            "checkpoint.copy_to",
            self.url,
            f"cannot be used: {type(error).__name__}: {error}",
            "Check the URL, its fsspec package and its credentials",
        )
