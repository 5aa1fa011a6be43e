"""The run whose weights another begins with: what is read of it, and what is noted of it.

`parent.json` in the folder of a run that began by `init_from: run:DIR`:

    init_from     as it was said
    folder, step  whose checkpoint it was, and of which step
    checkpoint    digest of its COMMITTED, which has a digest of every other file of it
    config        digest of the config.yaml of that run, as it was then
    parent        what stood in the parent.json of that run; null, if it had none
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, DataConfig, ModelConfig
from skippipe_jax.config.init_from import origin_of, require_shapes
from skippipe_jax.config.tokenizer import TOKENIZER_FOLDER
from skippipe_jax.data.batches import tokenizer_of
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.storage.kept_tokenizer import with_tokenizer_of_run
from skippipe_jax.storage.layout import COMMITTED, Checkpoint, digest, open_checkpoint
from skippipe_jax.storage.newest_whole import every_stage, newest_whole, verified
from skippipe_jax.storage.reader import read_arrays
from skippipe_jax.storage.run_folder import CONFIG, read_parent, saved_config


@dataclass(frozen=True)
class Parent:
    """A checkpoint of a run, whose parameters are read when a stage is.

    Attributes:
        init_from: by which it was named.
        folder: of the run.
        config: of the run, the model in it.
        checkpoint: the one that is read.
    """

    init_from: str
    folder: Path
    config: Config
    checkpoint: Checkpoint

    def require_shapes_of(self, model: ModelConfig) -> None:
        """Refuse a model of other shapes."""
        require_shapes(self.folder / CONFIG, self.config.model, vars(model))

    def read_stage(self, parameters: PyTree, first_layer: int) -> PyTree:
        """A stage's parameters in NumPy arrays, of the shapes and dtypes that `parameters` have.

        Its blocks are those from `first_layer` on, however either run cuts the model.

        Raises:
            InputError: if a file is damaged, or cannot be read any more.
        """
        own = jax.tree.leaves(parameters["blocks"])[0].shape[0]
        rest = self.config.model.layers - first_layer - own
        cut = (first_layer, own, rest) if first_layer else (own, rest)
        dtype = np.dtype(self.config.model.parameter_dtype)
        as_saved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), parameters)
        stage = 1 if first_layer else 0
        read = read_arrays(self.checkpoint, cut, stage, {"parameters": as_saved})["parameters"]
        return jax.tree.map(
            lambda array, leaf: array.astype(leaf.dtype, copy=False), read, parameters
        )

    def has_tokenizer_of(self, data: DataConfig) -> bool:
        """Whether the run was trained on tokens of the same tokenizer as that of the data."""
        names = {tokenizer_of(with_tokenizer_of_run(self.config.data, self.folder))}
        names.add(tokenizer_of(data))
        return len(names) == 1 or len({load_tokenizer(name).digest for name in names}) == 1

    def copy_companions(self, target: Path) -> None:
        """Copy what the run keeps of its tokenizer, if it keeps one, into the folder `target`."""
        if (self.folder / TOKENIZER_FOLDER).is_dir():
            shutil.copytree(self.folder / TOKENIZER_FOLDER, target, dirs_exist_ok=True)

    def told(self) -> dict[str, Any]:
        """What the run that begins so notes in its folder."""
        return {
            "init_from": self.init_from,
            "folder": os.path.realpath(self.folder),
            "step": self.checkpoint.step,
            "checkpoint": digest(self.checkpoint.folder / COMMITTED),
            "config": digest(self.folder / CONFIG),
            "parent": read_parent(self.folder),
        }


def open_parent(init_from: str, noted: Mapping[str, Any] | None = None) -> Parent:
    """The checkpoint that `init_from: run:DIR` names, by default the newest, found whole.

    If it is `noted` which one the run began with, that one is opened, unread.

    Raises:
        InputError: naming init_from, if there is no such run or checkpoint, it is not whole, or
            is another than the one that was noted.
    """
    origin = origin_of(init_from)
    folder = origin.folder
    config = saved_config(folder, "init_from")
    try:
        if noted is None:
            checkpoint = verified(newest_whole(folder, origin.step), every_stage)
        else:
            checkpoint = open_checkpoint(folder, noted["step"])
    except InputError as error:
        problem = f"{error.problem} ({error.field} = {error.value})"
        raise InputError("init_from", init_from, problem, error.remedy) from error
    parent = Parent(init_from, folder, config, checkpoint)
    if noted is not None and digest(checkpoint.folder / COMMITTED) != noted["checkpoint"]:
        raise InputError(
            "init_from",
            init_from,
            f"the checkpoint of step {checkpoint.step} is another there than the one that this run "
            "began with",
            "Bring that one back, or start another run",
        )
    return parent
