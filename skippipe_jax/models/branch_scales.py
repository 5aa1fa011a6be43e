"""Numbers that what a model's residual branches add is multiplied by, folded into its weights.

Attention's output and the feed-forward's down product are linear, so a branch times a number is the
same branch with other weights: what is folded is a plain LLaMA, wherever it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from skippipe_jax.config.model import StageCut

SHOWN_DIGITS = 3

ScaleTable = Float[np.ndarray, "kept block 2"]
"""The scales of both branches of all blocks: first those where one stage runs, at last all do."""


@dataclass(frozen=True)
class BranchScales:
    """What the two branches of each block of a whole model are multiplied by."""

    attention: tuple[float, ...]
    feed_forward: tuple[float, ...]

    @classmethod
    def of_stages(cls, scales: Sequence[float], cut: StageCut) -> BranchScales:
        """Return the same number for all branches of a stage."""
        of_blocks = [
            float(scale) for scale, count in zip(scales, cut, strict=True) for _ in range(count)
        ]
        return cls(tuple(of_blocks), tuple(of_blocks))

    def of_blocks(self, blocks: range) -> Float[np.ndarray, "blocks 2"]:
        """Return the scales of some consecutive blocks, as `folded` takes them."""
        both = np.array([self.attention, self.feed_forward], np.float32)
        return both[:, blocks.start : blocks.stop].T

    def folded(self, parameters: Any, cut: StageCut, stage: int) -> Any:
        """Return the parameters of a stage with its scales in them."""
        scales = self.of_blocks(cut.blocks(stage))
        return parameters if np.all(scales == 1) else folded(parameters, jnp.asarray(scales))

    def told(self, cut: StageCut) -> str:
        """The scales for a reader: one for each stage if its branches agree, else all of them."""
        of_stages = [self.of_blocks(cut.blocks(stage)) for stage in range(len(cut))]
        if all(np.ptp(scales) == 0 for scales in of_stages):
            return f"by stages {_listed([float(scales[0, 0]) for scales in of_stages])}"
        return (
            f"by blocks, attention {_listed(self.attention)}, "
            f"feed-forward {_listed(self.feed_forward)}"
        )


def folded(parameters: Any, scales: Float[Array, "blocks 2"]) -> Any:
    """The parameters of a stage whose branches are multiplied: attention's, the feed-forward's."""
    blocks = dict(parameters["blocks"])
    for place, name in enumerate(("output", "down")):
        kernel = blocks[name]["kernel"]
        wide = scales[:, place, None, None] * kernel.astype(jnp.float32)
        blocks[name] = {**blocks[name], "kernel": wide.astype(kernel.dtype)}
    return {**parameters, "blocks": blocks}


def _listed(scales: Sequence[float]) -> str:
    return " ".join(f"{scale:.{SHOWN_DIGITS}g}" for scale in scales)
