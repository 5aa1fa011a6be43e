"""Which runs an ensemble's arms consist of: their configurations, and which begins with which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from skippipe_sched.errors import InputError

from skippipe_jax.campaign.running import digest_of
from skippipe_jax.config import Config, parse_config
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
"""Domains by lane, in the order in which their experts follow one another."""


@dataclass(frozen=True)
class Member:
    """A run of an ensemble, or a seed of it.

    Attributes:
        kind: what it is, for its name: seed, expert, probe, dense or scratch.
        domains: what it is trained on.
        size: the name of its size.
        tree: its configuration as a file holds it, but for its folder and what it begins with.
        parent: the run that it begins with; text, where it is none of the ensemble; None where it
            begins anew.
        hosts: the processes that train it.
    """

    kind: str
    domains: tuple[str, ...]
    size: str
    tree: Mapping[str, Any]
    parent: Member | str | None
    hosts: int = 1

    @cached_property
    def digest(self) -> str:
        """Of all that it and those before it are told, by the names of files."""
        parent = self.parent.digest if isinstance(self.parent, Member) else self.parent
        return digest_of([self.tree, parent])

    @property
    def steps(self) -> int:
        """How long it trains."""
        return self.tree["train"]["steps"]

    @property
    def name(self) -> str:
        """How its files are called."""
        of = self.domains[0] if len(self.domains) == 1 else "all"
        return f"{self.kind}-{of}-{self.size}-{self.steps}-{self.digest[:8]}"

    def lineage(self) -> list[Member]:
        """Return the runs of the ensemble that come before it, the first one first, and itself."""
        before = self.parent.lineage() if isinstance(self.parent, Member) else []
        return [*before, self]

    def config(self) -> Config:
        """What it is told, but for its folder, and for its parent if that is of the ensemble.

        Instead of such a parent it begins with what the first one of its lineage begins with, so
        it has the shapes and the tokenizer that come along from there.

        Raises:
            InputError: if a run could not be told so.
        """
        with naming(self.domains):
            return parse_config({**self.tree, "init_from": self.lineage()[0].parent})


@dataclass(frozen=True)
class Arm:
    """What an arm's perplexities come from.

    Attributes:
        name: as in the configuration.
        members: its experts by domain, or the one model that it is under the name of its kind.
        lanes: where it is made of experts.
        averages: whether parameters of the members are averaged into one model.
    """

    name: str
    members: Mapping[str, Member]
    lanes: Lanes
    averages: bool = False


class Members:
    """Makes the runs of an ensemble from its configuration."""

    def __init__(self, config: ExpertsConfig, difficulty: Mapping[str, float] | None = None):
        """`difficulty` is the loss that the probe has measured on each domain, once it has."""
        self.config = config
        self.difficulty = difficulty

    def seed(self, size: str) -> Member | str:
        """Return the model of a size from which experts branch; text, where it is given."""
        given = self.config.seeds.init_from.get(size)
        if given is not None:
            return given
        return self._member(SEED, self.config.inside, size, self.config.seeds.steps, None)

    def probes(self) -> dict[str, Member]:
        """A short run on each domain, from the seed of the probed size."""
        size = self.config.probed_size
        steps, parent = self.config.probe.steps, self.seed(size)
        return {
            domain: self._member(PROBE, (domain,), size, steps, parent)
            for domain in self.config.inside
        }

    def arms(self) -> list[Arm]:
        """Return all arms.

        Raises:
            InputError: if experts would begin with each other, or with one of another size.
        """
        return [self._arm(name, arm) for name, arm in self.config.arms.items()]

    def lanes(self, arm: ArmConfig) -> Lanes:
        """Return the lanes of an arm: those that are given, by measured difficulty, or by chance.

        None is empty: of fewer domains than `LANES` there are fewer lanes.
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
        own = self._member(arm.kind, self.config.inside, arm.size, arm.steps, parent)
        return Arm(name, {arm.kind: own}, {})

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
        found: dict[str, Member] = {}

        def expert(domain: str, wanted_by: tuple[str, ...]) -> Member:
            where = f"arms.{name}.begins"
            if domain in wanted_by:
                circle = " from ".join((*wanted_by, domain))
                problem = "these experts would begin with each other"
                raise InputError(where, circle, problem, "Let one begin with the seed")
            if domain not in found:
                earlier, size = before[domain], sizes[domain]
                if earlier == SEED:
                    parent = self.seed(size)
                else:
                    parent = expert(earlier, (*wanted_by, domain))
                    if parent.size != size:
                        problem = f"{earlier} has size {parent.size}, and {domain} {size}"
                        remedy = "Let it begin with one of its size, or with the seed"
                        raise InputError(where, earlier, problem, remedy)
                found[domain] = self._member(EXPERT, (domain,), size, steps[domain], parent)
            return found[domain]

        for domain in before:
            expert(domain, ())
        return found

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
        own = self.config.seeds.run if parent is None else self.config.experts
        tree = merged(merged(self.config.run, own), {"model": self.config.sizes[size]})
        tree["data"] = tree.get("data", {}) | {
            "source": "mixture",
            "mixture": [mixture_entry(self.config, name) for name in domains],
        }
        tree |= {"seed": self.config.seed, "train": {"steps": steps}}
        return Member(kind, domains, size, tree, parent)


@contextmanager
def naming(domains: Sequence[str]) -> Iterator[None]:
    """Let errors about the sources of a mixture name the domains that these are."""
    try:
        yield
    except InputError as error:
        place = re.match(r"data\.mixture\[(\d+)\]", error.field)
        if place is None:
            raise
        field = f"domains.{domains[int(place[1])]}{error.field[place.end() :]}"
        raise InputError(field, error.value, error.problem, error.remedy) from error


def mixture_entry(config: ExpertsConfig, name: str) -> dict[str, Any]:
    """A domain as a source of a mixture, as a file holds it."""
    own = config.domains[config.names.index(name)]
    keys = ("name", "source", "path", "text_field", "weight")
    return {key: value for key in keys if (value := getattr(own, key)) is not None}


def merged(tree: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which some keys of sections are others."""
    result = dict(tree)
    for section, value in own.items():
        before = result.get(section)
        if isinstance(value, dict) and isinstance(before, dict):
            value = {**before, **value}
        result[section] = value
    return result


def _of_lane(given: Any, lane: str) -> Any:
    return given[lane] if isinstance(given, dict) else given
