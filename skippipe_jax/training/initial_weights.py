"""The weights that a run begins with, where they come from elsewhere: `init_from`.

`parent.json` in the folder of a run that began by `init_from: run:DIR`:

    init_from     as it was said
    folder, step  whose checkpoint it was, and of which step
    checkpoint    digest of its COMMITTED, which has a digest of every other file of it
    config        digest of the config.yaml of that run, as it was then
    parent        what stood in the parent.json of that run; null, if it had none
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

from skippipe_jax.config import Config, DataConfig, ModelConfig, StageCut
from skippipe_jax.config.data import (
    BYTES,
    TOKENIZER_FOLDER,
    TOKENS_INDEX,
    has_tokenizer,
)
from skippipe_jax.config.parsing import CONFIG, saved_config
from skippipe_jax.config.pretrained import RUN, origin_of, require_shapes
from skippipe_jax.data.batches import tokenizer_of
from skippipe_jax.data.documents import local_path
from skippipe_jax.data.token_shards import read_index
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.interop import huggingface
from skippipe_jax.runtime.runtime import Ready
from skippipe_jax.runtime.state import State
from skippipe_jax.storage.checkpoint import COMMITTED, Checkpoint, digest, open_checkpoint
from skippipe_jax.storage.loading import load_stage_numpy
from skippipe_jax.storage.restore import every_stage, latest_intact, verify
from skippipe_jax.storage.run_dir import RunDir


@dataclass(frozen=True)
class RunWeights:
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

    def require_shapes(self, model: ModelConfig) -> None:
        """Refuse a model of other shapes."""
        require_shapes(self.folder / CONFIG, self.config.model, vars(model))

    def load_stage(self, parameters: PyTree, first_layer: int) -> PyTree:
        """Read a stage's parameters into NumPy arrays of the shapes and dtypes of `parameters`.

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
        read = load_stage_numpy(self.checkpoint, cut, stage, {"parameters": as_saved})["parameters"]
        return jax.tree.map(
            lambda array, leaf: array.astype(leaf.dtype, copy=False), read, parameters
        )

    def matches_tokenizer(self, data: DataConfig) -> bool:
        """Tell whether the run was trained on tokens of the same tokenizer as that of the data."""
        names = {tokenizer_of(RunDir(self.folder).with_tokenizer(self.config.data))}
        names.add(tokenizer_of(data))
        return len(names) == 1 or len({load_tokenizer(name).digest for name in names}) == 1

    def copy_tokenizer(self, target: Path) -> None:
        """Copy what the run keeps of its tokenizer, if it keeps one, into the folder `target`."""
        if (self.folder / TOKENIZER_FOLDER).is_dir():
            shutil.copytree(self.folder / TOKENIZER_FOLDER, target, dirs_exist_ok=True)

    def provenance(self) -> dict[str, Any]:
        """Describe the checkpoint, as the run that begins so notes it in its folder."""
        return {
            "init_from": self.init_from,
            "folder": os.path.realpath(self.folder),
            "step": self.checkpoint.step,
            "checkpoint": digest(self.checkpoint.folder / COMMITTED),
            "config": digest(self.folder / CONFIG),
            "parent": RunDir(self.folder).parent(),
        }


WeightSource: TypeAlias = huggingface.Weights | RunWeights
"""Weights that have been found whole."""


def open_initial_weights(config: Config, *, anew: bool = False) -> WeightSource | None:
    """Open the weights that `init_from` names, if it does, found whole and of the model's shapes.

    Those of a run are of the checkpoint that is noted in the folder of this one. Where it begins
    `anew`, that is still to be chosen.

    Raises:
        InputError: if they are not.
    """
    if config.init_from is None:
        return None
    origin = origin_of(config.init_from)
    weights: WeightSource
    if origin.kind == RUN:
        noted = None if anew else RunDir(config.run_dir).parent()
        weights = open_run_weights(config.init_from, noted)
    else:
        weights = huggingface.open_weights(origin.folder, "init_from")
    weights.require_shapes(config.model)
    return weights


def open_run_weights(init_from: str, noted: Mapping[str, Any] | None = None) -> RunWeights:
    """Open the checkpoint that `init_from: run:DIR` names, by default the newest, found whole.

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
            checkpoint = verify(latest_intact(folder, origin.step), every_stage)
        else:
            checkpoint = open_checkpoint(folder, noted["step"])
    except InputError as error:
        problem = f"{error.problem} ({error.field} = {error.value})"
        raise InputError("init_from", init_from, problem, error.remedy) from error
    weights = RunWeights(init_from, folder, config, checkpoint)
    if noted is not None and digest(checkpoint.folder / COMMITTED) != noted["checkpoint"]:
        raise InputError(
            "init_from",
            init_from,
            f"the checkpoint of step {checkpoint.step} is another there than the one that this run "
            "began with",
            "Bring that one back, or start another run",
        )
    return weights


def require_own_tokens(config: Config) -> None:
    """Refuse tokens of another tokenizer than that of the first weights, unless `data` names it.

    Nothing is said where the weights come without a tokenizer, or the tokens are on another host.

    Raises:
        InputError: naming the tokens, and both tokenizers.
    """
    data, path = config.data, config.data.path
    if config.init_from is None or data.source != "tokens" or path is None:
        return
    own, folder = origin_of(config.init_from).tokenizer, local_path(path)
    is_here = has_tokenizer(own) and Path(folder, TOKENS_INDEX).is_file()
    if data.tokenizer is not None or not is_here:
        return
    theirs = read_index(folder, "data.path").tokenizer
    if theirs != load_tokenizer(str(own)).digest:
        name = BYTES if theirs == BYTES else f"{path}/{TOKENIZER_FOLDER}"
        raise InputError(
            "data.path",
            path,
            f"its tokens are by the tokenizer {name}, and those of {config.init_from} by {own}",
            f"Tokenize the text again with --tokenizer {own}, or write data.tokenizer: {name} to "
            "train on other tokens than the model knows",
        )


def tokenizer_warning(weights: WeightSource | None, config: Config) -> list[str]:
    """Say so, if a run goes on with what another has learnt of other tokens."""
    if not isinstance(weights, RunWeights) or weights.matches_tokenizer(config.data):
        return []
    return [f"{config.init_from} was trained on another tokenizer's tokens than those of data"]


class InitialWeights:
    """The parameters of stages as weights have them, which all hosts must read alike."""

    def __init__(self, source: WeightSource, cut: StageCut, *, are_compared: bool):
        """Read nothing yet; hosts compare what they read if `are_compared`."""
        self.are_compared = are_compared
        self.source = source
        self.cut = cut
        self.digests: dict[int, str] = {}

    def read(self, stage: int, shapes: State) -> State:
        """Read the parameters of a stage, of these shapes."""
        parameters = self.source.load_stage(shapes["parameters"], self.cut.blocks(stage).start)
        if self.are_compared:
            self.digests[stage] = _digest(parameters)
        return {"parameters": parameters}

    def compared(self, config: Config, host: int, serving: Sequence[Collection[int]]) -> Ready:
        """Tell the digests of what was read, once all is ready, and compare those of all hosts.

        This is host number `host`, and `serving` are those of each stage. One that has read other
        weights for a stage than the first that serves it raises InputError.
        """

        def compare(told: Mapping[int, Any]) -> None:
            for stage, own in self.digests.items():
                # Who takes its state from others reads none.
                read = {other: (told[other] or {}).get(str(stage)) for other in serving[stage]}
                first = min(other for other, theirs in read.items() if theirs is not None)
                if read[first] != own:
                    raise InputError(
                        "init_from",
                        config.init_from,
                        f"host {host} reads other weights for stage {stage} than host {first}",
                        "Give all hosts the same files",
                    )

        return Ready(lambda: self.digests, compare)


def _digest(parameters: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for leaf in jax.tree.leaves(parameters):
        sha1.update(leaf.reshape(-1).view(np.uint8))
    return sha1.hexdigest()
