"""Dispatch of a whole program at once, without waits, on a host that serves all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.runtime.operations import Operations


def in_program_order(
    program: Program, operations: Operations, batches: Mapping[int, Batch]
) -> Iterator[int]:
    """Dispatch all operations in the program's order, without waits, on the only host.

    Yields each stage whose replicas the program sums, for the caller to sum them. The device of a
    node runs its operations in order, as each call takes an output of the previous one.
    """
    carried: dict[int, jax.Array] = {}
    topology = operations.replicas.topology
    for instruction in program.instructions:
        if not isinstance(instruction, Compute):
            yield instruction.stage
            continue
        operation, leaves = instruction.operation, instruction.leaves
        if operation.microbatch in carried:
            value = carried.pop(operation.microbatch)
        else:
            value = operations.first_input(operation, batches[operation.microbatch])
        result, _ = operations.dispatch(operation, value, leaves=leaves is not None)
        if leaves is not None:
            there = topology.spread(leaves.target).of_hop(result.shape)
            carried[operation.microbatch] = jax.device_put(result, there)
        elif result is not None:
            carried[operation.microbatch] = result
