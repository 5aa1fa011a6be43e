"""Rows of batches from tokens: windows or packed documents, with the loss mask.

Rows are computed once for a text and can be read in any order, so that every row is read once in an
epoch, by any host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

# Target of a position that the loss ignores.
IGNORED_TARGET = -1


class TokenArray(Protocol):
    """Tokens of which spans can be read: an array, or files with the same interface."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        ...

    def __getitem__(self, span: slice, /) -> Integer[np.ndarray, " token"]:
        """Return the tokens of a span without a step."""
        ...


@dataclass(frozen=True)
class TokenizedDocuments:
    """Concatenated documents: their tokens, where each ends, and the loss mask.

    `learnt` is true for the tokens that are trained on. It is None if all are; only conversations
    have others.
    """

    tokens: TokenArray
    ends: Int64[np.ndarray, " document"]
    learnt: Bool[np.ndarray, " token"] | None = None


class Windows:
    """Non-overlapping windows over all documents: a sequence and the target of its last token."""

    def __init__(self, documents: TokenizedDocuments, sequence_length: int):
        """Divide the tokens into windows; a shorter rest at their end is left out."""
        self._tokens = documents.tokens
        self._length = sequence_length + 1

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._tokens.size // self._length

    def fill(
        self,
        index: int,
        tokens: Int32[np.ndarray, " position"],
        targets: Int32[np.ndarray, " position"],
        begins: Bool[np.ndarray, " position"],
    ) -> None:
        """Write one window; documents are not marked."""
        window = self._tokens[index * self._length : (index + 1) * self._length]
        tokens[:], targets[:] = window[:-1], window[1:]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that are read: whole ones, or pieces of those longer than a row.

    A piece has positions of its own, and does not attend to earlier pieces.

    Attributes:
        starts: first token of each piece, among all tokens.
        ends: where its positions end. The token there, if in the document, is its last target.
        limits: where its document ends.
        too_long: number of documents that are longer than a row.
        left_out: number of these of which nothing is read.
    """

    starts: Int64[np.ndarray, " piece"]
    ends: Int64[np.ndarray, " piece"]
    limits: Int64[np.ndarray, " piece"]
    too_long: int
    left_out: int


def cut_documents(documents: TokenizedDocuments, length: int, too_long: str) -> Pieces:
    """Return the pieces of all documents for rows of `length` tokens.

    A document that fits into a row is one piece. A longer one is left out (`too_long` is "drop"),
    cut to its first `length` tokens ("truncate"), or divided into full rows and a piece for the
    rest ("split"), unless the rest is one token: the piece before has it as a target. Pieces
    without tokens to train on are left out: an iteration of them alone would have no loss.
    """
    sizes = np.diff(documents.ends, prepend=0)
    # The last token is a target only.
    counts = np.maximum(-(-(sizes - 1) // length), 0)
    is_too_long = counts > 1
    if too_long == "drop":
        counts[is_too_long] = 0
    elif too_long == "truncate":
        counts[is_too_long] = 1
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (documents.ends - sizes)[document] + number * length
    limits = documents.ends[document]
    ends = np.minimum(starts + length, limits)
    if documents.learnt is not None:
        # Every second interval lies between the targets of two pieces.
        bounds_of_targets = np.stack([starts + 1, np.minimum(ends + 1, limits)], axis=1).ravel()
        with_end = np.append(documents.learnt, False)
        is_learnt = np.logical_or.reduceat(with_end, bounds_of_targets)[::2]
        document, starts, ends, limits = (
            bounds[is_learnt] for bounds in (document, starts, ends, limits)
        )
    left_out = np.setdiff1d(np.flatnonzero(is_too_long), document)
    return Pieces(starts, ends, limits, int(is_too_long.sum()), len(left_out))


class PackedDocuments:
    """Rows of documents and pieces of them, packed by best-fit decreasing.

    The target of a document's last token does not count. In a document that is read in full, each
    token except the first is a target once.
    """

    def __init__(self, documents: TokenizedDocuments, pieces: Pieces, sequence_length: int):
        """Assign each piece to a row."""
        self._tokens, self._learnt = documents.tokens, documents.learnt
        self._starts, self._ends, self._limits = pieces.starts, pieces.ends, pieces.limits
        row_of = pack(self._ends - self._starts, sequence_length)
        # Stable, so that documents are in the order of the text within a row.
        self._order = np.argsort(row_of, kind="stable")
        rows = row_of.max(initial=-1) + 1
        self._bounds = np.searchsorted(row_of[self._order], np.arange(rows + 1))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._bounds) - 1

    def fill(
        self,
        index: int,
        tokens: Int32[np.ndarray, " position"],
        targets: Int32[np.ndarray, " position"],
        begins: Bool[np.ndarray, " position"],
    ) -> None:
        """Write the documents of one row into the beginnings of the arrays, which hold padding.

        The first token of each document is marked in `begins`.
        """
        position = 0
        for piece in self._order[self._bounds[index] : self._bounds[index + 1]]:
            start, end, limit = (
                int(bounds[piece]) for bounds in (self._starts, self._ends, self._limits)
            )
            last = min(end + 1, limit)
            span = self._tokens[start:last]
            next_tokens = span[1:].astype(np.int32)
            if self._learnt is not None:
                next_tokens[~self._learnt[start + 1 : last]] = IGNORED_TARGET
            tokens[position : position + end - start] = span[: end - start]
            targets[position : position + len(next_tokens)] = next_tokens
            begins[position] = True
            position += end - start


Rows = Windows | PackedDocuments
"""Rows of which batches are made."""


def pack(lengths: Integer[np.ndarray, " piece"], row_length: int) -> Int64[np.ndarray, " piece"]:
    """Return the row of each piece: longest first, each into the fullest row with room for it.

    Lengths are between 1 and `row_length`.
    """
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    lasts = np.append(firsts, len(lengths))[1:].tolist()
    # Rows by the room that they have left, each list in order of arrival.
    with_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    count = np.zeros(row_length + 1, np.int64)
    rows = 0
    for size, first, last in zip((-sizes).tolist(), firsts.tolist(), lasts, strict=True):
        while first < last:
            fitting = np.flatnonzero(count[size:])
            if not len(fitting):
                needed = -(-(last - first) // (row_length // size))
                with_room[row_length] += range(rows, rows + needed)
                rows += needed
                count[row_length] += needed
                continue
            room = size + int(fitting[0])
            taken = with_room[room][first - last :]
            del with_room[room][first - last :]
            with_room[room - size] += taken
            count[room] -= len(taken)
            count[room - size] += len(taken)
            row_of[order[first : first + len(taken)]] = taken
            first += len(taken)
    return row_of


class Interleaving:
    """Rows of several sources in exact proportions, evenly mixed."""

    def __init__(self, shares: Sequence[int]):
        """Order the rows of one cycle, which has `shares` rows of each source."""
        # The j-th row of a source with share s belongs at (j + 1/2) / s of the cycle.
        places = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        source = np.repeat(np.arange(len(shares)), shares)
        number = np.concatenate([np.arange(share) for share in shares])
        order = np.argsort(places, kind="stable")
        self._shares = tuple(shares)
        self._source, self._number = source[order], number[order]

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the source of row `index` of the mixture, and the number of the row in it."""
        cycle, place = divmod(index, len(self._source))
        source = int(self._source[place])
        return source, cycle * self._shares[source] + int(self._number[place])
