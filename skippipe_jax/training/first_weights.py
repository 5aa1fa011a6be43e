"""The weights that a run begins with, where they come from elsewhere: `init_from`."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from skippipe_sched.errors import InputError
from tqdm import tqdm

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.config.huggingface import folder_of
from skippipe_jax.interop.huggingface import Weights, open_weights
from skippipe_jax.runtime.executor import Executor


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


def begin_with(weights: Weights, executor: Executor, config: Config, host: Membership) -> None:
    """Give the stages served here their weights, instead of those drawn from the seed.

    All hosts call this together. Each reads its own stages, one at a time.

    Raises:
        InputError: if another host has read other weights for the same stage.
    """
    digests: dict[int, str] = {}
    layers = config.model.layers_of_stages(len(executor.plan.stages))
    served = sorted({executor.stage_of[node] for node in executor.states})
    for stage in tqdm(served, desc="weights", unit="stage", disable=None, leave=False):
        replicas = {n: s for n, s in executor.states.items() if executor.stage_of[n] == stage}
        shapes = next(iter(replicas.values())).parameters
        parameters = weights.read_stage(shapes, sum(layers[:stage]))
        for node, state in replicas.items():
            # A copy each, since updates write over parameters.
            device = executor.devices[node]
            state.parameters = jax.device_put(parameters, device, may_alias=False)
        if host.count > 1:
            digests[stage] = _digest(parameters)
            host.put(f"weights/{stage}/{host.index}", digests[stage])
    timeout_s = config.cluster.connect_timeout_s
    for stage, digest in digests.items():
        first = executor.host_of[executor.plan.stages[stage][0]]
        if digest != host.get(f"weights/{stage}/{first}", timeout_s, source=first):
            raise InputError(
                "init_from",
                config.init_from,
                f"host {host.index} reads other weights for stage {stage} than host {first}",
                "Give all hosts the same files",
            )
    # Nobody waits for activations of a host that still reads.
    host.barrier("weights", timeout_s)


def _digest(parameters: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for leaf in jax.tree.leaves(parameters):
        sha1.update(leaf.reshape(-1).view(np.uint8))
    return sha1.hexdigest()
