"""The folder that a run writes: its configuration, its plan, its metrics and its checkpoints."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.figures.gantt import gantt
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.config import NO_RECIPE, Config, to_yaml
from skippipe_jax.config.parsing import CONFIG, is_run, saved_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.consensus.wire import generation_to_json, parse_generation
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.storage.accessible import accessible
from skippipe_jax.storage.json_lines import (
    LEFT_OUT,
    add_line,
    add_line_to,
    end_of_step,
    line_of_step,
    lines_from_end,
    read_lines,
)
from skippipe_jax.storage.layout import CHECKPOINTS, latest_step
from skippipe_jax.storage.lease import LEASE
from skippipe_jax.storage.retrying import unusable
from skippipe_jax.storage.whole_file import PARTIAL, copy_beginning, write_whole

PLAN, METRICS = "plan.json", "metrics.jsonl"
PLANS = "plans"
"""The folder of the plans that a recipe asks for, each by its name, and of their pictures."""
CASE = "case.yaml"
"""Where a run that measured its cluster keeps the case."""
BEST = "best.json"
"""Which checkpoint has the lowest held-out loss, in a run that computes it."""
MEMBERSHIP = "membership.jsonl"
"""Which hosts have trained together, a line for each generation."""
PARENT = "parent.json"
"""Of which run's checkpoint the weights were that a run began with, if it began so."""
RECOVERIES = "recoveries.jsonl"
"""How the run has come over the loss of a stage, a line for each time."""
GENERATIONS = "generations"
"""The folder of the plans by which generations went on, in which two hosts that have lost each
other also find out which goes on."""


def require_new(folder: Path) -> None:
    """Refuse a folder that holds a run already."""
    with accessible(folder):
        is_used = (folder / CONFIG).exists() or latest_step(folder) is not None
    if is_used:
        raise InputError(
            "run_dir",
            str(folder),
            "holds a run already",
            "Go on with it by --resume, or give another folder: --set run_dir=...",
        )


def start_run(folder: Path, config: Config, schedule: Schedule) -> None:
    """Create the folder of a new run, or give the run in it other plans to go on under.

    Raises:
        InputError: if the folder cannot be written.
    """
    # What takes time comes first: whoever interrupts it finds the run with the plans that it had.
    pictures = {name: gantt(plan, simulate_plan(plan)) for name, plan in schedule.plans.items()}
    with accessible(folder):
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


def continue_run(folder: Path, config: Config, step: int, *, is_own: bool = False) -> None:
    """Make the folder ready to go on after `step`: the metrics of later steps come again.

    Those that are the `own` of this process are cut short where they are. Others may be written by
    a host that was stopped: what is kept of them goes into a new file.

    Raises:
        InputError: if the folder cannot be used.
    """
    with accessible(folder):
        write_whole(folder / CONFIG, to_yaml(config))
        path = folder / METRICS
        end, _ = end_of_step(path, step)
        if is_own:
            os.truncate(path, end)
        else:
            copy_beginning(path, end)


def last_step(folder: Path) -> int:
    """The last step in the metrics; 0 where there is none.

    Raises:
        InputError: if the file cannot be read.
    """
    with accessible(folder):
        return end_of_step(folder / METRICS, sys.maxsize)[1]


def metrics_of(folder: Path, step: int) -> dict[str, Any] | None:
    """The metrics of one step, if they are there.

    Raises:
        InputError: if the file cannot be read.
    """
    with accessible(folder):
        return line_of_step(folder / METRICS, step)


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
    # These are not even looked into: folders of checkpoints come and go meanwhile.
    tops = [path for path in sorted(folder.iterdir()) if path.name not in elsewhere]
    found = (path for top in tops for path in (sorted(top.rglob("*")) if top.is_dir() else [top]))
    return [
        path for path in found if path.is_file() and path.suffix != PARTIAL and path.name != LEASE
    ]


def append_generation(
    folder: Path, generation: Generation, plan: Plan, members: Sequence[Mapping[str, Any]]
) -> None:
    """Add a generation of hosts to membership.jsonl, and what each member tells of itself.

    The plan by which those of a later one than the first go on is kept in full.
    """
    line = {
        "generation": generation.number,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": generation.step,
        "cause": generation.cause,
        "leader": generation.leader,
        "rewound": generation.is_rewound,
        "plan": plan.method,
        "predicted_seconds": plan.predicted.iteration_s,
        "members": list(members),
    }
    if generation.left_out:
        line["left_out"] = list(generation.left_out)
    if generation.lost:
        remade = [asdict(made) for made in generation.remade]
        line |= {"lost": list(generation.lost), "remade": remade}
    if generation.number > 1:
        with accessible(folder):
            (folder / GENERATIONS).mkdir(exist_ok=True)
            plan.save(folder / GENERATIONS / f"plan-{generation.number}.json")
    # Last: whoever reads the line finds the plan.
    with accessible(folder):
        add_line_to(folder / MEMBERSHIP, line)


def append_recovery(folder: Path, line: Mapping[str, Any]) -> None:
    """Add to recoveries.jsonl how the run has come over the loss of a stage."""
    with accessible(folder):
        add_line_to(folder / RECOVERIES, line)


def read_recoveries(folder: Path) -> list[Mapping[str, Any]]:
    """How the run has come over losses of stages; what cannot be read is left out.

    Raises:
        InputError: if the file cannot be read.
    """
    path = folder / RECOVERIES
    return read_lines(path, _read_recovery) if path.exists() else []


def _read_recovery(text: str, field: str) -> Mapping[str, Any]:
    try:
        line = json.loads(text)
        for key in ("generation", "step", "steps_old"):
            fields.integer(line[key], f"{field}, {key}", 0)
        for stage in fields.sequence(line["stages"], f"{field}, stages"):
            fields.integer(stage, f"{field}, stages", 0)
        for told in (line["by"], line["asked"], line["cause"]):
            fields.text(told, field)
        for key in ("loss_before", "loss_after"):
            if line[key] is not None:
                fields.number(line[key], f"{field}, {key}")
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(field, text, "is no recovery of a run", LEFT_OUT) from error
    return line


def first_to_write(folder: Path, generation: Generation) -> Generation:
    """Write a generation of hosts, unless one of its number is there; returns what is there.

    Of two hosts that have lost each other this decides which goes on: only one can make a file.

    Raises:
        TemporaryError: if the folder cannot be used.
    """
    decided = folder / GENERATIONS
    path = decided / f"{generation.start:x}-{generation.number}.json"
    try:
        decided.mkdir(exist_ok=True)
        own = decided / f"{path.name}.{secrets.token_hex(8)}{PARTIAL}"
        own.write_text(json.dumps(generation_to_json(generation)), encoding="utf-8")
        # A link is made with the whole of the file, or not at all.
        with suppress(FileExistsError):
            os.link(own, path)
        own.unlink(missing_ok=True)
        return parse_generation(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:  # While a run trains, it may be over later.
        raise unusable(folder, error) from error


def makes_links(folder: Path) -> bool:
    """Whether a folder lies on a file system by which `first_to_write` can decide.

    Raises:
        InputError: if the folder cannot be used.
    """
    own = folder / f"{secrets.token_hex(8)}{PARTIAL}"
    link = folder / f"{own.name}.link{PARTIAL}"
    with accessible(folder):
        own.touch()
    try:
        os.link(own, link)
    except OSError:
        return False
    finally:
        own.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    return True


def read_generations(folder: Path) -> list[Mapping[str, Any]]:
    """The generations of hosts that have trained together; what cannot be read is left out.

    Raises:
        InputError: if the file cannot be read.
    """
    path = folder / MEMBERSHIP
    return read_lines(path, _read_generation) if path.exists() else []


def _read_generation(text: str, field: str) -> Mapping[str, Any]:
    try:
        line = json.loads(text)
        for key in ("generation", "step", "leader"):
            fields.integer(line[key], f"{field}, {key}", 0)
        for told in (line["at"], line["cause"] or "the run began"):
            fields.text(told, field)
        bool(line["rewound"])
        for member in fields.sequence(line["members"], f"{field}, members"):
            fields.integer(member["host"], f"{field}, host", 0)
            fields.text(member["address"], f"{field}, address")
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(field, text, "is no generation of hosts", LEFT_OUT) from error
    return line


def last_generation(folder: Path) -> int:
    """The number of the generation of hosts that was written last; 0 if there is none.

    Raises:
        OSError: if that cannot be read.
    """
    if not (folder / MEMBERSHIP).exists():
        return 0
    for _, line in lines_from_end(folder / MEMBERSHIP):
        with suppress(InputError):
            return _read_generation(line.decode(errors="replace"), MEMBERSHIP)["generation"]
    return 0


def require_no_later(folder: Path, generation: int) -> None:
    """Raise `TeamEnded` where a later generation of hosts writes in the folder.

    A leader that was stopped may wake up before what would spoil what others have written since.
    Its process does not have to have heard of them by then.
    """
    if last_generation(folder) > generation:
        raise TeamEnded


def last_addresses(folder: Path) -> list[str]:
    """Where the hosts that have trained together last listened for one another."""
    generations = read_generations(folder)
    return [str(member["address"]) for member in generations[-1]["members"]] if generations else []


def append_metrics(folder: Path, line: dict[str, Any]) -> None:
    """Add one iteration to the metrics; a crash loses at most this line."""
    with closing(MetricsWriter(folder)) as metrics:
        metrics.append(line)


class MetricsWriter:
    """Adds iterations to the metrics of a run, as long as nobody else goes on with it.

    Whoever does makes a new file (`continue_run`). A host that was stopped meanwhile still has the
    old one, and what it adds there counts no more.
    """

    def __init__(self, folder: Path):
        """Open the file that is there now, or a new one."""
        self._folder = folder
        with accessible(folder):
            self._file = self._opened()
            self._status = os.fstat(self._file.fileno())

    def append(self, line: dict[str, Any]) -> None:
        """Add one iteration; a crash loses at most this line. May be repeated where it fails."""
        with accessible(self._folder):
            try:
                add_line(self._file.fileno(), line)
            except OSError as error:
                # The file is gone from the server, or has been moved there.
                if error.errno != errno.ESTALE:
                    raise
                if self._is_open_again():
                    add_line(self._file.fileno(), line)

    def _is_open_again(self) -> bool:
        """Open the file anew, unless another is in its place: then what is added counts no more."""
        again = self._opened()
        if not os.path.samestat(os.fstat(again.fileno()), self._status):
            again.close()
            return False
        self._file.close()
        self._file = again
        return True

    def _opened(self) -> io.FileIO:
        return (self._folder / METRICS).open("a+b", buffering=0)

    def close(self) -> None:
        """Add no more."""
        self._file.close()


def write_parent(folder: Path, told: Mapping[str, Any] | None) -> None:
    """Note what a run that is about to begin has the weights of; of a start before it none stays.

    Raises:
        InputError: if the folder cannot be written.
    """
    with accessible(folder):
        if told is None:
            (folder / PARENT).unlink(missing_ok=True)
        else:
            write_whole(folder / PARENT, json.dumps(told, indent=1) + "\n")


def read_parent(folder: Path) -> Mapping[str, Any] | None:
    """What a run has noted of the one whose weights it began with; None if there is no such note.

    Raises:
        InputError: if it is damaged.
    """
    path = folder / PARENT
    if not path.exists():
        return None
    told = fields.load_json(path, str(path))
    names = ("init_from", "folder", "step", "checkpoint", "config", "parent")
    told = fields.mapping(told, str(path), names, names)
    fields.integer(told["step"], f"{path}: step", 0)
    return told


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all iterations; what cannot be read is left out.

    Raises:
        InputError: if the file cannot be read.
    """
    return read_lines(folder / METRICS, _read_line)


def _read_line(text: str, field: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
        fields.integer(line["step"], field)
    except (ValueError, TypeError, KeyError) as error:
        problem = "is no object with the figures of a step"
        raise InputError(field, text, problem, LEFT_OUT) from error
    return line


def write_best(folder: Path, step: int, loss: float) -> None:
    """Note which checkpoint has the lowest held-out loss."""
    write_whole(folder / BEST, json.dumps({"step": step, "validation_loss": loss}) + "\n")
