"""Initial weights of a run from a Hugging Face model or another run: `init_from`.

`parent.json` in the folder of a run that started from `init_from: run:DIR`:

    init_from     the value in the configuration
    folder, step  the folder of the parent run, and the step of its checkpoint
    checkpoint    digest of its COMMITTED file, which has a digest of each of its other files
    config        digest of the config.yaml of the parent run at that time
    parent        the content of the parent.json of the parent run; null if it had none
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, DataConfig, ModelConfig, StagePartition
from skippipe_jax.config.data import BYTES, TOKENIZER_FOLDER, TOKENS_INDEX, has_tokenizer
from skippipe_jax.config.parsing import CONFIG, saved_config
from skippipe_jax.config.pretrained import RUN, parse_init_from, require_shapes
from skippipe_jax.data.batches import tokenizer_of
from skippipe_jax.data.documents import local_path
from skippipe_jax.data.token_shards import read_index
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.interop import huggingface
from skippipe_jax.runtime.runtime import Ready
from skippipe_jax.runtime.state import StateTree
from skippipe_jax.storage.checkpoint import COMMITTED, Checkpoint, file_digest, open_checkpoint
from skippipe_jax.storage.loading import load_stage_numpy
from skippipe_jax.storage.restore import every_stage, latest_intact, verify
from skippipe_jax.storage.run_dir import RunDir


@dataclass(frozen=True)
class RunWeights:
    """Checkpoint of another run, whose parameters are read stage by stage.

    Attributes:
        init_from: the value that names it.
        folder: the folder of that run.
        config: the configuration of that run, including its model.
        checkpoint: the checkpoint that is read.
    """

    init_from: str
    folder: Path
    config: Config
    checkpoint: Checkpoint

    def require_shapes(self, model: ModelConfig) -> None:
        """Raise InputError if `model` has other shapes."""
        require_shapes(self.folder / CONFIG, self.config.model, vars(model))

    def load_stage(self, parameters: PyTree, first_layer: int) -> PyTree:
        """Read a stage's parameters into NumPy arrays of the shapes and dtypes of `parameters`.

        The stage's blocks start at `first_layer`. The two runs may partition the model differently.

        Raises:
            InputError: if a file is damaged or cannot be read.
        """
        own = jax.tree.leaves(parameters["blocks"])[0].shape[0]
        rest = self.config.model.layers - first_layer - own
        cut = (first_layer, own, rest) if first_layer else (own, rest)
        dtype = np.dtype(self.config.model.parameter_dtype)
        as_saved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), parameters)
        stage = 1 if first_layer else 0
        read = load_stage_numpy(self.checkpoint, cut, stage, {"parameters": as_saved})["parameters"]
        return jax.tree.map(
            lambda array, leaf: array.astype(leaf.dtype, copy=False), read, parameters
        )

    def matches_tokenizer(self, data: DataConfig) -> bool:
        """Return whether the run was trained with the same tokenizer as `data` uses."""
        names = {tokenizer_of(RunDir(self.folder).with_tokenizer(self.config.data))}
        names.add(tokenizer_of(data))
        return len(names) == 1 or len({load_tokenizer(name).digest for name in names}) == 1

    def copy_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer that the run saved, if any, into the folder `target`."""
        if (self.folder / TOKENIZER_FOLDER).is_dir():
            shutil.copytree(self.folder / TOKENIZER_FOLDER, target, dirs_exist_ok=True)

    def provenance(self) -> dict[str, Any]:
        """Return the contents of `parent.json` for a run that starts from this checkpoint."""
        return {
            "init_from": self.init_from,
            "folder": os.path.realpath(self.folder),
            "step": self.checkpoint.step,
            "checkpoint": file_digest(self.checkpoint.folder / COMMITTED),
            "config": file_digest(self.folder / CONFIG),
            "parent": RunDir(self.folder).parent(),
        }


WeightSource: TypeAlias = huggingface.Weights | RunWeights
"""Weights that have been verified to be complete."""


def open_initial_weights(config: Config, *, anew: bool = False) -> WeightSource | None:
    """Open and verify the weights that `init_from` names; return None without `init_from`.

    The weights of another run come from the checkpoint recorded in this run's folder. With `anew`,
    nothing is recorded yet and the checkpoint is chosen here.

    Raises:
        InputError: if the weights are incomplete, or their shapes differ from the model's.
    """
    if config.init_from is None:
        return None
    origin = parse_init_from(config.init_from)
    weights: WeightSource
    if origin.kind == RUN:
        recorded = None if anew else RunDir(config.run_dir).parent()
        weights = open_run_weights(config.init_from, recorded)
    else:
        weights = huggingface.open_weights(origin.folder, "init_from")
    weights.require_shapes(config.model)
    return weights


def open_run_weights(init_from: str, recorded: Mapping[str, Any] | None = None) -> RunWeights:
    """Open and verify the checkpoint that `init_from: run:DIR` names, by default the newest.

    `recorded` is the provenance in the folder of this run, if any: then that checkpoint is opened
    without verifying its contents.

    Raises:
        InputError: naming init_from, if there is no such run or checkpoint, it is incomplete, or it
            differs from the one in `recorded`.
    """
    origin = parse_init_from(init_from)
    folder = origin.folder
    config = saved_config(folder, "init_from")
    try:
        if recorded is None:
            checkpoint = verify(latest_intact(folder, origin.step), every_stage)
        else:
            checkpoint = open_checkpoint(folder, recorded["step"])
    except InputError as error:
        problem = f"{error.problem} ({error.field} = {error.value})"
        raise InputError("init_from", init_from, problem, error.remedy) from error
    weights = RunWeights(init_from, folder, config, checkpoint)
    if (
        recorded is not None
        and file_digest(checkpoint.folder / COMMITTED) != recorded["checkpoint"]
    ):
        raise InputError(
            "init_from",
            init_from,
            f"its checkpoint of step {checkpoint.step} differs from the one that this run started "
            "from",
            "Restore that checkpoint, or start a new run",
        )
    return weights


def require_own_tokens(config: Config) -> None:
    """Refuse tokens from a tokenizer other than that of `init_from`, unless `data` names it.

    Does nothing if the weights have no tokenizer, or the tokens are on another host.

    Raises:
        InputError: naming the tokens and both tokenizers.
    """
    data, path = config.data, config.data.path
    if config.init_from is None or data.source != "tokens" or path is None:
        return
    own, folder = parse_init_from(config.init_from).tokenizer, local_path(path)
    is_here = has_tokenizer(own) and Path(folder, TOKENS_INDEX).is_file()
    if data.tokenizer is not None or not is_here:
        return
    theirs = read_index(folder, "data.path").tokenizer
    if theirs != load_tokenizer(str(own)).digest:
        name = BYTES if theirs == BYTES else f"{path}/{TOKENIZER_FOLDER}"
        raise InputError(
            "data.path",
            path,
            f"its tokens were made with tokenizer {name}, but {config.init_from} uses {own}",
            f"Tokenize the text again with --tokenizer {own}, or set data.tokenizer: {name} to "
            "train the model with another tokenizer",
        )


def tokenizer_warning(weights: WeightSource | None, config: Config) -> list[str]:
    """Return a warning if the initial weights were trained with another tokenizer, else []."""
    if not isinstance(weights, RunWeights) or weights.matches_tokenizer(config.data):
        return []
    return [f"{config.init_from} was trained with another tokenizer than that of data"]


class InitialWeights:
    """Initial parameters of stages, which must be the same on all hosts."""

    def __init__(self, source: WeightSource, cut: StagePartition, *, are_compared: bool):
        """Read nothing yet; hosts compare digests of what they read if `are_compared`."""
        self.are_compared = are_compared
        self.source = source
        self.cut = cut
        self.digests: dict[int, str] = {}

    def read(self, stage: int, shapes: StateTree) -> StateTree:
        """Read the parameters of a stage, with the given shapes."""
        parameters = self.source.load_stage(shapes["parameters"], self.cut.blocks(stage).start)
        if self.are_compared:
            self.digests[stage] = _digest(parameters)
        return {"parameters": parameters}

    def compared(self, config: Config, host: int, serving: Sequence[Collection[int]]) -> Ready:
        """Return the exchange that compares the digests of all hosts once all stages are ready.

        `host` is this host, and `serving` are the hosts of each stage. A host raises InputError if
        its weights for a stage differ from those of the first host that read them.
        """

        def compare(digests: Mapping[int, Any]) -> None:
            for stage, own in self.digests.items():
                # A host that takes its state from others reads no weights.
                read = {other: (digests[other] or {}).get(str(stage)) for other in serving[stage]}
                first = min(other for other, theirs in read.items() if theirs is not None)
                if read[first] != own:
                    raise InputError(
                        "init_from",
                        config.init_from,
                        f"the weights of stage {stage} differ between host {host} and host {first}",
                        "Use the same files on all hosts",
                    )

        return Ready(lambda: self.digests, compare)


def _digest(parameters: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for leaf in jax.tree.leaves(parameters):
        sha1.update(leaf.reshape(-1).view(np.uint8))
    return sha1.hexdigest()
