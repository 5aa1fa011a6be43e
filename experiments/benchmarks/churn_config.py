"""The run that `churn` strikes: how it is configured, and the same one undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.benchmarks import churn_process, churn_records
from skippipe_jax.config import load_config
from skippipe_jax.storage.run_dir import METRICS

QUICKSTART = Path("experiments/quickstart.yaml")
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


def case_here(stages: Sequence[int], path_length: int) -> dict[str, Any]:
    """A case of nodes that are all alike, on one machine."""
    return {
        "nodes": sum(stages),
        "locations": ["here"],
        "links": [],
        "activation_bytes": "auto",
        "stage_bytes": "auto",
        "forward_s": 0.1,
        "stages": list(stages),
        "path_length": path_length,
        "microbatches_per_data_node": MICROBATCHES_PER_DATA_NODE,
        "memory": 3,
    }


def write_config(
    folder: Path, hosts: int, heartbeat_timeout_s: float, overrides: Sequence[str]
) -> Path:
    """The configuration of the run: the quickstart, but for its plan and how fast it learns."""
    config = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    nodes = sum(STAGES)
    config |= {
        "run_dir": str(folder / "run"),
        "compilation_cache": str(folder / "compiled"),
        "model": config["model"] | {"stage_layers": list(STAGE_LAYERS)},
        "plan": {
            "method": "balanced",
            "case": case_here(STAGES, path_length=2),
        },
        # So slowly that rounding, which depends on how many replicas there are, stays rounding.
        "optimizer": config["optimizer"]
        | {"learning_rate": 1e-4, "decay_steps": ENDLESS, "final_ratio": 1.0},
        "train": {"steps": ENDLESS},
        "checkpoint": {"every": 5, "keep": 3},
        "cluster": {
            # The two replicas of a stage are always on two hosts.
            "host_of_node": [node % hosts for node in range(nodes)],
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "insecure": True,  # They have the network of their namespaces for themselves.
        },
        # Who joins comes in the place of a host that is lost, and never beside the others.
        "join": {"places": 0},
        # A generation for each fault, by the plan that there is at once.
        "replan": {"budget_s": 0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    parsed = load_config(path, overrides)
    del parsed  # What is wrong with the overrides is said now.
    for override in overrides:
        key, _, value = override.partition("=")
        part = config
        *sections, last = key.split(".")
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


class Undisturbed:
    """The same run in one process, to which nothing happens."""

    def __init__(self, folder: Path, config: Path, steps: int, beside: bool = False):
        """Start it, for so many steps; `beside` others with a lower priority."""
        self.steps = steps
        self.run_dir = folder / "undisturbed"
        words = ["-m", "skippipe_jax.train", "--config", str(config)]
        words += ["--set", f"run_dir={self.run_dir}", "--set", f"train.steps={steps}"]
        words += ["--set", f"checkpoint.every={steps}", "--set", "cluster.host_of_node=null"]
        lower = LOWER if beside else 0
        output = folder / "undisturbed.txt"
        self._process = churn_process.started(words, output, lower=lower)

    def metrics(self) -> list[dict[str, Any]]:
        """Its metrics, once it has made all its steps.

        Raises:
            RuntimeError: if it ends otherwise than well.
        """
        code = self._process.wait()
        if code != 0:
            raise RuntimeError(f"the undisturbed run exited with code {code}")
        return churn_records.read_lines(self.run_dir / METRICS)

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
