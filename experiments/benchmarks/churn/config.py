"""The run that `churn` strikes: how it is configured, and the same one undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.benchmarks.churn import records
from experiments.benchmarks.harness import launching
from experiments.benchmarks.harness.launching import QUICKSTART, alike_nodes, set_words
from skippipe_jax.config import load_config
from skippipe_jax.config.parsing import to_yaml
from skippipe_jax.storage.run_dir import METRICS

STAGES = (2, 2, 2)
STAGE_LAYERS = (2, 1, 1)
MICROBATCHES_PER_DATA_NODE = 2
PER_STEP = STAGES[0] * MICROBATCHES_PER_DATA_NODE
ENDLESS = 1_000_000
SLOW = ("model.width=64", "model.ffn_width=96", "checkpoint.every=20")
"""So the network takes most of an iteration where links are slow."""
OUTER = (
    "averaging.mode=outer",
    "averaging.every=4",
    "averaging.fragments=1",
    "averaging.delay=2",
    "optimizer.learning_rate=1.0e-3",
)
"""So it goes round often, and is under way half of the time; and it is seen to learn."""
LOWER = 12
"""By so many steps of `nice` gives way to a run what is done beside it in one process."""


def quickstart_in(folder: Path, stages: Sequence[int], path_length: int) -> dict[str, Any]:
    """Configure the quickstart on nodes that are all alike, on one machine."""
    config = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    per_node = MICROBATCHES_PER_DATA_NODE
    case = alike_nodes(stages, path_length=path_length, microbatches_per_data_node=per_node)
    plan = {"method": "balanced", "case": case}
    return config | {"compilation_cache": str(folder / "compiled"), "plan": plan}


def write_config(
    folder: Path, hosts: int, heartbeat_timeout_s: float, overrides: Sequence[str]
) -> Path:
    """Write the configuration of the run: the quickstart, but for its plan and how it learns."""
    config = quickstart_in(folder, STAGES, path_length=2)
    config |= {
        "run_dir": str(folder / "run"),
        "model": config["model"] | {"stage_layers": list(STAGE_LAYERS)},
        # So slowly that rounding, which depends on how many replicas there are, stays rounding.
        "optimizer": config["optimizer"]
        | {"learning_rate": 1e-4, "decay_steps": ENDLESS, "final_ratio": 1.0},
        "train": {"steps": ENDLESS},
        "checkpoint": {"every": 5, "keep": 3},
        "cluster": {
            # The two replicas of a stage are always on two hosts.
            "host_of_node": [node % hosts for node in range(sum(STAGES))],
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "insecure": True,  # They have the network of their namespaces for themselves.
        },
        # Who joins comes in the place of a host that is lost, and never beside the others.
        "join": {"places": 0},
        # A generation for each fault, by the plan that there is at once.
        "replan": {"budget_s": 0},
    }
    path = launching.write_config(folder / "config.yaml", config)
    path.write_text(to_yaml(load_config(path, overrides)), encoding="utf-8")
    return path


class Undisturbed:
    """The same run in one process, to which nothing happens."""

    def __init__(self, folder: Path, config: Path, steps: int, beside: bool = False):
        """Start it, for so many steps; `beside` others with a lower priority."""
        self.steps = steps
        self.run_dir = folder / "undisturbed"
        words = ["-m", "skippipe_jax.train", "--config", str(config)]
        words += set_words(
            f"run_dir={self.run_dir}",
            f"train.steps={steps}",
            f"checkpoint.every={steps}",
            "cluster.host_of_node=null",
        )
        output = folder / "undisturbed.txt"
        self._process = launching.started(words, output, lower=LOWER if beside else 0)

    def metrics(self) -> list[dict[str, Any]]:
        """Wait until it has made all its steps; returns its metrics.

        Raises:
            RuntimeError: if it ends otherwise than well.
        """
        code = self._process.wait()
        if code != 0:
            raise RuntimeError(f"the undisturbed run exited with code {code}")
        return records.read_lines(self.run_dir / METRICS)

    def kill(self) -> None:
        """End it."""
        launching.kill([self._process])
