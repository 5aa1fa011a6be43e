"""Programs that take turns, so that a busy machine slows all of them, or that do so alone."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

T = TypeVar("T")

Iteration = Callable[[Any], float]
"""Runs one iteration on its batches to the end; returns its loss."""

OUT_OF_MEMORY = ("out of memory", "failed to allocate")
"""What XLA says besides its code, which it has for the limits of a kernel too."""


@dataclass(frozen=True)
class OutOfMemory:
    """Something that did not fit; `told` is the first line of what was said of it."""

    told: str


@dataclass(frozen=True)
class Taken:
    """The seconds of each iteration that counts, and the losses of all, also those before."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)


def within_memory(compute: Callable[[], T]) -> T | OutOfMemory:
    """What is computed, or that the device has too little memory; other errors are raised."""
    try:
        return compute()
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        if not _is_out_of_memory(said):
            raise
    # Here the error is gone, and with it what its frames held on the device.
    gc.collect()
    return OutOfMemory(said.splitlines()[0])


def _is_out_of_memory(said: str) -> bool:
    return "RESOURCE_EXHAUSTED" in said and any(mark in said.lower() for mark in OUT_OF_MEMORY)


def in_turns(
    programs: Mapping[str, Iteration], batches: Sequence[Any], warmup: int
) -> dict[str, Taken]:
    """Run each program on the batches of one iteration after another; `warmup` do not count."""
    taken = {name: Taken() for name in programs}
    for turn, own in enumerate(batches):
        for name, iteration in programs.items():
            start = time.perf_counter()
            taken[name].losses.append(iteration(own))
            if turn >= warmup:
                taken[name].seconds.append(time.perf_counter() - start)
    return taken


def in_turns_or_apart(
    creates: Mapping[str, Callable[[], Iteration]], batches: Sequence[Any], warmup: int
) -> tuple[Mapping[str, Taken | OutOfMemory], bool]:
    """The same, of programs to create; and whether there was memory for all of them at once.

    If not, one runs after the other, as far as there is memory for each.
    """

    def those(names: Sequence[str]) -> dict[str, Taken]:
        return in_turns({name: creates[name]() for name in names}, batches, warmup)

    together = within_memory(lambda: those(list(creates)))
    if not isinstance(together, OutOfMemory):
        return together, True
    apart = {name: within_memory(lambda name=name: those([name])) for name in creates}
    return {
        name: own if isinstance(own, OutOfMemory) else own[name] for name, own in apart.items()
    }, False


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios, turn by turn."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def require_alike(taken: Mapping[str, Taken], compute_dtype: str) -> None:
    """Refuse programs that did not do the same work, as their last losses show.

    Raises:
        RuntimeError: if these differ by more than 1e-4 of them, or 1e-2 in bfloat16.
    """
    last = {name: own.losses[-1] for name, own in taken.items()}
    tolerance = 1e-4 if compute_dtype == "float32" else 1e-2
    first = next(iter(last.values()), 0.0)
    if not all(math.isclose(loss, first, rel_tol=tolerance) for loss in last.values()):
        raise RuntimeError(f"the programs differ in their last losses: {last}")
