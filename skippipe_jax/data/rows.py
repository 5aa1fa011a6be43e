"""Rows of batches from tokens, as windows or document by document, with the loss mask.

Rows are computed once for a text and can be read in any order, so every row occurs once in an
epoch, whichever node reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer


@dataclass(frozen=True, eq=False)
class Learnt:
    """Loss mask as ordered, disjoint spans of tokens; tokens outside of all spans do not count.

    Attributes:
        starts: index of the first token of each span.
        ends: index after the last token of each span.
    """

    starts: Int64[np.ndarray, " stretch"]
    ends: Int64[np.ndarray, " stretch"]

    @classmethod
    def where(cls, is_learnt: Bool[np.ndarray, " token"]) -> Learnt:
        """Return the spans of the tokens for which `is_learnt` is true."""
        switches = np.diff(is_learnt.astype(np.int8), prepend=0, append=0)
        return cls(np.flatnonzero(switches == 1), np.flatnonzero(switches == -1))

    @cached_property
    def _totals(self) -> Int64[np.ndarray, " stretch_or_none"]:
        """Number of tokens in the first n spans, for each n from 0 to all."""
        return np.concatenate([[0], np.cumsum(self.ends - self.starts)])

    @property
    def count(self) -> int:
        """Number of tokens in all spans."""
        return int(self._totals[-1])

    def before(self, places: Integer[np.ndarray, " place"]) -> Int64[np.ndarray, " place"]:
        """Return the number of counted tokens before each place."""
        begun = np.searchsorted(self.starts, places)
        # The last span that has started may extend beyond the place.
        ends = np.concatenate([[0], self.ends])[begun]
        return self._totals[begun] - np.maximum(ends - places, 0)

    def of(self, start: int, stop: int) -> Bool[np.ndarray, " token"]:
        """Return the mask of a span of tokens."""
        first, last = np.searchsorted(self.ends, start, "right"), np.searchsorted(self.starts, stop)
        found = np.zeros(stop - start, bool)
        for begin, end in zip(self.starts[first:last], self.ends[first:last], strict=True):
            found[max(begin - start, 0) : end - start] = True
        return found


# Target of a position that the loss leaves out.
NOT_COUNTED = -1


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
    """Concatenated documents: their tokens, the end of each, and the loss mask.

    `learnt` is None if all targets count; only conversations have targets that do not.
    """

    tokens: TokenArray
    ends: Int64[np.ndarray, " document"]
    learnt: Learnt | None = None


class Rows(Protocol):
    """Rows that batches are made of."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def fill(
        self,
        index: int,
        tokens: Int32[np.ndarray, " position"],
        targets: Int32[np.ndarray, " position"],
        begins: Bool[np.ndarray, " position"],
    ) -> None:
        """Write one row to the start of the arrays, which hold padding."""
        ...


class Windows:
    """Non-overlapping windows over all documents: a sequence and the target of its last token."""

    def __init__(self, documents: TokenizedDocuments, sequence_length: int):
        """Split the tokens into windows; an incomplete window at the end is left out."""
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
        """Write one window, without marking documents."""
        window = self._tokens[index * self._length : (index + 1) * self._length]
        tokens[:], targets[:] = window[:-1], window[1:]


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents that are read: whole documents, or parts of those longer than a row.

    Positions start at 0 in each piece, and attention does not reach earlier pieces.

    Attributes:
        starts: index of the first token of each piece.
        ends: end of its positions. The token there, if the document has one, is its last target.
        limits: end of its document.
        too_long: number of documents longer than a row.
        left_out: number of these of which nothing is read.
    """

    starts: Int64[np.ndarray, " piece"]
    ends: Int64[np.ndarray, " piece"]
    limits: Int64[np.ndarray, " piece"]
    too_long: int
    left_out: int


def cut(documents: TokenizedDocuments, length: int, too_long: str) -> Pieces:
    """Return the pieces of all documents for rows of `length` tokens.

    A document that fits into a row is one piece. A longer one is left out (`too_long` is "drop"),
    reduced to its first `length` tokens ("truncate"), or split into full rows and a piece for the
    rest ("split"). A rest of one token makes no piece: it is the last target of the previous one.
    Pieces without trained tokens are left out: an iteration of them alone would have no loss.
    """
    sizes = np.diff(documents.ends, prepend=0)
    # The last token is only a target.
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
        before = documents.learnt.before
        is_learnt = before(np.minimum(ends + 1, limits)) > before(starts + 1)
        document, starts, ends, limits = (
            bounds[is_learnt] for bounds in (document, starts, ends, limits)
        )
    left_out = np.setdiff1d(np.flatnonzero(is_too_long), document)
    return Pieces(starts, ends, limits, int(is_too_long.sum()), len(left_out))


class PackedDocuments:
    """Rows packed with documents and pieces by best-fit decreasing.

    The target of a document's last token does not count, so in a document that is read completely
    every other token is a target once.
    """

    def __init__(self, documents: TokenizedDocuments, pieces: Pieces, sequence_length: int):
        """Assign every piece to a row."""
        self._tokens, self._learnt = documents.tokens, documents.learnt
        self._starts, self._ends, self._limits = pieces.starts, pieces.ends, pieces.limits
        row_of = pack(self._ends - self._starts, sequence_length)
        # A stable sort keeps the order of the text within a row.
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
        """Write the documents of one row, and mark the start of each."""
        position = 0
        for piece in self._order[self._bounds[index] : self._bounds[index + 1]]:
            start, end, limit = (
                int(bounds[piece]) for bounds in (self._starts, self._ends, self._limits)
            )
            last = min(end + 1, limit)
            read = self._tokens[start:last]
            following = read[1:].astype(np.int32)
            if self._learnt is not None:
                following[~self._learnt.of(start + 1, last)] = NOT_COUNTED
            tokens[position : position + end - start] = read[: end - start]
            targets[position : position + len(following)] = following
            begins[position] = True
            position += end - start


def pack(lengths: Integer[np.ndarray, " piece"], row_length: int) -> Int64[np.ndarray, " piece"]:
    """Return the row of each piece: the longest first, each in the fullest row with room for it.

    Lengths are between 1 and `row_length`.
    """
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    lasts = np.append(firsts, len(lengths))[1:].tolist()
    # Rows by their remaining room, each list in the order of insertion.
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
        """Compute one cycle with `shares[i]` rows of source i."""
        # The j-th row of a source with share s is at (j + 1/2) / s of the cycle.
        places = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        source = np.repeat(np.arange(len(shares)), shares)
        number = np.concatenate([np.arange(share) for share in shares])
        order = np.argsort(places, kind="stable")
        self._shares = tuple(shares)
        self._source, self._number = source[order], number[order]

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the source of row `index` of the mixture, and the row's index in that source."""
        cycle, place = divmod(index, len(self._source))
        source = int(self._source[place])
        return source, cycle * self._shares[source] + int(self._number[place])
