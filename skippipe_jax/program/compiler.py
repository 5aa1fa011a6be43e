"""Compiler from a plan to the program of each host, by one global order of operations.

Every host runs its part of the same order. The inputs of the earliest operation not yet run are
therefore complete, so hosts cannot deadlock. The compiler refuses a plan whose orders could
deadlock, or that puts more microbatches in flight on a node than its memory holds.

A number identifies the same hop on every host. All hosts therefore take the same numbers in the
same order: for the paths of all plans, for the rings of the stages, and for held-out microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.program.schedule import with_exact_averaging


@dataclass(frozen=True)
class Hop:
    """Transfer from node to node, identified within its iteration by `number`."""

    number: int
    source: int
    target: int


class HopNumbers:
    """Allocator of hop numbers, each of which it gives out once.

    Attributes:
        free: the first number that is free, as are all above it.
    """

    def __init__(self, free: int = 0):
        """Start at number `free`."""
        self.free = free

    def take(self, count: int) -> range:
        """Take the next `count` numbers."""
        taken = range(self.free, self.free + count)
        self.free = taken.stop
        return taken


@dataclass(frozen=True)
class Compute:
    """Instruction to run an operation, with the hops of its input and of its output.

    `arrives` or `leaves` is None if the neighboring operation runs on the same node, or if there is
    no such operation.
    """

    operation: Operation
    arrives: Hop | None
    leaves: Hop | None


@dataclass(frozen=True)
class SumGradients:
    """Instruction to sum the gradients of a stage over its replicas."""

    stage: int


Instruction = Compute | SumGradients


@dataclass(frozen=True)
class Program:
    """Instructions of one host for an iteration, in order.

    `following[o]` is the next operation of the microbatch of operation o. Hop numbers from
    `first_free_hop` on are unused.
    """

    host: int
    nodes: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    following: Mapping[Operation, Operation]
    first_free_hop: int


def compile_plan(plan: Plan, host_of: Sequence[int]) -> tuple[Program, ...]:
    """Compile the program of every host, where `host_of[n]` is the host that serves node n.

    Raises:
        InputError: if the plan's orders break a memory limit or deadlock.
    """
    numbers = HopNumbers()
    return _programs(global_order(plan, numbers), plan.stages, host_of, numbers.free)


def _programs(
    order: Sequence[Instruction],
    stages: Sequence[Sequence[int]],
    host_of: Sequence[int],
    first_free_hop: int,
) -> tuple[Program, ...]:
    """Split the instructions of an iteration into the programs of all hosts."""
    following: dict[Operation, Operation] = {}
    last: dict[int, Operation] = {}
    for operation in (step.operation for step in order if isinstance(step, Compute)):
        if operation.microbatch in last:
            following[last[operation.microbatch]] = operation
        last[operation.microbatch] = operation

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
            following=following,
            first_free_hop=first_free_hop,
        )
        for host in range(max(host_of) + 1)
    )


def _computes(chain: Sequence[Operation], numbers: HopNumbers) -> list[Compute]:
    """Return the instructions of consecutive operations of a microbatch, with their hops."""
    hops: list[Hop | None] = [None]
    for before, after in itertools.pairwise(chain):
        is_hop = before.node != after.node
        hops.append(Hop(numbers.take(1).start, before.node, after.node) if is_hop else None)
    hops.append(None)
    return [Compute(*step) for step in zip(chain, hops[:-1], hops[1:], strict=True)]


def compile_plans(
    plans: Mapping[str, Plan], host_of: Sequence[int]
) -> dict[str, tuple[Program, ...]]:
    """Compile the programs of all plans of one run, by the plans' names.

    The hops of rings and totals have the same numbers in all plans, so these numbers lie above the
    hops of every plan.

    Raises:
        InputError: as `compile_plan` does.
    """
    compiled = {name: compile_plan(plan, host_of) for name, plan in plans.items()}
    free = max(programs[0].first_free_hop for programs in compiled.values())
    return {
        name: tuple(replace(program, first_free_hop=free) for program in programs)
        for name, programs in compiled.items()
    }


def global_order(plan: Plan, numbers: HopNumbers | None = None) -> tuple[Instruction, ...]:
    """Return all instructions of an iteration, in the order in which the simulator starts them.

    Hops take their numbers from `numbers`, by default from 0 on.
    """
    numbers = numbers or HopNumbers()
    # In `outer` mode, too: the first iterations may be exact.
    timeline = simulate_plan(with_exact_averaging(plan))
    computes = {
        compute.operation: compute
        for microbatch, path in enumerate(plan.microbatches)
        for compute in _computes(microbatch_chain(microbatch, path), numbers)
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
    stages: Sequence[Sequence[int]], host_of: Sequence[int], count: int, numbers: HopNumbers
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
        chains.append(_computes([*chain, Operation("L", microbatch, path[0])], numbers))
    order = [
        chains[microbatch][turn - microbatch]
        for turn in range(count + len(stages))
        for microbatch in range(max(0, turn - len(stages)), min(turn + 1, count))
    ]
    return _programs(order, stages, host_of, numbers.free)
