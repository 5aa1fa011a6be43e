"""Averaging of a stage's replicas: within each iteration, or in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from skippipe_sched import fields
from skippipe_sched.errors import InputError

Mode = Literal["exact", "outer"]
AVERAGING_MODES: tuple[Mode, ...] = ("exact", "outer")
# Bytes of a transferred number. Each group of 8-bit numbers has a scale of four bytes.
NUMBERS_OF_A_SCALE, SCALE_BYTES = 128, 4
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + SCALE_BYTES / NUMBERS_OF_A_SCALE}
# A cycle is simulated iteration by iteration.
MOST_ITERATIONS = 1_000
DEFAULTS: dict[str, Any] = {"every": 20, "fragments": 4, "delay": 1, "dtype": "int8"}


@dataclass(frozen=True)
class AveragingPolicy:
    """Data that the replicas of a stage send each other, and when.

    Attributes:
        mode: `exact`: replicas sum their gradients in every iteration, and all end it together.
            `outer`: each replica takes local steps, and their outer gradients are averaged in the
            background.
        every: iterations of a cycle, in which everything is averaged once.
        fragments: number of parts that are averaged separately, evenly over the cycle.
        delay: number of iterations between the end of the iteration at which a fragment is sent and
            the end of the one at which it is applied.
        dtype: of the transferred numbers.
    """

    mode: Mode = "exact"
    every: int = 1
    fragments: int = 1
    delay: int = 0
    dtype: str = "float32"

    @property
    def is_outer(self) -> bool:
        """True if iterations follow one another without waiting for averaging."""
        return self.mode == "outer"

    def fragment_sent_after(self, iteration: int) -> int | None:
        """Return the fragment that is sent at the end of an iteration; None if none is.

        Iterations count from 1. Of n fragments the k-th is sent after k / n of a cycle, rounded
        down to whole iterations: the last one at every multiple of `every`.
        """
        position = (iteration - 1) % self.every + 1
        # The first fragment that is not sent earlier.
        number = -(-position * self.fragments // self.every)
        return number - 1 if number * self.every // self.fragments == position else None

    def fragment_bytes(self, stage_bytes: float) -> float:
        """Return the bytes of one message about a fragment, of `stage_bytes` in float32."""
        return stage_bytes / self.fragments * WIDTHS[self.dtype] / WIDTHS["float32"]


EXACT = AveragingPolicy()


def parse_averaging(value: Any, field: str) -> AveragingPolicy:
    """Read the policy from a mapping; missing keys have their `DEFAULTS`.

    Raises:
        InputError: naming the key below `field`.
    """
    if isinstance(value, str):
        problem = "must be a mapping; auto works only in a case that is the plan.case of a run"
        raise InputError(field, value, problem, "Write {mode: outer}, or remove this key (exact)")
    raw = fields.checked_mapping(value, field, ("mode", *DEFAULTS))
    mode = fields.text(raw.get("mode", EXACT.mode), f"{field}.mode", AVERAGING_MODES)
    if mode == EXACT.mode:
        for key in DEFAULTS:
            if key in raw:
                raise InputError(
                    f"{field}.{key}",
                    raw[key],
                    "requires mode: outer; with mode: exact, replicas average in every iteration",
                    "Remove this key, or write mode: outer",
                )
        return EXACT
    raw = DEFAULTS | raw
    every = fields.integer(raw["every"], f"{field}.every", 1, MOST_ITERATIONS)
    fragments = fields.integer(raw["fragments"], f"{field}.fragments", 1)
    if fragments > every:
        problem = f"must be at most every = {every}, as an iteration sends at most one fragment"
        remedy = f"Write {every} or less, or raise every to {fragments}"
        raise InputError(f"{field}.fragments", fragments, problem, remedy)
    delay = fields.integer(raw["delay"], f"{field}.delay", 0)
    if delay >= every:
        raise InputError(
            f"{field}.delay",
            delay,
            f"must be less than every = {every}, as a fragment is applied before it is sent again",
            f"Write {every - 1} or less, or raise every to {delay + 1}",
        )
    dtype = fields.text(raw["dtype"], f"{field}.dtype", tuple(WIDTHS))
    return AveragingPolicy("outer", every, fragments, delay, dtype)
