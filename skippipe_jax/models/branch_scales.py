"""Scales of a model's residual branches, folded into its weights.

Attention's output and the feed-forward's down product are linear, so a scaled branch is the same
branch with other weights: the result is a plain LLaMA without scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from skippipe_jax.config.model import StagePartition

SHOWN_DIGITS = 3

ScaleTable = Float[np.ndarray, "kept block 2"]
"""Scales of both branches of all blocks, by the number of stages that run: 1 first, all last."""


@dataclass(frozen=True)
class BranchScales:
    """Scales of the two branches of each block of a whole model."""

    attention: tuple[float, ...]
    feed_forward: tuple[float, ...]

    @classmethod
    def of_stages(cls, scales: Sequence[float], cut: StagePartition) -> BranchScales:
        """Return scales that are the same for all branches of a stage."""
        of_blocks = [
            float(scale) for scale, count in zip(scales, cut, strict=True) for _ in range(count)
        ]
        return cls(tuple(of_blocks), tuple(of_blocks))

    def of_blocks(self, blocks: range) -> Float[np.ndarray, "blocks 2"]:
        """Return the scales of consecutive blocks, in the shape that `folded` takes."""
        both = np.array([self.attention, self.feed_forward], np.float32)
        return both[:, blocks.start : blocks.stop].T

    def folded(self, parameters: Any, cut: StagePartition, stage: int) -> Any:
        """Return the parameters of a stage with its scales folded in."""
        scales = self.of_blocks(cut.blocks(stage))
        return parameters if np.all(scales == 1) else folded(parameters, jnp.asarray(scales))

    def scales_text(self, cut: StagePartition) -> str:
        """Format the scale of each stage, all of whose branches have the same."""
        firsts = (cut.blocks(stage).start for stage in range(len(cut)))
        each = (f"{self.attention[first]:.{SHOWN_DIGITS}g}" for first in firsts)
        return f"by stages {' '.join(each)}"


def folded(parameters: Any, scales: Float[Array, "blocks 2"]) -> Any:
    """Fold scales of attention and of the feed-forward into the parameters of a stage."""
    blocks = dict(parameters["blocks"])
    for place, name in enumerate(("output", "down")):
        kernel = blocks[name]["kernel"]
        wide = scales[:, place, None, None] * kernel.astype(jnp.float32)
        blocks[name] = {**blocks[name], "kernel": wide.astype(kernel.dtype)}
    return {**parameters, "blocks": blocks}
