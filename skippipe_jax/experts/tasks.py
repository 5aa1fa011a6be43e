"""Tasks of an ensemble: processes that train each run and score all domains."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from skippipe_sched import fields

from skippipe_jax.campaign.running import Command, thread_environment
from skippipe_jax.config import DataConfig, MixtureConfig
from skippipe_jax.config.data import FOR_PRIORS, FOR_SCORES
from skippipe_jax.config.resume import json_digest
from skippipe_jax.experts.config import ExpertsConfig
from skippipe_jax.experts.members import PROBE, Member, mixture_entry
from skippipe_jax.inference.scores import Scores
from skippipe_jax.storage.checkpoint import latest_step
from skippipe_jax.storage.files import atomic_write
from skippipe_jax.storage.run_dir import RunDir

SPECIFICATION, DONE = "asked.json", "done.json"
STARTING = 30.0
"""Cost of starting a process, in iterations."""


@dataclass(frozen=True)
class Workspace:
    """Folder and configuration of an ensemble, and the text that its models score."""

    config: ExpertsConfig
    folder: Path

    @property
    def configs(self) -> Path:
        """Folder of the configurations of runs."""
        return self.folder / "configs"

    def run_dir(self, member: Member) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / member.name

    def origin(self, member: Member) -> str | None:
        """Return the `init_from` of a run."""
        if isinstance(member.parent, Member):
            return f"run:{self.run_dir(member.parent)}"
        return member.parent

    def asked(self, probed: str | None = None) -> dict[str, Any]:
        """Return the specification of scores: all domains, or the text for priors of `probed`."""
        evaluation = self.config.evaluation
        sequences = {FOR_PRIORS: evaluation.prior_sequences, FOR_SCORES: evaluation.sequences}
        return {
            "domains": [mixture_entry(self.config, name) for name in self.config.names],
            "batch_size": evaluation.batch_size,
            "parts": [
                [domain, part, count]
                for domain in (self.config.names if probed is None else [probed])
                for part, count in sequences.items()
                if probed is None or part == FOR_PRIORS
            ],
        }


@dataclass(frozen=True)
class Scored:
    """Model that scores all domains: a run, or the mean of several, which is a task of its own."""

    place: Workspace
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """Name of its files."""
        first, *others = self.members
        return f"averaged-{self.digest[:8]}" if others else first.name

    @property
    def folder(self) -> Path:
        """Folder of its scores."""
        return self.place.folder / "scores" / self.name

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Specification of its scores; for a probe, its own domain only."""
        first = self.members[0]
        return self.place.asked(first.domains[0] if first.kind == PROBE else None)

    @cached_property
    def digest(self) -> str:
        """Digest of everything that its scores depend on."""
        return json_digest([[member.digest for member in self.members], self.asked])

    @property
    def needs(self) -> Collection[str]:
        """Names of the runs."""
        return tuple(member.name for member in self.members)

    @property
    def work(self) -> float:
        """Cost of starting."""
        return STARTING

    def environment(self) -> Mapping[str, str]:
        """Return the variables for its share of the cores."""
        return thread_environment(self.place.config.at_once)

    def commands(self) -> Sequence[Callable[[], Command]]:
        """Return the scoring."""
        return [self.scoring]

    def found(self) -> str:
        """Return a line with the number of averaged runs."""
        return f"scored the mean of {len(self.members)} runs"

    def is_done(self) -> bool:
        """Return whether its scores of all domains exist."""
        done = self.folder / DONE
        return done.exists() and fields.load_json(done, str(done))["digest"] == self.digest

    def scores(self, domain: str, part: str) -> Scores:
        """Return its scores of a part of a domain."""
        return Scores.load(self.folder / f"{domain}-{part}.npz")

    def scoring(self) -> Command:
        """Return the command that writes its scores."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Invalidate first: while scores are replaced, old and new ones are mixed.
        (self.folder / DONE).unlink(missing_ok=True)
        path = self.folder / SPECIFICATION
        runs = [str(self.place.run_dir(member)) for member in self.members]
        asked = {"digest": self.digest, "runs": runs, **self.asked}
        atomic_write(path, json.dumps(asked))
        return ["skippipe_jax.experts.scoring", str(path)]


@dataclass(frozen=True)
class TrainingTask:
    """Task that trains a run, and then scores all domains; see `campaign.running.Task`."""

    place: Workspace
    member: Member
    scored: bool = True

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.member.name

    @property
    def needs(self) -> Collection[str]:
        """Name of the run that it starts from, if it is in the ensemble."""
        parent = self.member.parent
        return (parent.name,) if isinstance(parent, Member) else ()

    @property
    def work(self) -> float:
        """Number of iterations, plus the cost of starting."""
        return self.member.steps + STARTING

    @property
    def model(self) -> Scored:
        """The trained run as a model that scores."""
        return Scored(self.place, (self.member,))

    def is_done(self) -> bool:
        """Return whether the run is trained and its scores exist."""
        return self.model.is_done() if self.scored else self._is_trained()

    def environment(self) -> Mapping[str, str]:
        """Return the variables for its share of the cores."""
        return thread_environment(self.place.config.at_once * self.member.hosts)

    def commands(self) -> Sequence[Callable[[], Command]]:
        """Return the training, unless it is complete, and the scoring."""
        training = [] if self._is_trained() else [self._training]
        return [*training, self.model.scoring] if self.scored else training

    def found(self) -> str:
        """Return a line with the last loss."""
        last = RunDir(self.place.run_dir(self.member)).metrics()[-1]
        loss = "none" if last.loss is None else f"{last.loss:.4f}"
        return f"loss {loss} after {last.step} steps"

    def _is_trained(self) -> bool:
        return latest_step(self.place.run_dir(self.member)) == self.member.steps

    def _training(self) -> Command:
        run = self.place.run_dir(self.member)
        path = self.place.configs / f"{self.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        tree = {**self.member.tree, "run_dir": str(run)}
        origin = self.place.origin(self.member)
        if origin is not None:
            tree["init_from"] = origin
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        resume = ["--resume"] if RunDir(run).is_run else []
        options = ["--config", str(path), *resume]
        if self.member.hosts > 1:
            return ["skippipe_jax", "launch", *options, "--hosts", str(self.member.hosts)]
        return ["skippipe_jax.train", *options]


def data_of(data: DataConfig, asked: Mapping[str, Any]) -> DataConfig:
    """Return the data of a run with all domains instead of its own, in batches for scoring."""
    domains = tuple(MixtureConfig(**domain) for domain in asked["domains"])
    return replace(data, mixture=domains, microbatch_size=asked["batch_size"])
