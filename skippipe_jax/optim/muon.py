"""Muon: updates of the matrices of blocks by their orthogonalized momentum.

Optax computes momentum and orthogonalization (https://kellerjordan.github.io/posts/muon). An update
is scaled to about the root mean square of an AdamW update, for the same learning rate and decay
(https://arxiv.org/abs/2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Int, PyTree

from skippipe_jax.config.optimizer import ADAMW, MUON

UPDATE_RMS = 0.2
"""Root mean square of the update of a matrix, before the learning rate."""


class MuonState(NamedTuple):
    """Number of updates made, and momentum of each matrix."""

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree


def labels(parameters: PyTree) -> PyTree:
    """Name the rule of each parameter of a stage: Muon for stacked matrices of blocks."""

    def rule(path: tuple[Any, ...], leaf: Array) -> str:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return MUON if "blocks" in names and leaf.ndim == 3 else ADAMW

    return jax.tree_util.tree_map_with_path(rule, parameters)


def scale_by_muon(momentum: float) -> optax.GradientTransformationExtraArgs:
    """Make Muon's update of matrices [block, in, out]; if it `is_skipped`, the state stays."""

    def dimensions(matrices: PyTree) -> PyTree:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), matrices)

    rule = optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=dimensions)

    def init(params: Any) -> MuonState:
        first: Any = rule.init(params)
        return MuonState(first.count, first.mu)

    def update(updates: Any, state: Any, params: Any = None, *, is_skipped: Any = False) -> Any:
        coefficients: Any = rule.init({})
        whole = coefficients._replace(count=state.count, mu=state.mu)
        # Replicas on devices of different kinds would round products differently.
        with jax.default_matmul_precision("highest"):
            orthogonal, after = rule.update(updates, whole, params)
        following: Any = after
        new = MuonState(following.count, following.mu)
        scaled = jax.tree.map(
            lambda matrix: UPDATE_RMS * math.sqrt(max(matrix.shape[1:])) * matrix, orthogonal
        )
        return scaled, optax.tree.where(is_skipped, state, new)

    return optax.GradientTransformationExtraArgs(init, update)
