"""A trained model goes on with the text of a new domain, along full and along partial paths.

    python -m experiments.paper.recipe_continued             trains what is missing, prints tables
    python -m experiments.paper.recipe_continued --list      says which runs are there, trains none

Whoever is given a model cannot take a smaller one instead. A model of the study `recipe` is trained
in full on the standard library without two domains, and goes on with each of them for a fifth of
the text, in full or for as long, by the planner's clock, with a third of the stages skipped: to the
end, or by the preset `quality`. What is reported are held-out losses of the full model, on the
domain and on the text of before.

Ctrl-C stops, and the same command goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from experiments.paper import gated_tasks, jobs, study_command
from experiments.paper.gated_tasks import GatedTask, Pretraining
from experiments.paper.gates import GatedRun
from experiments.paper.recipe import (
    CLOCKS,
    FULL,
    OF_OPTIONS,
    PARTIAL,
    QUALITY,
    SEEDS,
    WIDTH,
    NamedTask,
    as_long,
    figures_of,
    grouped,
    results,
    table,
)
from experiments.paper.study_text import DOMAINS, GENERAL, TEST

# Half of that of training from nothing, for all arms; no other has been tried.
LEARNING_RATE = 1e-2
GOES_ON = replace(OF_OPTIONS, bytes_per_parameter=OF_OPTIONS.bytes_per_parameter // 5)
PARTS = {"domain": TEST, "general text": f"general {TEST}"}
"""Texts whose losses are reported, and how results name them."""


def arms() -> dict[str, GatedRun]:
    """All ways to go on, with seed 0."""
    full = GatedRun(
        blocks=GOES_ON.blocks, width=WIDTH, steps=GOES_ON.steps, learning_rate=LEARNING_RATE
    )
    partial = {"skipped": (PARTIAL,), "quality": QUALITY}
    return {FULL: full} | {
        f"{name}, equal time, {clock}": as_long(replace(full, phases=phases), full, clock)
        for clock in CLOCKS
        for name, phases in partial.items()
    }


class Study(study_command.Study):
    """Models that are trained in full, and how each goes on."""

    NAME = FOLDER = "recipe_continued"

    def runs(self) -> Iterator[NamedTask]:
        """Name all runs that go on: domain, arm, seed and task, first seeds first."""
        places = (self.summaries / "runs", self.folder, self.command)
        blocks, steps = OF_OPTIONS.blocks, OF_OPTIONS.steps
        for seed in range(SEEDS):
            run = GatedRun(blocks=blocks, width=WIDTH, steps=steps, seed=seed)
            start = Pretraining(f"pretrained-{seed}", run, *places, text=GENERAL)
            for domain in DOMAINS:
                for arm, own in arms().items():
                    name = f"{domain}-{jobs.slug(arm)}-{seed}"
                    own = replace(own, seed=seed)
                    yield domain, arm, seed, GatedTask(name, own, *places, domain, start)

    def tasks(self) -> list[GatedTask]:
        """Name all runs that go on."""
        return [task for *_, task in self.runs()]

    def train(self) -> None:
        """Train what is missing, and before it the models that it starts from."""
        missing = [task for task in self.tasks() if not task.is_done()]
        starts = {task.start.name: task.start for task in missing if task.start}
        gated_tasks.train([*starts.values(), *missing], self.folder)

    def figures(self) -> dict[str, Any]:
        """Gather losses on the domains and on the general text, before and after."""
        full = GOES_ON.steps * GOES_ON.blocks
        return {
            "domains": {
                domain: {
                    label: figures_of(by_arm, full, FULL, part)
                    | {"before": [own["losses"][f"{part} before"] for own in results(by_arm[FULL])]}
                    for label, part in PARTS.items()
                }
                for domain, by_arm in grouped(self.runs()).items()
            }
        }


def tables(figures: Mapping[str, Any]) -> str:
    """Write a table for each domain and text, with the mean loss before."""
    return "\n".join(
        f"\n{domain}, loss on the {label}, before {sum(own['before']) / len(own['before']):.4f}\n"
        f"{table(own, FULL)}"
        for domain, parts in figures["domains"].items()
        for label, own in parts.items()
    )


if __name__ == "__main__":
    sys.exit(study_command.run(Study, __doc__, tables))
