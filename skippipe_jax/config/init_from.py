"""`init_from`: where the first weights of a run come from, and what comes with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax.config.model import ModelConfig
from skippipe_jax.config.tokenizer import TOKENIZER_FOLDER

HUGGING_FACE, RUN = "hf", "run"

SHAPES = (
    "vocabulary_size",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "ffn_width",
    "context",
    "rope_theta",
    "rope_scaling",
    "tied_head",
    "norm_epsilon",
)
"""The keys of the section `model` that weights decide."""


@dataclass(frozen=True)
class Origin:
    """Where first weights come from.

    Attributes:
        kind: `hf` or `run`.
        folder: of a Hugging Face model, or of a run.
        step: of the run's checkpoint. None: of the newest that is whole.
    """

    kind: str
    folder: Path
    step: int | None = None

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer lies that comes with the weights, if one does."""
        return self.folder / TOKENIZER_FOLDER if self.kind == RUN else self.folder


def origin_of(init_from: str) -> Origin:
    """Return what `init_from: hf:DIR`, `run:DIR` or `run:DIR@STEP` names.

    Raises:
        InputError: if it has another form.
    """
    kind, _, path = init_from.partition(":")
    step = None
    if kind == RUN:
        folder, at, last = path.rpartition("@")
        if at and "/" not in last:  # Else it belongs to the name of a folder.
            if not re.fullmatch("[0-9]{1,15}", last):
                remedy = "Write run:DIR@200, or run:DIR for the newest checkpoint"
                raise InputError("init_from", init_from, f"{last!r} is no step", remedy)
            path, step = folder, int(last)
    if kind not in (HUGGING_FACE, RUN) or not path:
        raise InputError(
            "init_from",
            init_from,
            "names no weights",
            "Write hf:DIR, where DIR holds config.json and safetensors files; or run:DIR, the "
            "folder of a run, or run:DIR@STEP",
        )
    return Origin(kind, Path(path).expanduser(), step)


def require_shapes(file: Path, of_weights: ModelConfig, given: Mapping[str, Any]) -> None:
    """Refuse keys of `model` that differ from those of the weights; the context may be shorter.

    `file` is the one that tells the shapes of the weights.
    """
    for key in SHAPES:
        theirs = getattr(of_weights, key)
        own = given.get(key, theirs)
        if own != theirs and not (key == "context" and own < theirs):
            raise InputError(
                f"model.{key}",
                own,
                f"{file} says {theirs!r}",
                "Leave it out: with init_from, shapes come from there",
            )
