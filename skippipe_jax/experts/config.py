"""Configuration of an ensemble of experts: domains, lanes, arms, and the training of its runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import MixtureConfig
from skippipe_jax.config.choices import (
    AtLeastOne,
    Choice,
    Positive,
    Real,
    Section,
    Seed,
    require_values,
)
from skippipe_jax.config.parsing import load_as, mapping
from skippipe_jax.config.pretrained import SHAPES

LANES = ("easy", "medium", "hard")
"""Names of lanes that a probe or a random draw makes."""
MEASURED, RANDOM = "measured", "random"
SEED = "seed"
DENSE, SCRATCH, AVERAGED = "dense", "scratch", "averaged"
RUN_KEYS = {
    "run_dir": "each run has its own directory in `folder`",
    "init_from": "experts start from seeds, and seeds from seeds.init_from",
    "train": "seeds.steps, probe.steps and arms.NAME.steps set the number of steps",
    "seed": "all runs use the seed of the ensemble",
}
UNSUITABLE_KEYS = (
    (
        "checkpoint",
        "copy_to",
        "would be the same target for all runs",
        "Remove it, and copy the folder yourself",
    ),
    (
        "validation",
        "patience",
        "could stop runs early, but ensembles are compared at equal steps",
        "Remove it",
    ),
)
DATA_KEYS = ("source", "path", "text_field", "mixture")
OWN_DATA_KEYS = ("microbatch_size",)
"""Keys of `data` in which seeds and experts may differ from `run`; held-out text must be the
same."""
FILE_NAME = r"\w[\w .+-]{0,59}"


@dataclass(frozen=True)
class SeedsConfig(Section, name="seeds"):
    """Seed models, from which experts branch: one of each size in use.

    Attributes:
        steps: training steps of each seed.
        run: sections that differ from the top-level `run`.
        init_from: existing models to use as seeds, by size, as `init_from` of a run.
    """

    steps: AtLeastOne = 300
    run: dict = field(default_factory=dict)
    init_from: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeConfig(Section, name="probe"):
    """Difficulty of a domain: loss of a seed on its text for priors, after brief training on it.

    Attributes:
        size: size of the seed. null: the middle one of `sizes`.
        steps: training steps, with the settings of experts.
    """

    size: str | None = None
    steps: AtLeastOne = 20


@dataclass(frozen=True)
class ArmConfig:
    """One variant of the experts, or one model to compare with.

    Attributes:
        size: size of all experts, or for each lane.
        steps: training steps of every expert, or for each lane; of a `dense` or `scratch` model,
            its total, without the seed's.
        by_difficulty: make steps proportional to the difficulty of the domain; `steps` is the mean.
        lanes: lanes of this arm. null: the top-level `lanes`.
        begins: by domain, the domain whose expert its expert starts from, or `seed`. By default the
            previous one in its lane, or the seed.
        kind: `experts`; `dense`: one model on all domains, continued from the seed; `scratch`: one
            trained from scratch; `averaged`: the mean of the experts' parameters in the arm `of`.
        of: arm to average, for `averaged`.
    """

    size: str | dict[str, str] | None = None
    steps: int | dict[str, int] = 100
    by_difficulty: bool = False
    lanes: str | dict[str, tuple[str, ...]] | None = None
    begins: dict[str, str] = field(default_factory=dict)
    kind: Annotated[str, Choice(("experts", DENSE, SCRATCH, AVERAGED))] = "experts"
    of: str | None = None


@dataclass(frozen=True)
class EvaluationConfig(Section, name="evaluation"):
    """Amount of held-out text, and the mixing of experts.

    Attributes:
        sequences: maximum sequences of each domain for perplexities.
        prior_sequences: maximum sequences of each domain for a cached prior, of other documents.
        decay: share of the prior that is kept after each sequence.
        batch_size: sequences in a batch.
    """

    sequences: AtLeastOne = 64
    prior_sequences: AtLeastOne = 100
    decay: Annotated[float, Real(above=True, end=1.0)] = 0.3
    batch_size: AtLeastOne = 16


@dataclass(frozen=True)
class NodesConfig(Section, name="nodes"):
    """Nodes that the lanes of an arm share: each lane trains on its own part, in parallel.

    Attributes:
        case: case of all nodes, or its YAML file; its times are those of the probe's size.
        budget_s: time limit in seconds of the search for a division.
    """

    case: str | dict = ""
    budget_s: Positive = 60.0

    def __post_init__(self):
        """Reject a section without a case."""
        super().__post_init__()
        if not self.case:
            raise self.error("case", "is missing", "Set it to the path of a case")


@dataclass(frozen=True)
class ExpertsConfig(Section, name=""):
    """Experts, the seeds from which they branch, and arms to compare.

    Attributes:
        folder: output folder, for runs, scores, results.json and results.svg.
        seed: seed of the initial parameters and of random lanes.
        prepare: Python module that writes text; it is called once, with the folder FOLDER/text.
        at_once: number of parallel runs, each on its share of the CPU cores.
        run: settings of all runs, as in a configuration of `train`.
        domains: text of each domain; each needs a `name`.
        outside: domains for evaluation only.
        sizes: by name of the size, the settings of the section `model` that differ.
        seeds: seed models, from which experts branch.
        experts: sections in which experts differ from `run`.
        lanes: domains of each lane, in the order of training; `measured`: easy, medium and hard
            domains by the probe; or `random`.
        probe: measurement of how hard domains are.
        arms: variants to compare, by name; the first is the reference.
        evaluation: amount of held-out text, and the mixing of experts.
        nodes: nodes that the lanes of an arm share, each a host. null: the plan in `run`, in one
            process.
    """

    folder: str = "runs/experts"
    seed: Seed = 0
    prepare: str | None = None
    at_once: AtLeastOne = 2
    run: dict = field(default_factory=dict)
    domains: tuple[MixtureConfig, ...] = ()
    outside: tuple[str, ...] = ()
    sizes: dict[str, dict] = field(default_factory=dict)
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    experts: dict = field(default_factory=dict)
    lanes: str | dict[str, tuple[str, ...]] = MEASURED
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    arms: dict[str, ArmConfig] = field(default_factory=dict)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    nodes: NodesConfig | None = None

    def __post_init__(self):
        """Reject sections that contradict each other; the text is checked later."""
        super().__post_init__()
        for name, tree in (
            ("run", self.run),
            ("experts", self.experts),
            ("seeds.run", self.seeds.run),
        ):
            _require_own_keys(name, tree)
        names = self.names
        if not names:
            raise InputError("domains", None, "is missing", "List two or more domains")
        for number, (name, domain) in enumerate(zip(names, self.domains, strict=True)):
            if not name:
                remedy = "Write name: NAME"
                raise InputError(f"domains[{number}].name", domain.name, "is missing", remedy)
            if names.count(name) > 1:
                problem = "names two domains"
                raise InputError(f"domains[{number}].name", name, problem, "Give each its own name")
            if name == SEED:
                problem = "is reserved for the seed"
                raise InputError(f"domains[{number}].name", name, problem, "Choose another name")
        for number, name in enumerate(self.outside):
            _require_one_of(f"outside[{number}]", name, names, "a domain")
            if name in self.outside[:number]:
                raise InputError(f"outside[{number}]", name, "is listed twice", "List it once")
        if not self.inside:
            problem = "leaves no domain to train on"
            raise self.error("outside", problem, "Remove domains from outside")
        if not self.sizes:
            raise InputError("sizes", None, "is missing", "Write sizes: {M: {}}, for example")
        if not self.arms:
            remedy = "Write arms: {one: {size: M}}, for example"
            raise InputError("arms", None, "is missing", remedy)
        for where, used_names in (("domains", names), ("sizes", self.sizes), ("arms", self.arms)):
            for name in used_names:
                if not re.fullmatch(FILE_NAME, name):
                    problem = "is not suitable for file names"
                    remedy = "Use at most 60 letters, digits, - and _"
                    raise InputError(where, name, problem, remedy)
        for size in self.seeds.init_from:
            _require_one_of("seeds.init_from", size, self.sizes, "a size")
        if self.probe.size is not None:
            _require_one_of("probe.size", self.probe.size, self.sizes, "a size")
        self._require_lanes("lanes", self.lanes)
        for name, arm in self.arms.items():
            self._require_arm(name, arm)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all domains."""
        return tuple(domain.name or "" for domain in self.domains)

    @property
    def inside(self) -> tuple[str, ...]:
        """Domains that experts are trained on."""
        return tuple(name for name in self.names if name not in self.outside)

    def lanes_of(self, arm: ArmConfig) -> str | Mapping[str, Sequence[str]]:
        """Return the lanes of an arm, or the word that selects how they are made."""
        return self.lanes if arm.lanes is None else arm.lanes

    @property
    def probed_size(self) -> str:
        """Size of the seed that measures how hard domains are."""
        return self.probe.size or list(self.sizes)[len(self.sizes) // 2]

    @property
    def is_probed(self) -> bool:
        """True if some arm needs the measurement of how hard domains are."""
        return any(
            arm.by_difficulty or self.lanes_of(arm) == MEASURED
            for arm in self.arms.values()
            if arm.kind == "experts"
        )

    def _require_lanes(self, where: str, lanes: str | Mapping[str, Sequence[str]]) -> None:
        if isinstance(lanes, str):
            fields.text(lanes, where, (MEASURED, RANDOM))
            return
        lane_of: dict[str, str] = {}
        for lane, domains in lanes.items():
            for name in domains:
                _require_one_of(f"{where}.{lane}", name, self.inside, "a domain to train on")
                if name in lane_of:
                    problem = f"is also in lane {lane_of[name]}"
                    raise InputError(f"{where}.{lane}", name, problem, "List each domain once")
                lane_of[name] = lane
        missing = [name for name in self.inside if name not in lane_of]
        if missing:
            problem = f"the domain {missing[0]} is not in any lane"
            remedy = "Add it to a lane, or to outside"
            raise InputError(where, sorted(lane_of), problem, remedy)

    def _require_arm(self, name: str, arm: ArmConfig) -> None:
        where = f"arms.{name}"
        require_values(arm, where)
        for key in (one.name for one in dataclasses.fields(arm)):
            value = getattr(arm, key)
            if key not in _KEYS_OF_KIND[arm.kind] and value != getattr(_NO_ARM, key):
                problem = f"does not apply to an arm of kind {arm.kind}"
                raise InputError(f"{where}.{key}", value, problem, "Remove it")
        if arm.kind == AVERAGED:
            averaged = self.arms.get(arm.of or "")
            if averaged is None or averaged.kind != "experts":
                problem = "is not an arm of kind experts"
                raise InputError(f"{where}.of", arm.of, problem, "Name the arm to average")
            if isinstance(averaged.size, dict) and len(set(averaged.size.values())) > 1:
                problem = "its experts differ in size"
                raise InputError(f"{where}.of", arm.of, problem, "Name an arm of one size")
            return
        lanes = self.lanes_of(arm)
        self._require_lanes(f"{where}.lanes", lanes)
        lane_names = LANES if isinstance(lanes, str) else tuple(lanes)
        for key, given in (("size", arm.size), ("steps", arm.steps)):
            if isinstance(given, dict):
                if arm.kind != "experts":
                    problem = f"must be one value for an arm of kind {arm.kind}"
                    raise InputError(f"{where}.{key}", given, problem, "Write one value")
                for lane in given:
                    _require_one_of(f"{where}.{key}", lane, lane_names, "a lane")
                for lane in lane_names:
                    if lane not in given:
                        problem = f"has no value for lane {lane}"
                        raise InputError(f"{where}.{key}", given, problem, f"Add {lane}")
        for size in arm.size.values() if isinstance(arm.size, dict) else (arm.size,):
            _require_one_of(f"{where}.size", size, self.sizes, "a size")
        for steps in arm.steps.values() if isinstance(arm.steps, dict) else (arm.steps,):
            fields.integer(steps, f"{where}.steps", 1)
        for child, parent in arm.begins.items():
            _require_one_of(f"{where}.begins", child, self.inside, "a domain to train on")
            _require_one_of(f"{where}.begins", parent, (*self.inside, SEED), "a domain, or seed")
            if parent != SEED and lanes == MEASURED:
                problem = f"cannot start from {parent}: measured lanes have no order yet"
                remedy = f"List the domains of each lane, or write {SEED}"
                raise InputError(f"{where}.begins", child, problem, remedy)


_KEYS_OF_KIND = {
    "experts": ("kind", "size", "steps", "by_difficulty", "lanes", "begins"),
    DENSE: ("kind", "size", "steps"),
    SCRATCH: ("kind", "size", "steps"),
    AVERAGED: ("kind", "of"),
}
_NO_ARM = ArmConfig()


def load_experts(path: Path, overrides: Sequence[str] = ()) -> ExpertsConfig:
    """Read the file of an ensemble of experts, and apply overrides of the form ``key.sub=value``.

    Raises:
        InputError: for unknown keys, wrong types and values out of range.
    """
    return load_as(ExpertsConfig, path, "CONFIG", overrides)


def _require_one_of(where: str, name: Any, known: Any, what: str) -> None:
    if name not in known:
        raise InputError(
            where, name, f"is not {what}", f"Write one of {', '.join(map(str, known))}"
        )


def _require_own_keys(name: str, tree: Mapping[str, Any]) -> None:
    """Reject keys that the ensemble sets itself, and those in which runs may not differ."""
    for key, why in RUN_KEYS.items():
        if key in tree:
            raise InputError(f"{name}.{key}", tree[key], why, "Remove it")
    data, model = (
        mapping(tree.get(section, {}), f"{name}.{section}", tree.get(section))
        for section in ("data", "model")
    )
    for key in DATA_KEYS:
        if key in data:
            problem = "domains set the source of the text"
            raise InputError(f"{name}.data.{key}", data[key], problem, "Remove it")
    for section, key, problem, remedy in UNSUITABLE_KEYS:
        content = tree.get(section)
        if isinstance(content, dict) and content.get(key) is not None:
            raise InputError(f"{name}.{section}.{key}", content[key], problem, remedy)
    if name == "run":
        return
    for key in data:
        if key not in OWN_DATA_KEYS:
            problem = "must be the same for all runs, which are scored on the same text"
            raise InputError(f"{name}.data.{key}", data[key], problem, "Set it in run.data")
    for key in model:
        if key in (*SHAPES, "preset"):
            problem = "must be set in sizes: experts have the shapes of their seed"
            raise InputError(f"{name}.model.{key}", model[key], problem, "Move it to sizes")
