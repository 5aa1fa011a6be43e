"""The weights that a run begins with, where they come from elsewhere: `init_from`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import agree
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import Config, DataConfig, ModelConfig, StageCut
from skippipe_jax.config.init_from import RUN, origin_of
from skippipe_jax.interop.huggingface import open_weights
from skippipe_jax.runtime.stage_functions import Parameters
from skippipe_jax.runtime.state import State
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.parent import Parent, open_parent


class Weights(Protocol):
    """Weights that have been found whole, of a Hugging Face model or of a run."""

    def require_shapes_of(self, model: ModelConfig) -> None:
        """Refuse a model that they do not fit."""
        ...

    def read_stage(self, parameters: Any, first_layer: int) -> Parameters:
        """A stage's parameters in NumPy arrays, of the shapes and dtypes that `parameters` have."""
        ...

    def has_tokenizer_of(self, data: DataConfig) -> bool:
        """Whether what came along with them belongs to a run on this data."""
        ...

    def copy_companions(self, target: Path) -> None:
        """Copy what came along with them into the folder `target`."""
        ...


def find_weights(config: Config, *, anew: bool = False) -> Weights | None:
    """The weights that `init_from` names, if it does, found whole and of the model's shapes.

    Those of a run are of the checkpoint that is noted in the folder of this one. Where it begins
    `anew`, that is still to be chosen.

    Raises:
        InputError: if they are not.
    """
    if config.init_from is None:
        return None
    origin = origin_of(config.init_from)
    weights: Weights
    if origin.kind == RUN:
        noted = None if anew else run_folder.read_parent(Path(config.run_dir))
        weights = open_parent(config.init_from, noted)
    else:
        weights = open_weights(origin.folder, "init_from")
    weights.require_shapes_of(config.model)
    return weights


def about_tokenizer(weights: Weights | None, config: Config) -> list[str]:
    """A sentence, if a run goes on with what another has learnt of other tokens."""
    if not isinstance(weights, Parent) or weights.has_tokenizer_of(config.data):
        return []
    return [f"{config.init_from} was trained on another tokenizer's tokens than those of data"]


class FirstWeights:
    """The parameters of stages as weights have them, which all hosts must read alike."""

    def __init__(self, weights: Weights, cut: StageCut, *, are_compared: bool):
        """Nothing is read yet; what is read `are_compared` with what other hosts read."""
        self.are_compared = are_compared
        self.weights = weights
        self.cut = cut
        self.digests: dict[int, str] = {}

    def read(self, stage: int, shapes: State) -> State:
        """The parameters of a stage, of these shapes."""
        parameters = self.weights.read_stage(shapes["parameters"], self.cut.blocks(stage).start)
        if self.are_compared:
            self.digests[stage] = _digest(parameters)
        return {"parameters": parameters}

    def require_same(self, config: Config, host: Membership | Team, topology: Topology) -> None:
        """Refuse a host that has read other weights for a stage than the first that serves it.

        All hosts call this together.
        """
        for stage, digest in self.digests.items():

            def differing(first: int, stage: int = stage) -> InputError:
                return InputError(
                    "init_from",
                    config.init_from,
                    f"host {host.index} reads other weights for stage {stage} than host {first}",
                    "Give all hosts the same files",
                )

            hosts = {topology.host_of[node] for node in topology.plan.stages[stage]}
            # Who takes its state from others reads none.
            hosts -= host.fresh if isinstance(host, Team) else frozenset()
            timeout_s = config.cluster.connect_timeout_s
            agree(host, f"weights/{stage}", digest, timeout_s, differing, hosts)


def _digest(parameters: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for leaf in jax.tree.leaves(parameters):
        sha1.update(leaf.reshape(-1).view(np.uint8))
    return sha1.hexdigest()
