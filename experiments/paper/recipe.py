"""A study of whether training along partial paths keeps the quality of training in full.

    python -m experiments.paper.recipe                  trains what is missing, and writes figures
    python -m experiments.paper.recipe --only 12x50     one setting: 12 blocks, 50 bytes a parameter
    python -m experiments.paper.recipe --list           says which runs are there, trains none

An arm is a way to train, and a setting a depth and an amount of text: so many bytes for each
parameter of the full model. Arms of equal compute run as many blocks as `quality`; arms of equal
time are as long as `full` on 20 nodes in 12 regions, by the planner's clock, of plans for exact or
for outer averaging with 8-bit hops; all runs average gradients exactly. Runs are gated (see
`gates`).

A run that is there is not trained again. Ctrl-C stops, and the same command goes on.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper import drawing, gated_tasks, intervals, jobs, plans, study_command
from experiments.paper.drawing import BLACK, BLUE
from experiments.paper.gated_tasks import GatedTask
from experiments.paper.gates import TOKENS, GatedRun, Phase
from experiments.paper.study_text import TEST, VALIDATION
from skippipe_jax.models.llama import parameter_count, stage_shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 5
WIDTH = 16
PARTIAL = Phase(0.0, 4)
QUALITY = (PARTIAL, Phase(0.4, 6, 0.0))
ROBUST = (PARTIAL, Phase(0.4, 3, 1.0, 2))
QUARTER = (PARTIAL, Phase(0.4, 4, 1.0, 4))
"""Phases of the runs that options of `ROBUST` were first compared with."""
FULL, SKIPPED, SMALLER = "full", "skip33", "small67"
# By how the replicas average: the kinds of plans whose seconds count.
CLOCKS = {"exact": "", "outer": "_outer"}
# The controls of `quality`, and which of its runs is compared with each.
CONTROLS = {
    FULL: "quality",
    **{f"{name}, equal compute": "quality" for name in (FULL, "smaller", "grown")},
    **{
        f"{name}, equal time, {clock}": f"quality, equal time, {clock}"
        for clock in CLOCKS
        for name in ("smaller", "grown")
    },
}


@dataclass(frozen=True)
class Setting:
    """A depth of the full model, and an amount of text."""

    blocks: int
    bytes_per_parameter: int

    @property
    def name(self) -> str:
        """Return what the names of its files begin with."""
        return f"{self.blocks}x{self.bytes_per_parameter}"

    @property
    def parameters(self) -> int:
        """Numbers of the full model."""
        model = GatedRun(blocks=self.blocks, width=WIDTH).model
        return sum(map(parameter_count, stage_shapes(model, 1)))

    @property
    def steps(self) -> int:
        """Iterations of the full model."""
        return round(self.bytes_per_parameter * self.parameters / TOKENS)


SETTINGS = tuple(Setting(blocks, amount) for amount in (50, 20) for blocks in (6, 12, 24))
BY_NAME = {setting.name: setting for setting in SETTINGS}
OF_OPTIONS = Setting(12, 50)
"""The setting in which options are compared."""


def seconds(kind: str, clock: str) -> float:
    """Seconds of an iteration of a kind of plan on 20 nodes in 12 regions."""
    return plans.plan_of(kind + CLOCKS[clock]).predicted.iteration_s


def as_long(run: GatedRun, full: GatedRun, clock: str) -> GatedRun:
    """Lengthen a run to as many steps as take the time of `full`."""
    small_share = run.grown_at if run.grown_from else float(run.stages < full.stages)
    skipped = sum(run.skipping(step) > 0 for step in range(run.steps)) / run.steps
    of_full = seconds(FULL, clock)
    mean = (
        small_share * seconds(SMALLER, clock)
        + skipped * seconds(SKIPPED, clock)
        + (1 - small_share - skipped) * of_full
    )
    return replace(run, steps=round(run.steps * of_full / mean))


def arms(setting: Setting) -> dict[str, GatedRun]:
    """All ways to train in a setting, with seed 0."""
    full = GatedRun(blocks=setting.blocks, width=WIDTH, steps=setting.steps)
    quality = replace(full, phases=QUALITY)
    small = replace(full, blocks=2 * setting.blocks // 3, stages=4)
    grown = replace(full, grown_from=2 * setting.blocks // 3)

    def as_much(run: GatedRun) -> GatedRun:
        """As many steps as make up the compute of `quality`."""
        of_one_step = run.compute() * run.blocks / run.steps
        return replace(run, steps=round(quality.compute() * setting.blocks / of_one_step))

    found = {
        "full": full,
        "skipped": replace(full, phases=(PARTIAL,), schedule="cosine", scaled_start=False),
        "quality": quality,
        "robust": replace(full, phases=ROBUST),
        "smaller": small,
        "full, equal compute": as_much(full),
        "smaller, equal compute": as_much(small),
        "grown, equal compute": as_much(grown),
    }
    for clock in CLOCKS:
        found |= {
            f"{name}, equal time, {clock}": as_long(run, full, clock)
            for name, run in (("quality", quality), ("smaller", small), ("grown", grown))
        }
    return found


def options(setting: Setting) -> dict[str, dict[str, GatedRun]]:
    """By option: the runs that differ in it, `without` first."""
    full = GatedRun(blocks=setting.blocks, width=WIDTH, steps=setting.steps)
    quality, quarter = replace(full, phases=QUALITY), replace(full, phases=QUARTER)
    always = replace(full, phases=(PARTIAL,))
    return {
        "schedule": {
            "cosine, skipping to the end": replace(always, schedule="cosine"),
            "constant, then falling, skipping to the end": always,
            "constant, then falling, full in the last 60%": quality,
        },
        "last part in full": {
            f"{share:.0%}": replace(full, phases=(PARTIAL, Phase(1 - share, 6, 0.0)))
            for share in (0.3, 0.4, 0.5, 0.6)
        },
        "start of residual branches": {
            "full, plain": replace(full, scaled_start=False),
            "full, scaled": full,
            "quality, plain": replace(quality, scaled_start=False),
            "quality, scaled": quality,
        },
        "where a quarter goes on skipping": {
            "every fourth iteration": quarter,
            "a quarter of the microbatches": replace(full, phases=(PARTIAL, Phase(0.4, 4, 0.25))),
        },
        "partial iterations in the last 60%": {
            f"{visited} of 6 stages, every {number} iteration": replace(
                full, phases=(PARTIAL, Phase(0.4, visited, 1.0, every))
            )
            for visited in (4, 3)
            for number, every in (("fourth", 4), ("second", 2))
        },
        "full microbatches among others": {
            "none until 40%": quality,
            "30%, then all for the last 30%": replace(
                full, phases=(Phase(0.0, 4, 0.75), Phase(0.7, 6, 0.0))
            ),
        },
        "which stages are skipped": {
            "evenly": quality,
            "late ones more": replace(quality, depth="late"),
            "early ones more": replace(quality, depth="early"),
        },
        "scaling in training": {
            "none": quality,
            "inverse": replace(quality, skip_scaling="inverse"),
        },
        "distillation": {
            "none": quarter,
            "half of the loss": replace(quarter, distillation=0.5),
        },
        "optimizer": {
            "full, adamw": full,
            "full, muon": replace(full, optimizer="muon"),
            "quality, adamw": quality,
            "quality, muon": replace(quality, optimizer="muon"),
        },
    }


NamedTask = tuple[str, str, int, GatedTask]
"""A task: what it is of, its arm, its seed, and the task itself."""


class Study(study_command.Study):
    """The runs of all settings, trained once each."""

    NAME = FOLDER = "recipe"

    def __init__(self, folder: Path):
        """`folder` is worked in; results are small and committed."""
        super().__init__(folder)
        self._names: dict[GatedRun, str] = {}

    def task(self, setting: Setting, arm: str, run: GatedRun, seed: int) -> GatedTask:
        """Name a run of an arm with a seed; equal runs have one name."""
        run = replace(run, seed=seed)
        name = self._names.setdefault(run, f"{setting.name}-{jobs.slug(arm)}-{seed}")
        return GatedTask(name, run, self.summaries / "runs", self.folder, self.command)

    def arms(self, setting: Setting) -> Iterator[NamedTask]:
        """Name all arms of a setting, first seeds first."""
        for seed in range(SEEDS):
            for arm, run in arms(setting).items():
                yield setting.name, arm, seed, self.task(setting, arm, run, seed)

    def choose(self, arguments: argparse.Namespace) -> None:
        """Take over what is trained."""
        self.chosen = [BY_NAME[name] for name in arguments.only or BY_NAME]
        self.has_options = arguments.options

    def tasks(self) -> list[GatedTask]:
        """Name all runs that are trained."""
        tasks = [task for setting in self.chosen for *_, task in self.arms(setting)]
        if self.has_options:
            tasks += [task for *_, task in self.options()]
        return [*{task.name: task for task in tasks}.values()]

    def train(self) -> None:
        """Train what is missing."""
        gated_tasks.train(self.tasks(), self.folder)

    def figures(self) -> dict[str, Any]:
        """Gather all runs that are there."""
        by_setting, of_options = {}, {}
        for name, by_arm in grouped(itertools.chain(*map(self.arms, SETTINGS))).items():
            setting = BY_NAME[name]
            found = figures_of(by_arm, setting.steps * setting.blocks, FULL, TEST)
            if found["arms"].keys() == by_arm.keys():  # None says little without its controls.
                by_setting[name] = found | {"quality_minus": quality_minus(found)}
        for option, by_arm in grouped(self.options()).items():
            first = next(iter(by_arm))
            found = figures_of(by_arm, OF_OPTIONS.steps * OF_OPTIONS.blocks, first, VALIDATION)
            if len(found["arms"]) > 1:
                of_options[option] = found
        return {"settings": by_setting, "options": of_options}

    def options(self) -> Iterator[NamedTask]:
        """Name all runs of the options, first seeds first."""
        for _ in self.arms(OF_OPTIONS):  # Which have the names of runs that are options too.
            pass
        for seed in range(SEEDS):
            for option, runs in options(OF_OPTIONS).items():
                for value, run in runs.items():
                    task = self.task(OF_OPTIONS, f"{option}-{value}", run, seed)
                    yield option, value, seed, task


ByArm = Mapping[str, Mapping[int, GatedTask]]
"""The tasks of arms, by seed."""


def grouped(named: Iterable[NamedTask]) -> dict[str, dict[str, dict[int, GatedTask]]]:
    """Group tasks by what they are of, by arm and by seed."""
    found: dict[str, dict[str, dict[int, GatedTask]]] = {}
    for of, arm, seed, task in named:
        found.setdefault(of, {}).setdefault(arm, {})[seed] = task
    return found


def results(tasks: Mapping[int, GatedTask]) -> list[dict[str, Any]]:
    """Read the results of the first seeds, up to one that is missing."""
    found = (tasks[seed].result() for seed in sorted(tasks))
    return [result for result in itertools.takewhile(bool, found) if result is not None]


def figures_of(by_arm: ByArm, full: float, control: str, part: str) -> dict[str, Any]:
    """Gather losses by arm, and the differences of all arms from a control, paired by seed.

    `full` is the compute of the full model, of which an arm's is given as a share.
    """
    found = {arm: own for arm, tasks in by_arm.items() if (own := results(tasks))}
    losses = {arm: [own["losses"][part] for own in seeds] for arm, seeds in found.items()}
    return {
        "arms": {
            arm: {
                "steps": seeds[0]["run"]["steps"],
                "compute": round(seeds[0]["compute"] * seeds[0]["run"]["blocks"] / full, 3),
                "loss": losses[arm],
                **_with_half(seeds, part),
                "minutes": [own["minutes"] for own in seeds],
            }
            for arm, seeds in found.items()
        },
        "minus": {control: intervals.minus(losses, losses[control])} if control in losses else {},
    }


def _with_half(seeds: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Gather the losses with half of the stages, and by which factor perplexity is more."""
    half = seeds[0]["run"]["stages"] // 2
    losses = [own["losses"][f"{part} of {half} stages"] for own in seeds]
    more = [loss - own["losses"][part] for loss, own in zip(losses, seeds, strict=True)]
    return {
        "loss_of_half": losses,
        "perplexity_of_half": intervals.figures({"": [math.exp(one) for one in more]})[""],
    }


def table(figures: Mapping[str, Any], control: str) -> str:
    """Write the arms as a table in Markdown, with their differences from a control."""
    minus = figures["minus"].get(control, {})
    lines = [
        f"| arm | compute | loss | minus {control} | perplexity with half of the stages |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, own in figures["arms"].items():
        mean = sum(own["loss"]) / len(own["loss"])
        difference = "" if arm not in minus or arm == control else _with_half_width(minus[arm])
        half = own["perplexity_of_half"]["mean"] - 1
        lines.append(
            f"| {arm} | {own['compute']:.2f} | {mean:.4f} ({len(own['loss'])}) | {difference} | "
            f"{half:+.0%} |"
        )
    return "\n".join(lines)


def _with_half_width(found: Mapping[str, Any], digits: int = 4) -> str:
    mean = f"{found['mean']:+.{digits}f}"
    if found["low"] is None:
        return mean
    return f"{mean} ± {(found['high'] - found['low']) / 2:.{digits}f}"


def quality_minus(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Gather by how much `quality` is worse than each of its controls, paired by seed."""
    losses = {arm: own["loss"] for arm, own in figures["arms"].items()}
    return intervals.figures(
        {
            control: intervals.paired(losses[quality], losses[control])
            for control, quality in CONTROLS.items()
        }
    )


def tables_of_settings(by_setting: Mapping[str, Any]) -> str:
    """Write three tables in Markdown, with a column for each setting.

    How arms differ from full training, how `quality` differs from its controls, and by how much
    perplexity is more with half of the stages.
    """
    first = next(iter(by_setting.values()))

    def row(label: str, cells: Sequence[str]) -> str:
        return f"| {label} | {' | '.join(cells)} |"

    def rows(title: str, labels: Mapping[str, Any], cell: Callable[[Any, str], str]) -> list[str]:
        columns = [name.replace("x", " blocks, ") for name in by_setting]
        head = [row(title, columns), row("---", ["---"] * len(columns))]
        body = [row(name, [cell(own, name) for own in by_setting.values()]) for name in labels]
        return [*head, *body, ""]

    def minus_full(own: Mapping[str, Any], arm: str) -> str:
        if arm != FULL:
            return _with_half_width(own["minus"][FULL][arm], 3)
        losses = own["arms"][arm]["loss"]
        return f"{sum(losses) / len(losses):.3f} ({len(losses)})"

    def of_half(own: Mapping[str, Any], arm: str) -> str:
        return f"{own['arms'][arm]['perplexity_of_half']['mean'] - 1:+.0%}"

    minus = "quality_minus"
    tables = (
        rows("minus full; full: loss (seeds)", first["arms"], minus_full),
        rows("quality minus", first[minus], lambda own, arm: _with_half_width(own[minus][arm], 3)),
        rows("half of the stages", first["arms"], of_half),
    )
    return "\n".join(line for own in tables for line in own)


def tables(figures: Mapping[str, Any]) -> str:
    """Write the tables of all settings, and one for each option."""
    told = [tables_of_settings(figures["settings"])] if figures["settings"] else []
    for option, own in figures["options"].items():
        first = next(iter(own["minus"]))
        told.append(f"\n{option}\n{table(own, first)}")
    return "\n".join(told)


def draw(figures: Mapping[str, Any]) -> Figure:
    """Draw how arms differ from full training, a panel for each setting."""
    by_setting = figures["settings"]
    amounts = dict.fromkeys(setting.bytes_per_parameter for setting in SETTINGS)
    figure, rows = drawing.panels(len(SETTINGS) // len(amounts), *[3.6] * len(amounts))
    for setting, axes in zip(SETTINGS, itertools.chain(*rows), strict=True):
        if setting.name not in by_setting:
            axes.set_axis_off()
            continue
        minus = by_setting[setting.name]["minus"][FULL]
        shown = [arm for arm in minus if arm not in (FULL, "skipped")]
        for row, arm in enumerate(shown):
            color = BLUE if arm.startswith(("quality", "robust")) else BLACK
            drawing.interval(axes, row, minus[arm], color)
        axes.axvline(0.0, color=BLACK, linewidth=0.8, linestyle=":")
        is_first = axes is axes.figure.axes[0]
        axes.set_yticks(range(len(shown)), shown if is_first else [""] * len(shown))
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_title(f"{setting.blocks} blocks, {setting.bytes_per_parameter} bytes a parameter")
        axes.set_xlabel("loss minus full, nats per byte")
    return figure


def main() -> int:
    """Parse the command line, train and write; returns the exit code."""
    arguments = {
        "--only": {"nargs": "+", "choices": BY_NAME, "help": "settings (all)"},
        "--options": {"action": "store_true", "help": "train the options of the first setting too"},
    }
    return study_command.run(Study, __doc__, tables, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
