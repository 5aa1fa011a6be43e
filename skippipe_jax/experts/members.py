"""Runs of an ensemble's arms: their configurations, and the run that each starts from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, parse_config
from skippipe_jax.config.resume import json_digest
from skippipe_jax.experts.config import (
    AVERAGED,
    DENSE,
    LANES,
    MEASURED,
    SEED,
    ArmConfig,
    ExpertsConfig,
)

PROBE, EXPERT = "probe", "expert"

Lanes = Mapping[str, Sequence[str]]
"""Domains by lane, in the order in which each expert starts from the previous one."""


@dataclass(frozen=True)
class Member:
    """Run of an ensemble, or one of its seeds.

    Attributes:
        kind: part of its name: seed, expert, probe, dense or scratch.
        domains: domains it is trained on.
        size: name of its size.
        tree: its configuration as in a file, without its folder and its initial weights.
        parent: the run that it starts from; text for weights from outside of the ensemble; None for
            training from scratch.
        hosts: number of processes that train it.
    """

    kind: str
    domains: tuple[str, ...]
    size: str
    tree: Mapping[str, Any]
    parent: Member | str | None
    hosts: int = 1

    @cached_property
    def digest(self) -> str:
        """Digest of the settings of this run and its ancestors, for file names."""
        parent = self.parent.digest if isinstance(self.parent, Member) else self.parent
        return json_digest([self.tree, parent])

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.tree["train"]["steps"]

    @property
    def name(self) -> str:
        """Name of its files."""
        of = self.domains[0] if len(self.domains) == 1 else "all"
        return f"{self.kind}-{of}-{self.size}-{self.steps}-{self.digest[:8]}"

    def lineage(self) -> list[Member]:
        """Return its ancestors in the ensemble, the first one first, and itself."""
        before = self.parent.lineage() if isinstance(self.parent, Member) else []
        return [*before, self]

    def config(self) -> Config:
        """Return its configuration, without its folder, and without a parent in the ensemble.

        Instead of such a parent it names the initial weights of the first run in its lineage, so it
        has the shapes and the tokenizer of those weights.

        Raises:
            InputError: if the configuration is not valid.
        """
        with naming(self.domains):
            return parse_config({**self.tree, "init_from": self.lineage()[0].parent})


@dataclass(frozen=True)
class Arm:
    """Models of an arm.

    Attributes:
        name: name in the configuration.
        members: experts by domain, or the arm's only model by its kind.
        lanes: lanes of its experts; empty for other kinds.
        averages: whether the parameters of the members are averaged into one model.
    """

    name: str
    members: Mapping[str, Member]
    lanes: Lanes
    averages: bool = False


class MemberFactory:
    """Factory of the runs of an ensemble, from its configuration."""

    def __init__(self, config: ExpertsConfig, difficulty: Mapping[str, float] | None = None):
        """Keep the configuration, and the probes' loss on each domain once measured."""
        self.config = config
        self.difficulty = difficulty

    def seed(self, size: str) -> Member | str:
        """Return the seed of a size; text for existing weights."""
        given = self.config.seeds.init_from.get(size)
        if given is not None:
            return given
        return self._member(SEED, self.config.inside, size, self.config.seeds.steps, None)

    def probes(self) -> dict[str, Member]:
        """Return a short run on each domain, from the seed of the probed size."""
        size = self.config.probed_size
        steps, parent = self.config.probe.steps, self.seed(size)
        return {
            domain: self._member(PROBE, (domain,), size, steps, parent)
            for domain in self.config.inside
        }

    def arms(self) -> list[Arm]:
        """Return all arms.

        Raises:
            InputError: if experts would start from each other, or from one of another size.
        """
        return [self._arm(name, arm) for name, arm in self.config.arms.items()]

    def lanes(self, arm: ArmConfig) -> Lanes:
        """Return the lanes of an arm: configured, by measured difficulty, or random.

        No lane is empty: with fewer domains than `LANES` there are fewer lanes.
        """
        lanes = self.config.lanes_of(arm)
        if not isinstance(lanes, str):
            return lanes
        domains = list(self.config.inside)
        if lanes == MEASURED:
            domains.sort(key=self._difficulty)
        else:
            domains = list(np.random.default_rng(self.config.seed).permutation(domains))
        parts = np.array_split(np.array(domains), min(len(LANES), len(domains)))
        return {lane: tuple(map(str, part)) for lane, part in zip(LANES, parts, strict=False)}

    def _difficulty(self, domain: str) -> float:
        assert self.difficulty is not None, "the probe comes first"
        return self.difficulty[domain]

    def _arm(self, name: str, arm: ArmConfig) -> Arm:
        if arm.kind == AVERAGED:
            assert arm.of is not None
            averaged = self.config.arms[arm.of]
            experts = self._experts(arm.of, averaged)
            return Arm(name, experts, self.lanes(averaged), averages=True)
        if arm.kind == "experts":
            return Arm(name, self._experts(name, arm), self.lanes(arm))
        assert isinstance(arm.size, str)
        assert isinstance(arm.steps, int)
        parent = self.seed(arm.size) if arm.kind == DENSE else None
        member = self._member(arm.kind, self.config.inside, arm.size, arm.steps, parent)
        return Arm(name, {arm.kind: member}, {})

    def _experts(self, name: str, arm: ArmConfig) -> dict[str, Member]:
        lanes = self.lanes(arm)
        lane_of = {domain: lane for lane, domains in lanes.items() for domain in domains}
        before = {
            domain: earlier
            for domains in lanes.values()
            for earlier, domain in zip((SEED, *domains), domains, strict=False)
        }
        before |= arm.begins
        sizes = {domain: _of_lane(arm.size, lane_of[domain]) for domain in before}
        steps = {domain: self._steps(arm, domain, lane_of[domain]) for domain in before}
        experts: dict[str, Member] = {}

        def expert(domain: str, wanted_by: tuple[str, ...]) -> Member:
            where = f"arms.{name}.begins"
            if domain in wanted_by:
                circle = " from ".join((*wanted_by, domain))
                problem = "these experts would start from each other"
                raise InputError(where, circle, problem, f"Set one of them to {SEED}")
            if domain not in experts:
                earlier, size = before[domain], sizes[domain]
                if earlier == SEED:
                    parent = self.seed(size)
                else:
                    parent = expert(earlier, (*wanted_by, domain))
                    if parent.size != size:
                        problem = f"has size {parent.size}, but {domain} has size {size}"
                        remedy = f"Name an expert of the same size, or {SEED}"
                        raise InputError(where, earlier, problem, remedy)
                experts[domain] = self._member(EXPERT, (domain,), size, steps[domain], parent)
            return experts[domain]

        for domain in before:
            expert(domain, ())
        return experts

    def _steps(self, arm: ArmConfig, domain: str, lane: str) -> int:
        steps = _of_lane(arm.steps, lane)
        if not arm.by_difficulty:
            return steps
        mean = float(np.mean([self._difficulty(name) for name in self.config.inside]))
        return max(1, round(steps * self._difficulty(domain) / mean))

    def _member(
        self,
        kind: str,
        domains: tuple[str, ...],
        size: str,
        steps: int,
        parent: Member | str | None,
    ) -> Member:
        overrides = self.config.seeds.run if parent is None else self.config.experts
        tree = merged(merged(self.config.run, overrides), {"model": self.config.sizes[size]})
        tree["data"] = tree.get("data", {}) | {
            "source": "mixture",
            "mixture": [mixture_entry(self.config, name) for name in domains],
        }
        tree |= {"seed": self.config.seed, "train": {"steps": steps}}
        return Member(kind, domains, size, tree, parent)


@contextmanager
def naming(domains: Sequence[str]) -> Iterator[None]:
    """Name domains in errors about the sources of a mixture."""
    try:
        yield
    except InputError as error:
        place = re.match(r"data\.mixture\[(\d+)\]", error.field)
        if place is None:
            raise
        field = f"domains.{domains[int(place[1])]}{error.field[place.end() :]}"
        raise InputError(field, error.value, error.problem, error.remedy) from error


def mixture_entry(config: ExpertsConfig, name: str) -> dict[str, Any]:
    """Return a domain as a source of a mixture, as in a file."""
    domain = config.domains[config.names.index(name)]
    keys = ("name", "source", "path", "text_field", "weight")
    return {key: value for key in keys if (value := getattr(domain, key)) is not None}


def merged(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of some sections replaced."""
    result = dict(tree)
    for section, value in overrides.items():
        before = result.get(section)
        if isinstance(value, dict) and isinstance(before, dict):
            value = {**before, **value}
        result[section] = value
    return result


def _of_lane(given: Any, lane: str) -> Any:
    return given[lane] if isinstance(given, dict) else given
