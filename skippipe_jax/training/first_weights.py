"""The weights that a run begins with, where they come from elsewhere: `init_from`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config, StageCut
from skippipe_jax.config.huggingface import folder_of
from skippipe_jax.interop.huggingface import Weights, open_weights
from skippipe_jax.runtime.state import Origin, State
from skippipe_jax.runtime.topology import Topology


def first_weights(config: Config) -> Weights | None:
    """The weights that `init_from` names, if it does, found whole and of the model's shapes.

    Raises:
        InputError: if they are not.
    """
    if config.init_from is None:
        return None
    weights = open_weights(folder_of(config.init_from))
    weights.require_shapes_of(config.model)
    return weights


def from_weights(weights: Weights, cut: StageCut, digests: dict[int, str]) -> Origin:
    """The parameters of the stages that `weights` hold; notes the digest of each that is read."""

    def read(stage: int, shapes: State) -> State:
        parameters = weights.read_stage(shapes["parameters"], cut.blocks(stage).start)
        digests[stage] = _digest(parameters)
        return {"parameters": parameters}

    return read


def require_same_weights(
    digests: Mapping[int, str], topology: Topology, config: Config, host: Membership
) -> None:
    """Refuse a host that has read other weights for a stage than the first host that has it.

    All hosts call this together.
    """
    if host.count == 1:
        return
    timeout_s = config.cluster.connect_timeout_s
    for stage, digest in digests.items():
        host.put(f"weights/{stage}/{host.index}", digest)
    for stage, digest in digests.items():
        first = topology.host_of[topology.plan.stages[stage][0]]
        if digest != host.get(f"weights/{stage}/{first}", timeout_s, source=first):
            raise InputError(
                "init_from",
                config.init_from,
                f"host {host.index} reads other weights for stage {stage} than host {first}",
                "Give all hosts the same files",
            )


def _digest(parameters: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for leaf in jax.tree.leaves(parameters):
        sha1.update(leaf.reshape(-1).view(np.uint8))
    return sha1.hexdigest()
