"""Holds gates against the trainer: full, skipped and `quality`, by gates and along planned paths.

    python -m experiments.paper.recipe_paths        ten minutes of one core

The trainer's runs read the same text, as many bytes in as many iterations, by the same optimizer,
and are evaluated on the same windows; only the order of the text and the paths are others. One seed
of each is compared with three of gates.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.harness import reporting
from experiments.paper import gated_tasks, jobs, study_text
from experiments.paper.gated_tasks import GatedTask
from experiments.paper.gates import AT_ONCE, LENGTH, SEQUENCES, GatedRun, losses, optimizer_config
from experiments.paper.recipe import FULL, Setting, arms
from skippipe_jax.config import to_tree
from skippipe_jax.inference.model_source import read_run

NAME = "recipe_paths"
COMMAND = "python -m experiments.paper.recipe_paths"
RESULT = Path(__file__).parent / "results" / f"{NAME}.json"
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
    model, _, _ = read_run(folder)

    def evaluate(windows: np.ndarray, stages: Sequence[int] | None = None) -> float:
        parts = np.split(windows, len(windows) // AT_ONCE)
        return statistics.fmean(model.loss(part, stages) for part in parts)

    return losses(evaluate, model.stages, texts)


def main() -> int:
    """Parse the command line, train and write; returns the exit code."""
    parser = reporting.documented_parser(COMMAND, __doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs", NAME), help="working folder")
    folder = parser.parse_args().folder.resolve()
    return jobs.stoppable(lambda: _run(folder))


def _run(folder: Path) -> int:
    texts, results = study_text.read(folder / "text"), folder / "results"
    gated = {
        arm: [
            GatedTask(f"{arm}-{seed}", replace(gated_run(arm), seed=seed), results, folder, COMMAND)
            for seed in range(SEEDS)
        ]
        for arm in ARMS
    }
    gated_tasks.train([task for tasks in gated.values() for task in tasks], folder)
    of_paths = {
        arm: jobs.job_of(f"paths-{arm}", config_of(arm, folder / "text"), results, COMMAND, True)
        for arm in ARMS
    }
    jobs.train(list(of_paths.values()), folder)
    found: dict[str, Any] = {}
    for arm, job in of_paths.items():
        paths = losses_of_run(jobs.AtWork(job, folder).run_dir, texts)
        by_gates = [result["losses"] for task in gated[arm] if (result := task.result())]
        found[arm] = {
            part: {"paths": round(paths[part], 5), "gates": [own[part] for own in by_gates]}
            for part in PARTS
        }
        for part, own in found[arm].items():
            mean, deviation = statistics.fmean(own["gates"]), statistics.stdev(own["gates"])
            print(
                f"{arm:8s} {part:20s} paths {own['paths']:.4f}, gates {mean:.4f}, "
                f"deviation of seeds {deviation:.4f}"
            )
    figures = {"steps": SETTING.steps, "arms": found}
    RESULT.write_text(json.dumps(reporting.origin(COMMAND) | figures, indent=1) + "\n", "utf-8")
    print(RESULT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
