"""Local steps and outer steps of replicas at the end of iterations.

With `averaging.mode: outer` every node has a separate replica. docs/training.md has the formulas
and `skippipe_jax.optim.outer` computes them; this module decides what each replica does after which
step. Step s is the end of the s-th iteration, from 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skippipe_jax.config import Config
from skippipe_jax.models.footprint import stage_parameters
from skippipe_jax.optim.outer import Fragment, begin, fragments_of, inner_optimizer
from skippipe_jax.runtime.stage_functions import (
    SQUARED_NORM,
    TOKENS,
    TOTALS,
    StageFunctions,
    Totals,
    functions_of_stage,
)
from skippipe_jax.runtime.state import MOMENTUM, FragmentInTransit, OwnOrigin, StageState, StateTree
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.checkpoint import Checkpoint
from skippipe_jax.storage.loading import load_replica

InnerStep = Callable[..., tuple[Any, Any, Any, Float[Array, ""]]]
"""(parameters, optimizer state, gradients, targets) -> parameters, optimizer state, zero gradients,
squared norm of the mean gradient over these targets"""


class OuterSteps:
    """Local and outer steps of the replicas of a host. All arrays stay on their devices.

    Attributes:
        averaging: settings of the averaging.
    """

    def __init__(
        self, config: Config, topology: Topology, states: Mapping[int, StageState], step: int
    ):
        """Continue after `step` with the states of the local replicas."""
        self.averaging = config.averaging
        self._topology = topology
        self._states = states
        cut = config.model.stage_partition(len(topology.plan.stages))
        self._inner = inner_steps(config, len(topology.plan.stages))
        self._fragments = [fragments_of(config.averaging, layers) for layers in cut]
        self.begin(step)

    def begin(self, step: int) -> None:
        """Begin outer averaging of replicas after the last exact step, unless it has begun."""
        for replica, state in self._states.items():
            if step < self.averaging.exact_steps or self._is_only(replica):
                state.outer, state.under_way = None, {}
            elif state.outer is None:
                state.outer = begin(state.parameters)

    def step(self, replica: int, targets: Int[Array, ""]) -> Totals:
        """Take a local step by a replica's gradients; return its contribution to the totals.

        Without any target, the step changes nothing. The squared norm in the totals is the mean
        over the replicas of a stage, summed over the stages.
        """
        state, stage = self._states[replica], self._topology.stage_of[replica]
        state.parameters, state.optimizer_state, state.gradients, norm = self._inner[stage](
            state.parameters, state.optimizer_state, state.gradients, targets
        )
        return share_of_norm(norm, len(self._topology.replicas[stage]))

    def send(self, replica: int, step: int) -> FragmentInTransit | None:
        """Return the fragment that a replica sends after a step, or None."""
        fragment, state = self.averaging.fragment_sent_after(step), self._states[replica]
        if fragment is None or state.outer is None:
            return None
        own = self._fragments[self._topology.stage_of[replica]][fragment]
        message, sent, state.outer = own.send(state.parameters, state.outer)
        state.under_way[step] = FragmentInTransit(fragment, sent, message, committed_with=step)
        return state.under_way[step]

    def due(self, step: int) -> list[FragmentInTransit]:
        """Return the fragments of the local replicas that are due after a step."""
        sent_after = step - self.averaging.delay
        under_way = [state.under_way for state in self._states.values()]
        return [own[sent_after] for own in under_way if sent_after in own]

    def apply(self, step: int) -> None:
        """Apply the mean of all messages due after a step, once they have arrived."""
        sent_after = step - self.averaging.delay
        for replica, state in self._states.items():
            if sent_after in state.under_way:
                _apply(self._fragments[self._topology.stage_of[replica]], state, sent_after)

    def _is_only(self, replica: int) -> bool:
        """Return whether a replica is the only one of its stage, and thus averages nothing."""
        return len(self._topology.replicas[self._topology.stage_of[replica]]) == 1


def settle_fragments(config: Config, layers: int, state: StageState, step: int) -> None:
    """Apply or take back a replica's fragments in transit, when the hosts of the run have changed.

    A fragment committed with `step`, or before, has all its messages on every remaining replica. It
    is applied. All others are taken back, and sent again later.
    """
    fragments = fragments_of(config.averaging, layers)
    for sent_after in sorted(state.under_way):
        if state.under_way[sent_after].committed_with <= step:
            _apply(fragments, state, sent_after)
            continue
        own = state.under_way.pop(sent_after)
        assert state.outer is not None, "no fragment was sent"
        state.outer = fragments[own.fragment].take_back(state.outer, own.sent, own.message)


def _apply(fragments: Sequence[Fragment], state: StageState, sent_after: int) -> None:
    own = state.under_way.pop(sent_after)
    assert own.messages is not None, "a message has not arrived"
    assert state.outer is not None, "no fragment was sent"
    state.parameters, state.outer = fragments[own.fragment].apply(
        state.parameters, state.outer, own.sent, own.messages
    )


def inner_steps(config: Config, stages: int) -> list[InnerStep]:
    """Make the local step of each stage's replicas, for a model with `stages` stages."""
    layers = config.model.stage_partition(stages)
    sizes = [
        stage_parameters(config.model, count, is_data_stage=stage == 0)
        for stage, count in enumerate(layers)
    ]
    optimizers = [inner_optimizer(config.optimizer, size / sum(sizes)) for size in sizes]
    bounded = [replace(config, optimizer=own) for own in optimizers]
    tokens = config.data.microbatch_size * config.data.sequence_length
    return [
        _inner_step(functions_of_stage(own, stage == 0, layers[stage]), tokens)
        for stage, own in enumerate(bounded)
    ]


@functools.cache
def _inner_step(functions: StageFunctions, microbatch_tokens: int) -> InnerStep:
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(parameters: Any, optimizer_state: Any, gradients: Any, targets: Int[Array, ""]):
        totals = functions.squared_norm(gradients).at[TOKENS].set(targets.astype(jnp.float32))
        scale = microbatch_tokens / jnp.maximum(targets, 1)
        norm = jnp.where(targets > 0, totals[SQUARED_NORM] * scale**2, 0.0)
        return *functions.update(parameters, optimizer_state, gradients, totals), norm

    return step


@jax.jit
def share_of_norm(squared_norm: Float[Array, ""], replicas: int) -> Totals:
    """Return totals with the contribution of one of `replicas` to the mean squared norm."""
    return jnp.zeros(TOTALS).at[SQUARED_NORM].set(squared_norm / replicas)


def from_own_states(checkpoint: Checkpoint, config: Config, layers: Sequence[int]) -> OwnOrigin:
    """Return the origin of local states in a checkpoint with the same settings of averaging."""
    averaging = config.averaging

    def read(stage: int, place: int, of_stage: StateTree) -> StateTree:
        parameters = of_stage["parameters"]
        fragments = fragments_of(averaging, layers[stage])

        def shapes(fragment: int | None) -> dict[str, Any]:
            assert fragment is not None, "no fragment was sent"
            own = fragments[fragment]
            sent = jax.eval_shape(own.part, parameters)
            return {"sent": sent, "message": own.message_shape(parameters)}

        under_way: dict[int, int | None] = {}

        def abstract_of(names: Collection[str]) -> StateTree:
            # The saved names decide: a change of hosts just before had settled all fragments.
            parts = [name.split("/") for name in names]
            steps = {int(own[1]) for own in parts if own[0] == "under_way"}
            under_way.update({step: averaging.fragment_sent_after(step) for step in sorted(steps)})
            sent = {f"{step}": shapes(fragment) for step, fragment in under_way.items()}
            of_replica = {MOMENTUM: parameters, "residual": parameters, "under_way": sent}
            return {**of_stage, **of_replica}

        found = load_replica(checkpoint, stage, place, abstract_of)
        by_step = {of: found["under_way"][f"{of[0]}"] for of in under_way.items()}
        return {**found, "under_way": by_step}

    return read
