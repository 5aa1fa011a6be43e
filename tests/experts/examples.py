"""A small ensemble of experts: domains of text, sizes, lanes, arms."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from skippipe_jax.experts.config import load_experts
from skippipe_jax.experts.tasks import Workspace
from tests.commands.examples import CASE

LETTERS = {"prose": "abcd ", "code": "xyz()\n", "tables": "0123\t", "letters": "ABCdef,"}
CONFIG: dict[str, Any] = {
    "folder": "experts",
    "run": {
        "compilation_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "model": {
            "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 16,
        },
        "plan": {"method": "balanced", "case": CASE | {"nodes": 2, "stages": [1, 1]}},
        "data": {"sequence_length": 16, "microbatch_size": 2, "held_out": 0.4},
        "checkpoint": {"every": 2, "keep": 1},
    },
    "domains": [{"name": name, "path": f"text/{name}"} for name in LETTERS],
    "outside": ["letters"],
    "sizes": {"S": {}, "L": {"ffn_width": 32}},
    "seeds": {"steps": 2},
    "lanes": {"easy": ["prose", "code"], "hard": ["tables"]},
    "probe": {"size": "S", "steps": 1},
    "arms": {"equal": {"size": "S", "steps": 4}},
    "evaluation": {"sequences": 3, "prior_sequences": 3, "batch_size": 2},
}  # fmt: skip


def write_text(folder: Path, documents: int = 30) -> None:
    """The text of all domains, in the folder `text`."""
    for number, (name, letters) in enumerate(LETTERS.items()):
        (folder / "text" / name).mkdir(parents=True)
        random = np.random.default_rng(number)
        for document in range(documents):
            text = "".join(random.choice(list(letters), 20 + document))
            (folder / "text" / name / f"{document}").write_text(text)


def tree_with(**sections: Any) -> dict[str, Any]:
    """The configuration, in which sections are others."""
    return copy.deepcopy(CONFIG) | copy.deepcopy(sections)


def write_config(folder: Path, **sections: Any) -> Path:
    """The file of the configuration, in which sections are others."""
    path = folder / "experts.yaml"
    path.write_text(yaml.safe_dump(tree_with(**sections), sort_keys=False))
    return path


def place_in(folder: Path, **sections: Any) -> Workspace:
    """An ensemble that works in a folder."""
    config = load_experts(write_config(folder, **sections))
    return Workspace(config, folder / config.folder)
