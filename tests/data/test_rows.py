"""Packing fills rows well and loses nothing that is learnt, and mixtures are exact."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.data.rows import (
    IGNORED_TARGET,
    Interleaving,
    PackedDocuments,
    TokenizedDocuments,
    cut_documents,
    pack,
)


def packed(documents: TokenizedDocuments, length: int) -> PackedDocuments:
    return PackedDocuments(documents, cut_documents(documents, length, "split"), length)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 40))
def test_no_row_holds_more_than_it_can_and_few_could_be_saved(data, row_length):
    lengths = np.array(data.draw(st.lists(st.integers(1, row_length), max_size=60)), np.int64)
    rows = pack(lengths, row_length)
    filled = np.bincount(rows, lengths, 0).astype(int)
    assert (filled <= row_length).all()
    assert (filled > 0).all()
    # What best-fit-decreasing promises, against a bound below the best there is.
    least = -(-int(lengths.sum()) // row_length)
    assert len(filled) <= max(1.7 * least, 1) + 1 or not len(lengths)
    np.testing.assert_array_equal(rows, pack(lengths, row_length))


def test_many_short_documents_leave_little_padding():
    lengths = np.random.default_rng(0).geometric(1 / 150, 20_000).clip(2, 1024)
    rows = pack(lengths, 1024)
    assert lengths.sum() / ((rows.max() + 1) * 1024) > 0.995


@settings(max_examples=150)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 12), st.data())
def test_rows_hold_every_document_piece_by_piece(sizes, length, data):
    """Every row has something to learn, and nothing learnt is left out."""
    ends = np.cumsum(sizes)
    tokens = np.arange(int(ends[-1]), dtype=np.int32)
    learnt = tokens % 3 != 0
    if data.draw(st.booleans()):  # As in conversations: long stretches of one kind.
        switches = data.draw(st.lists(st.integers(0, int(ends[-1])), max_size=6))
        learnt = np.searchsorted(np.sort(switches), tokens, side="right") % 2 == 1
    rows = packed(TokenizedDocuments(tokens, ends, learnt), length)
    targets_seen = []
    for index in range(len(rows)):
        row, targets = np.full(length, -7, np.int32), np.full(length, IGNORED_TARGET, np.int32)
        begins = np.zeros(length, bool)
        rows.fill(index, row, targets, begins)
        counted = targets != IGNORED_TARGET
        assert counted.any()
        np.testing.assert_array_equal(targets[counted], row[counted] + 1)
        targets_seen += targets[counted].tolist()
        used = row != -7
        jumps = np.flatnonzero(np.diff(row[used]) != 1) + 1
        assert begins[0]
        assert set(jumps) <= set(np.flatnonzero(begins))
    first = np.concatenate([[0], ends[:-1]])
    assert sorted(targets_seen) == [n for n in tokens if n not in first and learnt[n]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 10**12))
def test_every_cycle_has_every_share_and_every_source_its_rows_in_turn(shares, cycle):
    mixture = Interleaving(shares)
    length = sum(shares)
    found = [mixture[cycle * length + place] for place in range(length)]
    for source, share in enumerate(shares):
        rows = [row for one, row in found if one == source]
        assert rows == list(range(cycle * share, (cycle + 1) * share))


def test_sources_are_mixed_evenly():
    mixture = Interleaving([70, 20, 10])
    sources = np.array([mixture[index][0] for index in range(1000)])
    for start in range(900):
        counts = np.bincount(sources[start : start + 50], minlength=3)
        assert np.abs(counts - [35, 10, 5]).max() <= 2


def test_what_is_longer_than_a_row_is_split_or_truncated_or_left_out():
    # Five fit: the last token of a document is a target only.
    ends = np.cumsum([3, 5, 6, 13])
    learnt = np.arange(27) != 20  # so that all but one of them are learnt
    documents = TokenizedDocuments(np.arange(27), ends, learnt)
    spans = {
        way: list(zip(pieces.starts.tolist(), pieces.ends.tolist(), strict=True))
        for way in ("split", "truncate", "drop")
        if (pieces := cut_documents(documents, 4, way)).too_long == 2
    }
    short = [(0, 3), (3, 7)]
    assert spans == {
        "split": [*short, (8, 12), (12, 14), (14, 18), (18, 22), (22, 26)],
        "truncate": [*short, (8, 12), (14, 18)],
        "drop": short,
    }
    assert [cut_documents(documents, 4, way).left_out for way in spans] == [0, 0, 2]


def test_a_document_whose_beginning_has_nothing_to_learn_is_left_out_where_it_is_truncated():
    ends, tokens = np.array([6, 12]), np.arange(12)
    pieces = cut_documents(TokenizedDocuments(tokens, ends, tokens >= 4), 3, "truncate")
    assert (pieces.starts.tolist(), pieces.too_long, pieces.left_out) == ([6], 2, 1)
    # The token after the last one that is kept is its target.
    documents = TokenizedDocuments(tokens, ends, np.isin(tokens, [3, 9]))
    rows = PackedDocuments(documents, cut_documents(documents, 3, "truncate"), 3)
    targets = np.full(3, IGNORED_TARGET, np.int32)
    rows.fill(0, np.zeros(3, np.int32), targets, np.zeros(3, bool))
    assert (len(rows), targets.tolist()) == (2, [IGNORED_TARGET, IGNORED_TARGET, 3])
