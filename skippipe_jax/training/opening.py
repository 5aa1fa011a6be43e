"""The stages of a run on this host: which parts of a checkpoint it reads, and how it opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from skippipe_sched.problem.plan import Plan

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import Config
from skippipe_jax.program.schedule import OWN
from skippipe_jax.runtime.outer_steps import from_own_states
from skippipe_jax.runtime.remaking import NO_REMAINS, Remains
from skippipe_jax.runtime.runtime import Runtime, open_runtime
from skippipe_jax.runtime.state import Kept, from_checkpoint
from skippipe_jax.storage.layout import DATA, Checkpoint, OwnStates, replica_name, replicas_named
from skippipe_jax.storage.reader import parts_read
from skippipe_jax.training.first_weights import FirstWeights, find_weights
from skippipe_jax.training.messages import say
from skippipe_jax.training.setup import Settled


def parts_of(config: Config, settled: Settled) -> Callable[[Checkpoint], set[str]]:
    """Which parts of a checkpoint this host reads: those of its stages, and where the data is."""
    plan = settled.plan
    cut = config.model.layers_of_stages(len(plan.stages))
    nodes = settled.programs[OWN].nodes
    stages = {plan.stage_of[node] for node in nodes}
    data = set() if settled.data is None else {DATA}

    def parts(checkpoint: Checkpoint) -> set[str]:
        own: set[str] = set()
        if goes_on_alone(config, plan, checkpoint):
            places = {node: (s, p) for s, of in enumerate(plan.stages) for p, node in enumerate(of)}
            own = {replica_name(*places[node]) for node in nodes} & replicas_named(checkpoint.own)
        return parts_read(checkpoint, cut, stages) | own | data

    return parts


def goes_on_alone(config: Config, plan: Plan, checkpoint: Checkpoint) -> bool:
    """Whether replicas go on with the states of their own that a checkpoint holds.

    They do so where there are as many of each stage, of as many blocks, averaged as before.
    """
    cut = config.model.layers_of_stages(len(plan.stages))
    own = OwnStates.of(plan.stages, asdict(config.averaging))
    return checkpoint.own == own and checkpoint.stage_layers == tuple(cut)


def open_stages(
    config: Config,
    host: Membership | Team,
    settled: Settled,
    checkpoint: Checkpoint | None,
    kept: Kept | None = None,
    remains: Remains = NO_REMAINS,
    *,
    step: int = 0,
) -> Runtime:
    """The runtime after a step, its stages as the checkpoint has them, or as a run begins.

    All hosts open theirs together.

    In a team that goes on, states that are `kept` are as they are, and lost ones are made from what
    `remains` of them.

    Raises:
        InputError: if they cannot be read, or this host reads other weights than others.
    """
    cut = config.model.layers_of_stages(len(settled.plan.stages))
    # A run that stopped before its first checkpoint begins anew when it is resumed.
    is_begun = checkpoint is not None or kept is not None
    weights = None if is_begun else settled.weights or find_weights(config)
    first = None if weights is None else FirstWeights(weights, cut, are_compared=host.count > 1)
    origin = first and first.read
    own_origin = None
    if checkpoint is not None:
        origin = from_checkpoint(checkpoint, cut)
        if goes_on_alone(config, settled.plan, checkpoint):
            own_origin = from_own_states(checkpoint, config, cut)
        elif _were_apart(config, checkpoint) and host.index == 0:
            say(
                "replicas differ from those that were saved, in number or in how they average, or "
                "not all were saved: they go on from the outer parameters"
            )
    assert settled.transfers is not None, "the hosts have met"
    assert settled.agreed is not None, "all hosts have reported"
    kinds = settled.agreed.device_kinds
    given = settled.schedule, settled.programs, settled.host_of, kinds
    states = origin, kept, remains, own_origin
    runtime = open_runtime(config, *given, host, settled.transfers, *states, step=step)
    if first is not None:
        first.require_same(config, host, runtime.topology)
    return runtime


def _were_apart(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether replicas differed when they were saved, or do now."""
    averaging = config.averaging
    is_apart = averaging.is_outer and checkpoint.step >= max(1, averaging.exact_steps)
    return is_apart or checkpoint.own is not None
