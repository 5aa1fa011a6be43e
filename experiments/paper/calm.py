"""How far chance moves a run: the same run again, with another order of rounding.

    python -m experiments.paper.calm              trains what is missing, and prints the spread

One seed of the control and of the arm with a third skipped is trained again and again, each time
from first weights that differ by 1e-6, which is what rounding comes to. The control is trained with
each set of instructions that XLA may take, too, as if on other processors. Beside that stands the
control as it was before, when the first weights scattered less: what starts with a plateau ends
where chance has it. Repetition 0 is the campaign's own run, with nothing changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.paper import jobs, study_command
from experiments.paper.campaign import Run
from experiments.paper.jobs import Job
from experiments.paper.summary import Summary
from skippipe_jax.config import Config, ModelConfig, parse_config
from skippipe_jax.config.data import TOKENIZER_FOLDER
from skippipe_jax.interop import huggingface
from skippipe_jax.runtime.stage_functions import Parameters, functions_of_run
from skippipe_jax.storage.files import new_directory

CHANGED_BY = 1e-6
SEED = 0
# What `model.initial_deviation` was by default.
FORMER_DEVIATION = 0.02
# Where the operating system says what the processor can do, and what it calls these instructions.
PROCESSOR = Path("/proc/cpuinfo")
INSTRUCTIONS = {"SSE4_2": "sse4_2", "AVX2": "avx2", "AVX512": "avx512f"}


@dataclass(frozen=True)
class Repeated:
    """An arm whose run is repeated so many times, with the recipe of today or the former one."""

    arm: str
    times: int
    former: bool = False

    @property
    def name(self) -> str:
        """How it is called among the figures."""
        return f"{self.arm}, initial deviation {FORMER_DEVIATION}" if self.former else self.arm


REPEATED = (Repeated("full", 5), Repeated("skip33", 5), Repeated("full", 3, former=True))
ON_INSTRUCTIONS = REPEATED[0]


class Study(study_command.CampaignStudy):
    """The runs that are repeated, and what they have come to."""

    NAME = "calm"

    def __init__(self, folder: Path, instructions: Sequence[str] | None = None):
        """`instructions` are by default those that the processor has."""
        super().__init__(folder)
        self.instructions = available() if instructions is None else instructions

    def repetitions(self, repeated: Repeated) -> list[Job]:
        """The same run again and again."""
        return [self._job(repeated, draw) for draw in range(repeated.times)]

    def on_instructions(self) -> dict[str, Job]:
        """The control with nothing changed, with the instructions that XLA may take."""
        return {name: self._job(ON_INSTRUCTIONS, 0, name) for name in self.instructions}

    def tasks(self) -> list[Job]:
        """Name all runs: first repetitions first."""
        each = [self.repetitions(repeated) for repeated in REPEATED]
        ordered = [job for one_each in zip_longest(*each) for job in one_each if job is not None]
        return [*ordered, *self.on_instructions().values()]

    def train(self) -> None:
        """Train what is missing."""
        for repeated in REPEATED:
            for draw, job in enumerate(self.repetitions(repeated)):
                if draw and job.summary() is None:
                    _write_first_weights(job, draw)
        super().train()

    def figures(self) -> dict[str, Any]:
        """What is written, of runs that have been trained."""
        arms = [own.arm for own in REPEATED if not own.former]
        figures = figures_of(
            {own.name: [job.trained() for job in self.repetitions(own)] for own in REPEATED},
            {name: job.trained() for name, job in self.on_instructions().items()},
            {arm: self.campaign.trained(Run(arm, SEED)) for arm in arms},
        )
        return figures | {"digest": self.digest()}

    def digest(self) -> str:
        """Of all that the study comes from, but for the instructions, which machines differ in."""
        return jobs.json_digest([job.digest for own in REPEATED for job in self.repetitions(own)])

    def _job(self, repeated: Repeated, draw: int, instructions: str = "") -> Job:
        run = Run(repeated.arm, SEED)
        config = self.campaign.config(run)
        if repeated.former:
            config = config | {"model": config["model"] | {"initial_deviation": FORMER_DEVIATION}}
        plan = jobs.plan_of(config).to_json()
        changed = {"draw": draw, "changed_by": CHANGED_BY} if draw else {}
        whole = [config, plan] + [part for part in (changed, instructions) if part]
        former = "former-" if repeated.former else ""
        name = "-".join([former + run.name, f"changed_{draw}", *filter(None, [instructions])])
        if draw:
            weights = self.folder / "first_weights" / f"{name}-{jobs.json_digest(whole)}"
            config = config | {"init_from": f"hf:{weights}"}
        return Job(
            name=name,
            digest=jobs.json_digest(whole),
            config=config,
            results=self.folder / "results",
            folder=self.folder,
            command=self.command,
            flags=f"--xla_cpu_max_isa={instructions}" if instructions else "",
        )


def _write_first_weights(job: Job, draw: int) -> None:
    """Write the weights from which a job begins, unless they are there."""
    config = dict(job.config)
    target = Path(config.pop("init_from").removeprefix("hf:"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        parsed, stages = parse_config(config), len(jobs.plan_of(config).stages)
        weights = drawn_weights(parsed, stages)
        write_weights(parsed.model, stages, weights, CHANGED_BY, draw, target)


def drawn_weights(config: Config, stages: int) -> Callable[[int], Parameters]:
    """The first weights of a stage, by its number, as a run with so many stages draws them."""
    layers = config.model.stage_partition(stages)
    # By the run's own program: compiled otherwise, some would be rounded otherwise.
    functions = functions_of_run(config, stages)
    key = jax.random.key(config.seed)
    return lambda stage: functions[stage].initialize(key, layers.blocks(stage).start)


def write_weights(
    model: ModelConfig,
    stages: int,
    weights: Callable[[int], Parameters],
    changed_by: float,
    draw: int,
    target: Path,
) -> None:
    """Write the weights of all stages, changed as `draw` says, as a model to begin from.

    Each is multiplied by one plus so much times a number from the standard normal distribution.

    Raises:
        InputError: if `target` is not new.
    """

    def changed(stage: int) -> Parameters:
        random = np.random.default_rng([draw, stage])

        def change(leaf: jax.Array) -> np.ndarray:
            factors = 1 + changed_by * random.standard_normal(leaf.shape)
            return (np.asarray(leaf) * factors).astype(leaf.dtype)

        return jax.tree.map(change, weights(stage))

    with new_directory(target, "--output") as folder:
        huggingface.write_weights(folder, model, stages, changed, model.parameter_dtype)
        # The runs train on bytes, so there is no such folder, which says so.
        companions = folder / TOKENIZER_FOLDER
        described = huggingface.config_json(model, model.parameter_dtype, companions)
        (folder / huggingface.CONFIG).write_text(json.dumps(described), encoding="utf-8")


def available(processor: Path = PROCESSOR) -> list[str]:
    """Which of `INSTRUCTIONS` the processor has, as far as the operating system says."""
    lines = processor.read_text().splitlines() if processor.exists() else []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return [name for name, flag in INSTRUCTIONS.items() if flag in flags]


def figures_of(
    repeated: Mapping[str, Sequence[Summary]],
    on_instructions: Mapping[str, Summary],
    of_campaign: Mapping[str, Summary],
) -> dict[str, Any]:
    """What is written of repetitions, of runs by their instructions, and of the campaign's runs."""
    return {
        "changed_by": CHANGED_BY,
        "seed": SEED,
        "repetitions": {
            name: {"loss": (losses := [own.loss for own in found]), **_spread(losses)}
            for name, found in repeated.items()
        },
        "instructions": {
            "loss": {name: found.loss for name, found in on_instructions.items()},
            **_spread([found.loss for found in on_instructions.values()]),
        },
        "equals_the_campaign": {
            arm: own.loss == repeated[arm][0].loss and own.curve == repeated[arm][0].curve
            for arm, own in of_campaign.items()
        },
    }


def _spread(losses: Sequence[float]) -> dict[str, float | None]:
    """How far losses lie apart; nothing is said of fewer than two."""
    if len(losses) < 2:
        return {"greatest_minus_least": None, "deviation": None}
    return {
        "greatest_minus_least": round(max(losses) - min(losses), 5),
        "deviation": round(float(np.std(losses, ddof=1)), 5),
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each run that was repeated, and what else was found."""
    lines = [f"first weights changed by {figures['changed_by']:g}, held-out losses in nats:"]
    lines += [_line(name, own["loss"], own) for name, own in figures["repetitions"].items()]
    instructions = figures["instructions"]
    if instructions["loss"]:
        names = ", ".join(instructions["loss"])
        lines += [
            f"{ON_INSTRUCTIONS.name} with instructions {names}:",
            _line(ON_INSTRUCTIONS.name, list(instructions["loss"].values()), instructions),
        ]
    for arm, equal in figures["equals_the_campaign"].items():
        lines.append(f"{arm} unchanged is{'' if equal else ' not'} the campaign's run")
    return "\n".join(lines)


def _line(name: str, losses: Sequence[float], spread: Mapping[str, float | None]) -> str:
    line = f"{name:30s} {' '.join(f'{loss:.4f}' for loss in losses)}"
    if spread["deviation"] is None:
        return line
    return (
        f"{line}: {spread['greatest_minus_least']:.4f} from least to greatest, "
        f"deviation {spread['deviation']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(study_command.run(Study, __doc__, table))
