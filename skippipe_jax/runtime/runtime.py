"""The runtime of one host: state, transfers, and one iteration after another.

`Runtime.run` takes one of two ways. Where nothing has to be waited for, on a host that is alone,
everything is dispatched in the program's order at once (`dispatch`). Otherwise every operation
starts when its input has arrived (`live`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree
from skippipe_sched.problem.plan import Plan

from skippipe_jax.cluster.agreement import barrier, gather
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Program
from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.program.schedule import OWN, Schedule, stage_shares
from skippipe_jax.runtime.dispatch import in_program_order
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import EventLoop
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.held_out import HeldOut
from skippipe_jax.runtime.live import Clock, LiveIteration
from skippipe_jax.runtime.operations import HeldOutOperations, TrainingOperations
from skippipe_jax.runtime.replicas import Replicas, open_collectives
from skippipe_jax.runtime.stage_functions import activation, functions_of_stages
from skippipe_jax.runtime.state import Origin, StageState, make_states
from skippipe_jax.runtime.topology import Topology, devices_of_nodes
from skippipe_jax.runtime.totals import Outcome, add_up, apart, sum_by_collective
from skippipe_jax.runtime.transport import HostLink, Transfers


class Runtime:
    """Runs the programs of one host over the nodes that it serves.

    Attributes:
        topology: who serves what.
        replicas: those held here.
        operations: what operations compute in training.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        programs: Mapping[str, Program],
        topology: Topology,
        links: Mapping[int, HostLink],
        origin: Origin | None = None,
        clock_offset_s: float = 0.0,
    ):
        """Make the state of the stages served here: from `origin`, or drawn from the seed.

        `programs` are this host's, by the names of the plans of `schedule`; `links[h]` leads to
        host h. `clock_offset_s` is what to add to this host's clock for host 0's.
        """
        self.config = config
        self.schedule = schedule
        self.programs = programs
        self.topology = topology
        self.clock_offset_s = clock_offset_s
        data, stages = config.data, len(topology.plan.stages)
        functions = functions_of_stages(
            stages,
            config.model,
            config.optimizer,
            config.train.steps,
            data.microbatch_size * data.sequence_length,
        )
        cut = config.model.layers_of_stages(stages)
        self.replicas = Replicas(
            topology,
            make_states(topology, functions, cut, config.seed, origin),
            config.recipe.average_parameters_every,
        )
        self.exchange = Exchange(EventLoop(config.network.deadline_s), topology, links)
        self.operations = TrainingOperations(
            self.replicas, activation(config.model, data), config.network.activation_dtype
        )
        scales = config.recipe.skip_scaling == "inverse"
        self.shares = {name: _shares(plan, scales=scales) for name, plan in schedule.plans.items()}
        self.emulations = {
            name: Emulation(plan, config.network, config.seed, config.recipe.averaged_at_most)
            for name, plan in schedule.plans.items()
            if config.network.mode == "emulate"
        }
        self.ready_first = config.execution == "ready-first"
        # On one host nothing is ever late, unless it is made so.
        self.waits = bool(
            len(topology.hosts) > 1 or self.emulations or self.ready_first or topology.rings
        )

    @property
    def states(self) -> Mapping[int, StageState]:
        """The state of each replica held here, by the first of its nodes."""
        return self.replicas.states

    def owned_stages(self) -> dict[int, dict[str, PyTree]]:
        """What this host saves: the state of the stages whose first replica it holds."""
        return self.replicas.owned_stages()

    def held_out(self, count: int) -> HeldOut:
        """The ways of `count` held-out microbatches; all hosts call this with the same count."""
        operations = HeldOutOperations(self.replicas, self.operations.activation)
        return HeldOut(self.exchange, operations, count, waits=self.waits)

    def run(
        self,
        iteration: int,
        batches: Mapping[int, Batch],
        *,
        stop: bool = False,
        record: bool = False,
    ) -> Outcome:
        """Run one iteration by its plan.

        `batches` are those of the microbatches whose data nodes are served here, by their numbers
        in the iteration. `stop` tells all hosts, through the totals, that this one was asked to
        stop. With `record`, what happened when is part of the outcome.

        Raises:
            DeadlinePassed: if nothing came from other hosts for `network.deadline_s`.
        """
        name = self.schedule.name(iteration)
        self.operations.begin(self.shares[name])
        if not (self.waits or record):
            return self._dispatch(iteration, self.programs[name], batches, stop)
        live = LiveIteration(
            self.exchange,
            self.operations,
            self.schedule.plans[name],
            self.programs[name],
            iteration,
            ready_first=self.ready_first,
            averaging_dtype=self.config.network.averaging_dtype,
            emulation=self.emulations.get(name),
        )
        return live.run(batches, stop, Clock.with_offset(self.clock_offset_s) if record else None)

    def _dispatch(
        self, iteration: int, program: Program, batches: Mapping[int, Batch], stop: bool
    ) -> Outcome:
        """Dispatch one iteration in the program's order, waiting for nothing."""
        norms = []
        for stage in in_program_order(program, self.operations, batches):
            if not self.replicas.updates_locally:
                self.replicas.sum_by_collective(stage)
            norms += self.replicas.squared_norms(stage)
        parts = [*self.operations.totals.values(), *norms]
        local = add_up(self.topology, parts, stop, {})
        totals, _ = apart(sum_by_collective(self.topology, local))
        self.replicas.update(totals)
        if self.replicas.averages_parameters(iteration):
            for stage in self.replicas.stages:
                self.replicas.sum_by_collective(stage)
        gauges = {node: state.gauge for node, state in self.operations.nodes.items()}
        return Outcome(totals, gauges, None)


def open_runtime(
    config: Config,
    schedule: Schedule,
    programs: Mapping[str, Program],
    host_of: Sequence[int],
    host: Membership,
    transfers: Transfers,
    origin: Origin | None,
) -> Runtime:
    """The runtime of this host; all hosts call this together."""
    plan = schedule.plans[OWN]
    timeout_s = config.cluster.connect_timeout_s
    kinds = gather(host, "devices", lambda: [d.device_kind for d in jax.local_devices()], timeout_s)
    devices = devices_of_nodes(host_of, list(kinds.values()))
    numbers = HopNumbers(programs[OWN].first_free_hop)
    topology = Topology.of(
        config, plan, host.index, host_of, devices, numbers, in_one_jax=host.is_distributed
    )
    links = transfers.links({node: topology.sharding(node) for node in topology.nodes})
    clock_offset_s = host.clock_offset_s() if config.trace != "never" else 0.0
    runtime = Runtime(config, schedule, programs, topology, links, origin, clock_offset_s)
    # Nobody waits in a collective, or for activations, of a host that still reads or compiles.
    barrier(host, "runtime", timeout_s)
    if topology.in_one_jax:
        open_collectives(topology)
    return runtime


def give_collectives_threads(config: Config, host: Membership, nodes: int) -> None:
    """Let XLA have more threads than cores on a CPU, which it creates when it is first used.

    There a collective holds a thread until all replicas have come to it, and so does a launch for
    which the device has no room yet: with two threads, both may wait for work that has no thread
    left. Rings need no such threads, and operations are quicker without.
    """
    if host.is_distributed and config.network.averaging != "ring":
        threads = (os.cpu_count() or 1) + 2 * nodes + 1
        os.environ.setdefault("PJRT_NPROC", str(threads))


def _shares(plan: Plan, *, scales: bool) -> list[np.float32 | None]:
    """By what each stage divides what it adds; None for one that leaves it as it is."""
    shares: list[np.float32 | None] = [s if scales else None for s in stage_shares(plan)]
    # The outputs of a data stage are no sum of its inputs, which are tokens, and anything.
    shares[0] = None
    return shares
