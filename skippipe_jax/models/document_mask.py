"""Boundaries of documents packed into one sequence, as stages transfer them.

Only the data stage has tokens, so the marks travel with the activations, as one additional channel:
1 where a document begins and 0 elsewhere, which is exact in every dtype. Its gradient is 0. Without
this channel, a sequence is one document.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from skippipe_jax.data.batches import Batch


def marked_tokens(
    batch: Batch,
) -> Int32[np.ndarray, "sequence position"] | Int32[np.ndarray, "sequence position 2"]:
    """Return the tokens of a batch for a data stage, paired with marks if they are packed."""
    if "begins" not in batch:
        return batch["tokens"]
    return np.stack([batch["tokens"], batch["begins"]], axis=-1, dtype=np.int32)


def unmark_tokens(
    tokens: Int[Array, "batch time"] | Int[Array, "batch time 2"],
) -> tuple[Int[Array, "batch time"], Bool[Array, "batch time"] | None]:
    """Return the tokens without marks, and where documents begin, if marked."""
    return (tokens, None) if tokens.ndim == 2 else (tokens[..., 0], tokens[..., 1] != 0)


def mark(
    x: Float[Array, "batch time width"], begins: Bool[Array, "batch time"] | None
) -> Float[Array, "batch time channels"]:
    """Append a channel that marks where documents begin, if that is known."""
    if begins is None:
        return x
    return jnp.concatenate([x, begins[..., None].astype(x.dtype)], axis=-1)


def unmark(
    x: Float[Array, "batch time channels"], width: int
) -> tuple[Float[Array, "batch time width"], Bool[Array, "batch time"] | None]:
    """Return the first `width` channels, and where documents begin, if marked."""
    return (x, None) if x.shape[-1] == width else (x[..., :width], x[..., width] != 0)


def positions_in_documents(begins: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Return the distance of each token from the beginning of its document."""
    place = jnp.arange(begins.shape[1])
    return place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


def within_documents(documents: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time time"]:
    """Return which tokens are in the same document, by the position where it begins."""
    return (documents[:, :, None] == documents[:, None, :])[:, None]
