"""The folder that a run writes: its configuration, its plan, its metrics and its checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError, TemporaryError, kind_of
from skippipe_sched.figures.gantt import gantt
from skippipe_sched.problem.plan import Plan, load_plan

from skippipe_jax.config import NO_RECIPE, Config, parse_config, to_yaml
from skippipe_jax.program.schedule import OWN, Schedule, timeline_of
from skippipe_jax.storage.layout import CHECKPOINTS, latest_step
from skippipe_jax.storage.whole_file import PARTIAL, write_whole

CONFIG, PLAN, METRICS = "config.yaml", "plan.json", "metrics.jsonl"
PLANS = "plans"
"""The folder of the plans that a recipe asks for, each by its name, and of their pictures."""
CASE = "case.yaml"
"""Where a run that measured its cluster keeps the case."""
BEST = "best.json"
"""Which checkpoint has the lowest held-out loss, in a run that computes it."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run: the config, which is written last, marks it."""
    # A name too long for a file is no error here, as it would be for Path.exists.
    return os.path.exists(folder / CONFIG)


def require_new(folder: Path) -> None:
    """Refuse a folder that holds a run already."""
    with _accessible(folder):
        is_used = (folder / CONFIG).exists() or latest_step(folder) is not None
    if is_used:
        raise InputError(
            "run_dir",
            str(folder),
            "holds a run already",
            "Go on with it by --resume, or give another folder: --set run_dir=...",
        )


class Hold:
    """Keeps a run folder for one training at a time, on whatever machines that share it.

    The hold is a lock on the folder itself, which the system lets go when the process ends; file
    systems that know no locks on folders, such as NFS, give none.
    """

    def __init__(self, folder: Path):
        """Hold nothing yet; `take` does."""
        self.folder = folder
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Hold:
        """Whatever is taken is let go on leaving."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the folder go; one that was made for the hold vanishes if it is still empty."""
        if self._descriptor is not None:
            for folder in self._made:
                with suppress(OSError):  # It holds something, or somebody has removed it.
                    folder.rmdir()
            os.close(self._descriptor)

    def take(self) -> None:
        """Hold the folder, which is made if there is none.

        Raises:
            TemporaryError: if another training holds it.
        """
        while self._descriptor is None:
            with _accessible(self.folder):
                way = (self.folder, *self.folder.parents)
                self._made = [folder for folder in way if not folder.exists()]
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                self._lock(descriptor)
                # Another that held it may have let it vanish before it was locked here.
                if _is_at(self.folder, descriptor):
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TemporaryError(
                "run_dir",
                str(self.folder),
                "another training is writing it",
                "Wait for its end or stop it, or give another folder: --set run_dir=...",
            ) from error
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether what is open is what the name means."""
    return folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())


def start_run(folder: Path, config: Config, schedule: Schedule) -> None:
    """Create the folder of a new run, or give the run in it other plans to go on under.

    Raises:
        InputError: if the folder cannot be written.
    """
    # What takes time comes first: whoever interrupts it finds the run with the plans that it had.
    averaged = config.recipe.averaged_at_most
    pictures = {
        name: gantt(plan, timeline_of(plan, averaged)) for name, plan in schedule.plans.items()
    }
    with _accessible(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PLANS).exists():  # Of a start that was cut short, or what the run leaves.
            shutil.rmtree(folder / PLANS)
        for name, plan in schedule.plans.items():
            path = folder / PLAN if name == OWN else folder / PLANS / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            plan.save(path)
            path.with_suffix(".svg").write_text(pictures[name], encoding="utf-8")
        (folder / METRICS).touch()
        # Last: the config marks a folder as a run, whose own the plan then is.
        write_whole(folder / CONFIG, to_yaml(config))


def continue_run(folder: Path, config: Config, step: int) -> None:
    """Make the folder ready to go on after `step`: the metrics of later steps come again."""
    write_whole(folder / CONFIG, to_yaml(config))
    kept = [line for line in read_metrics(folder) if line["step"] <= step]
    write_whole(folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))


def saved_config(folder: Path, field: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, overridden; `field` names where the folder was given.

    Raises:
        InputError: if the folder holds no run.
    """
    if not is_run(folder):
        raise InputError(
            field, str(folder), f"holds no run: there is no {CONFIG}", "Name the folder of a run"
        )
    path = folder / CONFIG
    tree = _as_it_was(fields.load_yaml(path, str(path)))
    try:
        parse_config(tree)
    except InputError as error:
        raise InputError(
            f"{path}: {error.field}",
            error.value,
            error.problem,
            "The run's own file is damaged: bring it back, or start another run",
        ) from error
    return parse_config(tree, overrides)


def _as_it_was(tree: Any) -> Any:
    """What a run was told, with the key that its file lacks if the run is older than the key.

    Conversations longer than a sequence were split before `data.too_long` had a default for them.
    """
    data = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(data, dict) or "too_long" in data:
        return tree
    mixture = data.get("mixture")
    sources = [data, *(mixture if isinstance(mixture, list) else [])]
    if any(isinstance(one, dict) and one.get("source") == "chat" for one in sources):
        return tree | {"data": data | {"too_long": "split"}}
    return tree


def saved_plan(folder: Path) -> Plan:
    """The plan of a run."""
    return load_plan(folder / PLAN)


def saved_schedule(folder: Path) -> Schedule:
    """All plans of a run, and which iteration takes which."""
    others = sorted((folder / PLANS).glob("*.json"))
    plans = {OWN: saved_plan(folder)} | {path.stem: load_plan(path) for path in others}
    recipe = saved_config(folder, "run_dir").recipe if is_run(folder) else NO_RECIPE
    return Schedule(recipe, plans)


def own_files(folder: Path) -> list[Path]:
    """The files that a run needs beside its checkpoints to be resumed or looked at."""
    elsewhere = (CHECKPOINTS, "timelines", "profile", "tensorboard", "wandb")
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0] not in elsewhere
        and path.is_file()
        and path.suffix != PARTIAL
    ]


def append_metrics(folder: Path, line: dict[str, Any]) -> None:
    """Add one iteration to the metrics; a crash loses at most this line."""
    with _accessible(folder), (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all iterations; a line that a crash cut short is left out.

    Raises:
        InputError: if another line is none of this program's.
    """
    path = folder / METRICS
    lines = fields.read_text(path, METRICS).splitlines(keepends=True)
    return [
        _read_line(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.endswith("\n")
    ]


def _read_line(text: str, field: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
        fields.integer(line["step"], field)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            field, text, "is no object with the figures of a step", "Remove this line"
        ) from error
    return line


def write_best(folder: Path, step: int, loss: float) -> None:
    """Note which checkpoint has the lowest held-out loss."""
    write_whole(folder / BEST, json.dumps({"step": step, "validation_loss": loss}) + "\n")


@contextmanager
def _accessible(folder: Path) -> Iterator[None]:
    """Says which folder it is that cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise kind_of(error)(
            "run_dir",
            str(folder),
            f"cannot be used: {error.strerror}",
            "Give another folder, or mend that",
        ) from error
