"""Folder of a run: configuration, plans, metrics, generations of hosts, tokenizer."""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.figures.gantt import gantt
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.config import NO_RECIPE, Config, DataConfig, to_yaml
from skippipe_jax.config.data import BYTES, CHAT_TEMPLATE, TOKENIZER_FOLDER, has_tokenizer
from skippipe_jax.config.parsing import CONFIG, is_run, saved_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.errors import GenerationEnded
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.storage.checkpoint import CHECKPOINTS, latest_step
from skippipe_jax.storage.files import (
    PARTIAL,
    atomic_write,
    new_directory,
    os_errors_as,
    replace_by_beginning,
    unusable,
)
from skippipe_jax.storage.records import (
    GenerationRecord,
    MemberRecord,
    RecoveryRecord,
    StepMetrics,
    ValidationMetrics,
    append_record,
    end_of_step,
    last_record,
    read_records,
)
from skippipe_jax.storage.run_lock import LEASE

PLAN, METRICS, VALIDATION = "plan.json", StepMetrics.FILE, ValidationMetrics.FILE
MEMBERSHIP, RECOVERIES = GenerationRecord.FILE, RecoveryRecord.FILE
PLANS = "plans"
"""Folder of the plans of a recipe, by name, and of their pictures."""
CASE = "case.yaml"
"""File with the measured case, in a run that measured its cluster."""
BEST = "best.json"
"""File with the step of the lowest validation loss, in a run that validates."""
BEST_STEP = "best"
"""Name for the checkpoint with the lowest validation loss, in place of its step."""
STARTED = "started.json"
"""File with the folder in which the run was last started, to which its paths are relative."""
PARENT = "parent.json"
"""File with the checkpoint of another run from which a run was initialized, if any."""
GENERATIONS = "generations"
"""Folder of the plans of generations, and of the files with which two hosts that cannot reach each
other decide which of them continues."""

FileRecord = StepMetrics | ValidationMetrics | GenerationRecord | RecoveryRecord
R = TypeVar("R", bound=FileRecord)


class RunDir:
    """Folder of a run at `path`; every method reads the files again.

    Methods raise an `InputError` if the folder cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Store the path; read nothing yet."""
        self.path = Path(path)

    @property
    def is_run(self) -> bool:
        """True if the folder holds a run."""
        return is_run(self.path)

    def config(self, field: str = "run_dir", overrides: Sequence[str] = ()) -> Config:
        """Read the configuration with `overrides`; `field` is the setting that named the folder."""
        return saved_config(self.path, field, overrides)

    def plan(self) -> Plan:
        """Read the run's own plan."""
        return load_plan(self.path / PLAN)

    def schedule(self) -> Schedule:
        """Read all plans, and the plan of each iteration."""
        others = sorted((self.path / PLANS).glob("*.json"))
        plans = {OWN: self.plan()} | {path.stem: load_plan(path) for path in others}
        return Schedule(self.config().recipe_in_steps if self.is_run else NO_RECIPE, plans)

    def require_new(self) -> None:
        """Raise InputError if the folder already holds a run."""
        with os_errors_as("run_dir", self.path):
            is_used = (self.path / CONFIG).exists() or latest_step(self.path) is not None
        if is_used:
            raise InputError(
                "run_dir",
                str(self.path),
                "already contains a run",
                "Continue it with --resume, or set another folder: --set run_dir=...",
            )

    def create(self, config: Config, schedule: Schedule) -> None:
        """Create the folder of a new run, or replace the plans of the run in it."""
        # Draw first, which takes time: an interruption then leaves the former plans.
        pictures = {name: gantt(plan, simulate_plan(plan)) for name, plan in schedule.plans.items()}
        with os_errors_as("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / PLANS).exists():  # From an interrupted start, or former plans.
                shutil.rmtree(self.path / PLANS)
            for name, plan in schedule.plans.items():
                path = self.path / (PLAN if name == OWN else f"{PLANS}/{name}.json")
                path.parent.mkdir(exist_ok=True)
                plan.save(path)
                path.with_suffix(".svg").write_text(pictures[name], encoding="utf-8")
            for name in (METRICS, VALIDATION):
                (self.path / name).touch()
            # Last: the config marks the folder as that of a run with this plan.
            self._write_config(config)

    def truncate_after(self, step: int, config: Config, *, is_own: bool = False) -> None:
        """Prepare the folder to continue after `step`, by dropping metrics of later steps.

        Files that this process wrote last (`is_own`) are truncated in place. A suspended host may
        still have others open: their beginning is copied to a new file.
        """
        with os_errors_as("run_dir", self.path):
            self._write_config(config)
            if not (self.path / VALIDATION).exists():
                losses = self.validation_losses().items()
                lines = [
                    json.dumps({"step": n, "validation_loss": loss}) + "\n" for n, loss in losses
                ]
                atomic_write(self.path / VALIDATION, "".join(lines))
            for path in (self.path / METRICS, self.path / VALIDATION):
                end, _ = end_of_step(path, step)
                if is_own:
                    os.truncate(path, end)
                else:
                    replace_by_beginning(path, end)

    def _write_config(self, config: Config) -> None:
        atomic_write(self.path / STARTED, json.dumps({"folder": os.getcwd()}) + "\n")
        atomic_write(self.path / CONFIG, to_yaml(config))

    def files_to_mirror(self) -> list[Path]:
        """Return the files besides checkpoints that are needed to resume or inspect a run."""
        excluded = (CHECKPOINTS, "timelines", "profile", "tensorboard", "wandb")
        # Do not list excluded folders: those of checkpoints may change meanwhile.
        tops = [path for path in sorted(self.path.iterdir()) if path.name not in excluded]
        paths = (p for top in tops for p in (sorted(top.rglob("*")) if top.is_dir() else [top]))
        return [p for p in paths if p.is_file() and p.suffix != PARTIAL and p.name != LEASE]

    def metrics(self) -> list[StepMetrics]:
        """Read the metrics of all steps, each with its validation loss."""
        losses = {line.step: line.validation_loss for line in self._records(ValidationMetrics)}
        lines = read_records(self.path / METRICS, StepMetrics)
        former = {line.step: line.validation_loss or None for line in lines}  # Former versions.
        return [
            msgspec.structs.replace(n, validation_loss=losses.get(n.step, former[n.step]))
            for n in lines
        ]

    def last_step(self) -> int:
        """Return the last step in the metrics; 0 if there is none."""
        with os_errors_as("run_dir", self.path):
            return end_of_step(self.path / METRICS, sys.maxsize)[1]

    def validation_losses(self) -> dict[int, float]:
        """Read the validation losses by step, without those that are not finite."""
        path = self.path / VALIDATION
        if not path.exists():  # Former versions wrote them to the metrics.
            path = self.path / METRICS
        lines = read_records(path, ValidationMetrics)
        return {n.step: n.validation_loss for n in lines if n.validation_loss is not None}

    def append(self, record: FileRecord) -> None:
        """Append a record to the file of its kind; a crash loses at most this one."""
        with os_errors_as("run_dir", self.path):
            append_record(self.path / record.FILE, record)

    def append_generation(
        self, generation: Generation, plan: Plan, members: Sequence[Mapping[str, Any]]
    ) -> None:
        """Record a generation of hosts; for all but the first, also save its plan."""
        if generation.number > 1:
            with os_errors_as("run_dir", self.path):
                (self.path / GENERATIONS).mkdir(exist_ok=True)
                plan.save(self.path / GENERATIONS / f"plan-{generation.number}.json")
        # Last, so that a reader of the record finds the plan.
        self.append(
            GenerationRecord(
                generation=generation.number,
                at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                step=generation.step,
                cause=generation.cause,
                leader=generation.leader,
                rewound=generation.is_rewound,
                plan=plan.method,
                predicted_seconds=plan.predicted.iteration_s,
                members=msgspec.convert(members, list[MemberRecord]),
                left_out=[*generation.left_out],
                lost=[*generation.lost],
                remade=[*generation.remade],
            )
        )

    def generations(self) -> list[GenerationRecord]:
        """Read the generations of hosts; unreadable records are skipped."""
        return self._records(GenerationRecord)

    def recoveries(self) -> list[RecoveryRecord]:
        """Read the recoveries from lost stages; unreadable records are skipped."""
        return self._records(RecoveryRecord)

    def _records(self, kind: type[R]) -> list[R]:
        path = self.path / kind.FILE
        return read_records(path, kind) if path.exists() else []

    def last_generation(self) -> GenerationRecord | None:
        """Read the last generation of hosts; None if there is none."""
        path = self.path / MEMBERSHIP
        with os_errors_as("run_dir", self.path):
            return last_record(path, GenerationRecord) if path.exists() else None

    def require_leads(self, generation: int) -> None:
        """Raise `GenerationEnded` if a later generation of hosts writes in the folder.

        A leader that was suspended may resume before it receives messages of the later generation,
        and must not overwrite its files.
        """
        last = self.last_generation()
        if last is not None and last.generation > generation:
            raise GenerationEnded

    def last_addresses(self) -> list[str]:
        """Return the addresses of the hosts of the last generation."""
        last = self.last_generation()
        return [] if last is None else [member.address for member in last.members]

    def propose(self, generation: Generation) -> Generation:
        """Write a generation of hosts unless its number exists; return the generation in the file.

        This decides which of two hosts that cannot reach each other continues: only one can create
        the file.

        Raises:
            TemporaryError: if the folder cannot be used.
        """
        folder = self.path / GENERATIONS
        path = folder / f"{generation.start:x}-{generation.number}.json"
        partial = folder / f"{path.name}.{secrets.token_hex(8)}{PARTIAL}"
        try:
            folder.mkdir(exist_ok=True)
            partial.write_text(json.dumps(msgspec.to_builtins(generation)), encoding="utf-8")
            # Creating a hard link to a complete file is atomic.
            try:
                with suppress(FileExistsError):
                    os.link(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), Generation)
        except OSError as error:  # May be temporary during training.
            raise unusable(self.path, error) from error

    def supports_links(self) -> bool:
        """Return whether the file system supports the hard links that `propose` needs."""
        partial = self.path / f"{secrets.token_hex(8)}{PARTIAL}"
        link = self.path / f"{partial.name}.link{PARTIAL}"
        with os_errors_as("run_dir", self.path):
            partial.touch()
        try:
            os.link(partial, link)
        except OSError:
            return False
        finally:
            partial.unlink(missing_ok=True)
            link.unlink(missing_ok=True)
        return True

    def write_parent(self, parent: Mapping[str, Any] | None) -> None:
        """Record the provenance of the initial weights; None removes an earlier record."""
        with os_errors_as("run_dir", self.path):
            if parent is None:
                (self.path / PARENT).unlink(missing_ok=True)
            else:
                atomic_write(self.path / PARENT, json.dumps(parent, indent=1) + "\n")

    def parent(self) -> Mapping[str, Any] | None:
        """Read the provenance of the initial weights; None if they come from no other run."""
        path = self.path / PARENT
        if not path.exists():
            return None
        names = ("init_from", "folder", "step", "checkpoint", "config", "parent")
        parent = fields.checked_mapping(fields.load_json(path, str(path)), str(path), names, names)
        fields.integer(parent["step"], f"{path}: step", 0)
        return parent

    def write_best(self, best: Mapping[str, Any] | None) -> None:
        """Record the step and validation loss of the best checkpoint; None removes the record."""
        if best is None:
            (self.path / BEST).unlink(missing_ok=True)
        else:
            atomic_write(self.path / BEST, json.dumps(best) + "\n")

    def best(self) -> Mapping[str, Any] | None:
        """Read the record of `write_best`; None if there is none."""
        path = self.path / BEST
        if not path.exists():
            return None
        best = fields.load_json(path, str(path))
        fields.integer(best["step"], f"{path}: step", 0)
        return best

    def step_named(self, step: int | str | None) -> int | None:
        """Return a step, resolving the name `BEST_STEP`.

        Raises:
            InputError: if `step` is another word, or the run has no best checkpoint.
        """
        if not isinstance(step, str):
            return step
        if step != BEST_STEP:
            raise InputError("--step", step, "is not a step", f'Write a number, or "{BEST_STEP}"')
        best = self.best()
        if best is None:
            problem = f"{self.path} has no best checkpoint: its validation loss was never computed"
            raise InputError("--step", step, problem, "Name a step, or train with validation.every")
        return best["step"]

    def keep_tokenizer(self, config: DataConfig) -> None:
        """Copy the tokenizer into the folder, unless it is the byte tokenizer or already there."""
        from skippipe_jax.data.batches import tokenizer_of  # These import JAX.
        from skippipe_jax.data.tokenizer import copy_tokenizer

        name, folder = tokenizer_of(config), self.path / TOKENIZER_FOLDER
        if name != BYTES and not folder.is_dir():
            with new_directory(folder, "run_dir") as partial:
                copy_tokenizer(name, partial)

    def keep_chat_template(self, config: DataConfig) -> None:
        """Write the configured chat template, in place of that of the tokenizer."""
        from skippipe_jax.data.chat import template_text

        name, folder = config.chat_template, self.path / TOKENIZER_FOLDER
        if name is not None and folder.is_dir():
            text = template_text(name, "data.chat_template")
            atomic_write(folder / CHAT_TEMPLATE, text)

    def with_tokenizer(self, config: DataConfig) -> DataConfig:
        """Return the configuration with the folder's tokenizer, unless it is the byte tokenizer.

        A configured chat template is replaced by the saved one too.
        """
        folder = self.path / TOKENIZER_FOLDER
        if config.tokenizer == BYTES or not has_tokenizer(folder):
            return config
        template = config.chat_template
        if template is not None and (folder / CHAT_TEMPLATE).is_file():
            template = str(folder / CHAT_TEMPLATE)
        return replace(config, tokenizer=str(folder), chat_template=template)

    def located(self, config: DataConfig) -> DataConfig:
        """Return the configuration with text paths relative to the folder of the run's last start.

        Paths that do not exist there, as on another machine, are unchanged.
        """
        path = self.path / STARTED
        if not path.exists():
            return config
        started = fields.checked_mapping(fields.load_json(path, str(path)), str(path), ["folder"])
        folder = fields.text(started.get("folder"), f"{path}: folder")
        if folder == os.getcwd():
            return config

        def relocated(path: str | None) -> str | None:
            found = os.path.join(folder, path or "")
            return found if path and (os.path.exists(found) or glob.glob(found)) else path

        mixture = config.mixture and tuple(
            replace(one, path=relocated(one.path)) for one in config.mixture
        )
        return replace(config, path=relocated(config.path), mixture=mixture)
