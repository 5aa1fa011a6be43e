"""Held-out documents in two parts that never meet: one to estimate priors on, one to score."""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Int64, Integer

from skippipe_jax.data.corpus import held_out_of
from skippipe_jax.data.learnt import Learnt
from skippipe_jax.data.rows import TokenizedDocuments

PRIORS_SHARE = 0.25
"""About which share of the held-out documents priors are estimated on."""


def part_of(documents: TokenizedDocuments, part: str) -> TokenizedDocuments:
    """Return the documents of the part `priors` or `scores`, as a copy in memory.

    A document belongs to one part as a whole, by a hash of its tokens alone, so equal ones are in
    the same part, whatever the seeds of a run. Where that would leave one of the parts empty, the
    nearest documents move, as among all that are held out. A document that is alone, or has only
    copies beside it, is cut in two at a token; its beginning is for priors.
    """
    ends = np.asarray(documents.ends)
    starts = ends - np.diff(ends, prepend=0)
    keys = [
        _digest(documents.tokens[start:end])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    if len(set(keys)) == 1:
        size = int(ends[0])
        cuts = starts + min(max(round(size * PRIORS_SHARE), 1), size - 1)
        return _spans(documents, *((starts, cuts) if part == "priors" else (cuts, ends)))
    chosen = held_out_of(keys, PRIORS_SHARE, seed=0) == (part == "priors")
    return _spans(documents, starts[chosen], ends[chosen])


def _digest(tokens: Integer[np.ndarray, " token"]) -> bytes:
    # Not as they lie there: tokens on disk may have another dtype than those of a text.
    return hashlib.blake2b(tokens.astype(np.int32).data, digest_size=16).digest()


def _spans(
    documents: TokenizedDocuments,
    starts: Int64[np.ndarray, " span"],
    ends: Int64[np.ndarray, " span"],
) -> TokenizedDocuments:
    """Spans of the tokens, each as a document."""
    each = list(zip(starts.tolist(), ends.tolist(), strict=True))
    learnt = None
    if documents.learnt is not None:
        learnt = Learnt.where(np.concatenate([documents.learnt.of(*span) for span in each]))
    tokens = np.concatenate([documents.tokens[start:end] for start, end in each])
    return TokenizedDocuments(tokens, np.cumsum(ends - starts), learnt)
