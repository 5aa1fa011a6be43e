"""Compiler from a plan to the program of each host, by one global order of operations.

Every host runs its part of the same order. The inputs of the earliest operation not yet run are
therefore complete, so hosts cannot deadlock. The compiler refuses a plan whose orders could
deadlock, or that puts more microbatches in flight on a node than its memory holds.

A name identifies the same hop on every host. It says what the hop carries: the input of an
operation, for training or for held-out microbatches, or (see `skippipe_jax.runtime`) a chunk of a
ring or an array of a state.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.program.schedule import with_exact_averaging


@dataclass(frozen=True)
class Hop:
    """Transfer from node to node, identified within its iteration by `name`."""

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Compute:
    """Instruction to run an operation, with the hops of its input and of its output.

    `following` is the next operation of the microbatch. `arrives` or `leaves` is None if the
    neighboring operation runs on the same node, or if there is no such operation.
    """

    operation: Operation
    following: Operation | None
    arrives: Hop | None
    leaves: Hop | None


@dataclass(frozen=True)
class SumGradients:
    """Instruction to sum the gradients of a stage over its replicas."""

    stage: int


Instruction = Compute | SumGradients


@dataclass(frozen=True)
class Program:
    """Instructions of one host for an iteration, in order."""

    host: int
    nodes: tuple[int, ...]
    instructions: tuple[Instruction, ...]

    @property
    def hops(self) -> list[Hop]:
        """All hops from the nodes of the host."""
        steps = (step.leaves for step in self.instructions if isinstance(step, Compute))
        return [hop for hop in steps if hop is not None]


def compile_plan(plan: Plan, host_of: Sequence[int]) -> tuple[Program, ...]:
    """Compile the program of every host, where `host_of[n]` is the host that serves node n.

    Raises:
        InputError: if the plan's orders break a memory limit or deadlock.
    """
    return _programs(global_order(plan), plan.stages, host_of)


def _programs(
    order: Sequence[Instruction], stages: Sequence[Sequence[int]], host_of: Sequence[int]
) -> tuple[Program, ...]:
    """Split the instructions of an iteration into the programs of all hosts."""

    def nodes_of(instruction: Instruction) -> Sequence[int]:
        if isinstance(instruction, Compute):
            return [instruction.operation.node]
        return stages[instruction.stage]

    return tuple(
        Program(
            host=host,
            nodes=tuple(node for node, own in enumerate(host_of) if own == host),
            instructions=tuple(
                step for step in order if any(host_of[node] == host for node in nodes_of(step))
            ),
        )
        for host in range(max(host_of) + 1)
    )


def _computes(chain: Sequence[Operation], use: str) -> list[Compute]:
    """Return the instructions of consecutive operations of a microbatch, with hops for a `use`."""
    hops: list[Hop | None] = [None]
    for before, after in itertools.pairwise(chain):
        is_hop = before.node != after.node
        hops.append(Hop(f"{use}: {after}", before.node, after.node) if is_hop else None)
    hops.append(None)
    following = (*chain[1:], None)
    return [Compute(*step) for step in zip(chain, following, hops[:-1], hops[1:], strict=True)]


def compile_plans(
    plans: Mapping[str, Plan], host_of: Sequence[int], host: int
) -> dict[str, Program]:
    """Compile the programs of a host for all plans of one run, by the plans' names.

    Raises:
        InputError: as `compile_plan` does.
    """
    return {name: compile_plan(plan, host_of)[host] for name, plan in plans.items()}


def global_order(plan: Plan) -> tuple[Instruction, ...]:
    """Return all instructions of an iteration, in the order in which the simulator starts them."""
    # In `outer` mode, too: the first iterations may be exact.
    timeline = simulate_plan(with_exact_averaging(plan))
    computes = {
        compute.operation: compute
        for microbatch, path in enumerate(plan.microbatches)
        for compute in _computes(microbatch_chain(microbatch, path), "training")
    }
    timed: list[tuple[float, Instruction]] = [
        (run.start_s, computes[run.operation]) for run in timeline.runs
    ]
    timed += [
        (averaging.start_s, SumGradients(averaging.stage)) for averaging in timeline.averagings
    ]
    # The sort is stable and both lists are in start order: instructions that start at the same
    # moment keep their order, and a sum comes after the operations that it waits for.
    return tuple(instruction for _, instruction in sorted(timed, key=lambda entry: entry[0]))


def hosts_of_nodes(nodes: int, hosts: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Map each node to its host: as `given`, or in order and evenly over the hosts.

    Raises:
        InputError: if the plan does not fit this number of hosts.
    """
    if given is None:
        if hosts > nodes:
            raise InputError(
                "--hosts",
                hosts,
                f"the plan has {nodes} nodes, and each host must serve at least one",
                f"Start {nodes} hosts or fewer, or plan with more nodes",
            )
        return tuple(node * hosts // nodes for node in range(nodes))
    if len(given) != nodes:
        raise InputError(
            "cluster.host_of_node",
            list(given),
            f"has {len(given)} entries, but the plan has {nodes} nodes",
            "List the host of each node",
        )
    if set(given) != set(range(hosts)):
        raise InputError(
            "cluster.host_of_node",
            list(given),
            f"each host from 0 to {hosts - 1} must serve a node",
            f"Start {max(given) + 1} hosts, or assign the nodes to {hosts} hosts",
        )
    return tuple(given)


def compile_held_out(
    stages: Sequence[Sequence[int]], host_of: Sequence[int], count: int
) -> tuple[Program, ...]:
    """Compile programs that send `count` held-out microbatches through all stages in order.

    Microbatches skip stages without nodes: stages that are left out.

    Microbatches use the replicas of each stage in turn, and their loss (L) is computed on the data
    node where they began. No instruction depends on a later one, all stages soon have work, and a
    data node has at most as many microbatches in flight as there are stages.
    """
    stages = [nodes for nodes in stages if nodes]
    chains: list[list[Compute]] = []
    for microbatch in range(count):
        path = [nodes[microbatch % len(nodes)] for nodes in stages]
        chain = [Operation("F", microbatch, node) for node in path]
        chains.append(_computes([*chain, Operation("L", microbatch, path[0])], "validation"))
    order = [
        chains[microbatch][turn - microbatch]
        for turn in range(count + len(stages))
        for microbatch in range(max(0, turn - len(stages)), min(turn + 1, count))
    ]
    return _programs(order, stages, host_of)
