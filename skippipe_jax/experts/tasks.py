"""The work that an ensemble needs: each run is trained and scores all domains, in processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from skippipe_sched import fields

from skippipe_jax.campaign.running import Command, digest_of, threads_each
from skippipe_jax.config import DataConfig, MixtureConfig
from skippipe_jax.config.data import FOR_PRIORS, FOR_SCORES
from skippipe_jax.experts.config import ExpertsConfig
from skippipe_jax.experts.members import PROBE, Member, mixture_entry
from skippipe_jax.inference.scores import Scores
from skippipe_jax.storage.checkpoint import latest_step
from skippipe_jax.storage.files import atomic_write
from skippipe_jax.storage.run_dir import RunDir

SPECIFICATION, DONE = "asked.json", "done.json"
STARTING = 30.0
"""The work that it takes to start a process, in iterations."""


@dataclass(frozen=True)
class Place:
    """Where an ensemble works, and what all of its models are asked."""

    config: ExpertsConfig
    folder: Path

    @property
    def configs(self) -> Path:
        """The folder of what runs are told."""
        return self.folder / "configs"

    def run_dir(self, member: Member) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / member.name

    def origin(self, member: Member) -> str | None:
        """Return what `init_from` says of a run."""
        if isinstance(member.parent, Member):
            return f"run:{self.run_dir(member.parent)}"
        return member.parent

    def asked(self, probed: str | None = None) -> dict[str, Any]:
        """What a model scores, as a file holds it: all domains, or of one the text for priors."""
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
    """A model that scores all domains: a run, or the mean of several, for which it is a task.

    Attributes:
        members: the runs.
        name: how its files are called.
    """

    place: Place
    members: tuple[Member, ...]
    name: str

    @property
    def folder(self) -> Path:
        """Where its scores are."""
        return self.place.folder / "scores" / self.name

    @cached_property
    def asked(self) -> dict[str, Any]:
        """What it scores; a probe its own domain alone."""
        first = self.members[0]
        return self.place.asked(first.domains[0] if first.kind == PROBE else None)

    @cached_property
    def digest(self) -> str:
        """Of all that its scores come from."""
        return digest_of([[own.digest for own in self.members], self.asked])

    @property
    def needs(self) -> Collection[str]:
        """The runs."""
        return tuple(own.name for own in self.members)

    @property
    def work(self) -> float:
        """What starting costs."""
        return STARTING

    def environment(self) -> Mapping[str, str]:
        """Its share of the cores."""
        return threads_each(self.place.config.at_once)

    def commands(self) -> Sequence[Callable[[], Command]]:
        """Return the scoring."""
        return [self.scoring]

    def found(self) -> str:
        """Of how many runs it is the mean."""
        return f"scored the mean of {len(self.members)} runs"

    def is_done(self) -> bool:
        """Tell whether its scores of all domains are there."""
        done = self.folder / DONE
        return done.exists() and fields.load_json(done, str(done))["digest"] == self.digest

    def scores(self, domain: str, part: str) -> Scores:
        """Return what it says of a part of a domain."""
        return Scores.load(self.folder / f"{domain}-{part}.npz")

    def scoring(self) -> Command:
        """Return the command that writes its scores."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # While scores are replaced they are of two kinds, whatever is asked afterwards.
        (self.folder / DONE).unlink(missing_ok=True)
        path = self.folder / SPECIFICATION
        runs = [str(self.place.run_dir(own)) for own in self.members]
        asked = {"digest": self.digest, "runs": runs, **self.asked}
        atomic_write(path, json.dumps(asked))
        return ["skippipe_jax.experts.scoring", str(path)]


@dataclass(frozen=True)
class Training:
    """A run that is trained, and then scores all domains; see `campaign.running.Task`."""

    place: Place
    member: Member
    scored: bool = True

    @property
    def name(self) -> str:
        """As the run's."""
        return self.member.name

    @property
    def needs(self) -> Collection[str]:
        """The run that it begins with."""
        parent = self.member.parent
        return (parent.name,) if isinstance(parent, Member) else ()

    @property
    def work(self) -> float:
        """Its iterations, and what starting costs."""
        return self.member.steps + STARTING

    @property
    def model(self) -> Scored:
        """Its scores."""
        return Scored(self.place, (self.member,), self.name)

    def is_done(self) -> bool:
        """Tell whether it has been trained, and has scored what it is asked."""
        return self.model.is_done() if self.scored else self._is_trained()

    def environment(self) -> Mapping[str, str]:
        """Its share of the cores."""
        return threads_each(self.place.config.at_once * self.member.hosts)

    def commands(self) -> Sequence[Callable[[], Command]]:
        """Return the training, unless it has ended, and the scoring."""
        training = [] if self._is_trained() else [self._training]
        return [*training, self.model.scoring] if self.scored else training

    def found(self) -> str:
        """Its last loss."""
        last = RunDir(self.place.run_dir(self.member)).metrics()[-1]
        loss = "none" if last.loss is None else f"{last.loss:.4f}"
        return f"loss {loss} after {last.step} iterations"

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
        given = ["--config", str(path), *resume]
        if self.member.hosts > 1:
            return ["skippipe_jax", "launch", *given, "--hosts", str(self.member.hosts)]
        return ["skippipe_jax.train", *given]


def asked_of(path: Path) -> dict[str, Any]:
    """Return what a model is asked, as `Scored.scoring` wrote it."""
    return fields.load_json(path, str(path))


def data_of(data: DataConfig, asked: Mapping[str, Any]) -> DataConfig:
    """Return the data of a run with all domains instead of its own, in batches to be scored."""
    domains = tuple(MixtureConfig(**domain) for domain in asked["domains"])
    return replace(data, mixture=domains, microbatch_size=asked["batch_size"])
