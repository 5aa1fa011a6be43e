"""Documents packed into one sequence: where they begin, as stages tell one another.

Only the data stage sees tokens, so the marks travel with the activations, as one channel more: 1
where a document begins and 0 elsewhere, which every dtype holds exactly. Its gradient is 0. What
has no such channel is one document from its first position to its last.
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
    """The tokens of a batch as a data stage takes them: paired with marks if they are packed."""
    if "begins" not in batch:
        return batch["tokens"]
    return np.stack([batch["tokens"], batch["begins"]], axis=-1, dtype=np.int32)


def unmark_tokens(
    tokens: Int[Array, "batch time"] | Int[Array, "batch time 2"],
) -> tuple[Int[Array, "batch time"], Bool[Array, "batch time"] | None]:
    """Return the tokens alone, and where documents begin, if that is marked."""
    return (tokens, None) if tokens.ndim == 2 else (tokens[..., 0], tokens[..., 1] != 0)


def mark(
    x: Float[Array, "batch time width"], begins: Bool[Array, "batch time"] | None
) -> Float[Array, "batch time channels"]:
    """Activations with one channel more that says where documents begin, if that is known."""
    if begins is None:
        return x
    return jnp.concatenate([x, begins[..., None].astype(x.dtype)], axis=-1)


def unmark(
    x: Float[Array, "batch time channels"], width: int
) -> tuple[Float[Array, "batch time width"], Bool[Array, "batch time"] | None]:
    """Return the `width` channels that are computed with, and where documents begin, if marked."""
    return (x, None) if x.shape[-1] == width else (x[..., :width], x[..., width] != 0)


def positions_in_documents(begins: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Return how far each token is from the beginning of its document."""
    place = jnp.arange(begins.shape[1])
    return place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


def within_documents(documents: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time time"]:
    """Return which tokens are of one document, told by the places where their documents begin."""
    return (documents[:, :, None] == documents[:, None, :])[:, None]
