"""A program dispatched at once, where nothing has to be waited for: one host serves all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.runtime.operations import Operations


def in_program_order(
    program: Program, operations: Operations, batches: Mapping[int, Batch]
) -> Iterator[int]:
    """Dispatch all operations in the program's order, waiting for nothing: one host serves all.

    Where the program sums the replicas of a stage, the stage is yielded for the caller to do so.
    A node's device runs its operations in order: each call takes what the call before it returned.
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
