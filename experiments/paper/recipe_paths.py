"""Holds gates against the trainer: full, skipped and `quality`, by gates and along planned paths.

    python -m experiments.paper.recipe_paths        ten minutes of one core

The trainer's runs read the same text, as many bytes in as many iterations, by the same optimizer,
and are evaluated on the same windows; only the order of the text and the paths are others. One seed
of each is compared with three of gates.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper import gated_tasks, jobs, study_command, study_text
from experiments.paper.gated_tasks import GatedTask
from experiments.paper.gates import AT_ONCE, LENGTH, SEQUENCES, GatedRun, losses, optimizer_config
from experiments.paper.jobs import Job
from experiments.paper.recipe import FULL, Setting, arms
from skippipe_jax.config import to_tree
from skippipe_jax.inference.model_source import load_model

SETTING = Setting(6, 20)
SEEDS = 3
ARMS = (FULL, "skipped", "quality")
PARTS = (study_text.TEST, f"{study_text.TEST} of 3 stages")


def gated_run(arm: str) -> GatedRun:
    """An arm of the study of recipes, with first weights as the trainer draws them."""
    return replace(arms(SETTING)[arm], scaled_start=False)


def config_of(arm: str, text: Path) -> dict[str, Any]:
    """Describe to the trainer what `gated_run` is, but for the folder of the run."""
    run = gated_run(arm)
    kind, method = ("full", "full-joint") if arm == FULL else ("skip33", "joint")
    file = f"experiments/paper/plans/{kind}_few.json"
    return {
        "model": to_tree(run.model),
        "plan": {"file": file, "method": method, "budget_s": 5},
        "recipe": {"preset": arm} if run.skipping(0) and not run.skipping(run.steps - 1) else {},
        "data": {
            "source": "text",
            "path": str(text / f"{study_text.TRAINING}.txt"),
            "sequence_length": LENGTH,
            "microbatch_size": SEQUENCES,
            "held_out": 0.001,
        },
        "optimizer": to_tree(optimizer_config(run)),
        "train": {"steps": run.steps},
        "checkpoint": {"every": 100, "keep": 1},
        "network": {"deadline_s": 3600},
    }


def losses_of_run(folder: Path, texts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Evaluate what the trainer has trained as gated runs are evaluated."""
    model = load_model(folder)

    def evaluate(windows: np.ndarray, stages: Sequence[int] | None = None) -> float:
        parts = np.split(windows, len(windows) // AT_ONCE)
        return statistics.fmean(model.loss(part, stages) for part in parts)

    return losses(evaluate, model.stages, texts)


class Study(study_command.Study):
    """Runs of the trainer, and gated ones beside each."""

    NAME = FOLDER = "recipe_paths"

    def gated(self, arm: str) -> list[GatedTask]:
        """Name the gated runs of an arm."""
        run, where = gated_run(arm), (self.folder / "results", self.folder, self.command)
        return [GatedTask(f"{arm}-{n}", replace(run, seed=n), *where) for n in range(SEEDS)]

    def along_paths(self, arm: str) -> Job:
        """Describe the trainer's run of an arm."""
        config, where = config_of(arm, self.folder / "text"), (self.folder / "results", self.folder)
        return jobs.job_of(f"paths-{arm}", config, *where, self.command, quick=True)

    def tasks(self) -> list[GatedTask | Job]:
        """Name all runs, gated ones first."""
        gated = [task for arm in ARMS for task in self.gated(arm)]
        return [*gated, *map(self.along_paths, ARMS)]

    def train(self) -> None:
        """Train what is missing."""
        gated_tasks.write_texts([study_text.ALL], self.folder)
        super().train()

    def figures(self) -> dict[str, Any]:
        """Gather the losses."""
        texts = study_text.read(self.folder / "text")
        found: dict[str, Any] = {}
        for arm in ARMS:
            paths = losses_of_run(self.along_paths(arm).run_dir, texts)
            by_gates = [result["losses"] for task in self.gated(arm) if (result := task.result())]
            found[arm] = {
                part: {"paths": round(paths[part], 5), "gates": [own[part] for own in by_gates]}
                for part in PARTS
            }
        return {"steps": SETTING.steps, "arms": found}


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each arm and text."""
    lines = []
    for arm, parts in figures["arms"].items():
        for part, own in parts.items():
            mean, deviation = statistics.fmean(own["gates"]), statistics.stdev(own["gates"])
            lines.append(
                f"{arm:8s} {part:20s} paths {own['paths']:.4f}, gates {mean:.4f}, "
                f"deviation of seeds {deviation:.4f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(study_command.run(Study, __doc__, table))
