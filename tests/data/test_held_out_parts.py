"""Held-out documents in two parts, the domains of a mixture, and where documents start."""

import copy
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig, MixtureConfig
from skippipe_jax.data.batches import document_starts, held_out_batches
from skippipe_jax.data.corpus import documents_of_part
from skippipe_jax.data.rows import IGNORED_TARGET, TokenizedDocuments
from skippipe_jax.data.tokenizer import ByteTokenizer
from tests.harness.messages import refusal

LENGTH = 15

# Of each token, what it is and whether it is learnt.
DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=6).map(tuple),
    min_size=1,
    max_size=12,
)


def together(documents, *, chat: bool) -> TokenizedDocuments:
    tokens, learnt = np.array([*itertools.chain(*documents)]).T
    ends = np.cumsum([len(one) for one in documents])
    return TokenizedDocuments(tokens.astype(np.uint16), ends, learnt.astype(bool) if chat else None)


def apart(documents: TokenizedDocuments) -> list[tuple]:
    """Each document as pairs of a token and whether it is learnt."""
    marks = np.ones(documents.tokens.size, bool) if documents.learnt is None else documents.learnt
    starts = [0, *documents.ends[:-1]]
    both = list(zip(documents.tokens[:].tolist(), marks.tolist(), strict=True))
    return [tuple(both[start:end]) for start, end in zip(starts, documents.ends, strict=True)]


def tokens_of(document) -> tuple[int, ...]:
    return tuple(token for token, _ in document)


@settings(max_examples=100)
@given(DOCUMENTS, st.booleans())
def test_parts_never_meet_and_are_all_there_is(documents, chat):
    whole = together(documents, chat=chat)
    priors, scores = (apart(documents_of_part(whole, part)) for part in ("priors", "scores"))
    assert priors
    assert scores
    if len({tokens_of(one) for one in documents}) > 1:
        assert Counter(priors + scores) == Counter(apart(whole))
        assert not {*map(tokens_of, priors)} & {*map(tokens_of, scores)}
        # In the order of the text.
        for part in (priors, scores):
            rest = iter(apart(whole))
            assert all(one in rest for one in part)
    else:
        joined = [begin + end for begin, end in zip(priors, scores, strict=True)]
        assert joined == apart(whole)
        assert len({*map(tokens_of, priors)}) == 1
        assert len(priors[0]) == max(round(len(documents[0]) / 4), 1)


@given(DOCUMENTS, st.randoms())
def test_neither_order_nor_dtype_nor_what_is_learnt_moves_a_document(documents, random):
    whole = together(documents, chat=False)
    other = together(random.sample(documents, len(documents)), chat=True)
    other = replace(other, tokens=np.asarray(other.tokens).astype(np.int32))
    for part in ("priors", "scores"):
        first, second = (
            Counter(map(tokens_of, apart(documents_of_part(own, part)))) for own in (whole, other)
        )
        assert first == second


def test_about_a_quarter_is_for_priors_and_no_other_document_moves_one():
    documents = [tuple((n // 10**k % 10, True) for k in range(4)) for n in range(2000)]
    count = len(apart(documents_of_part(together(documents, chat=False), "priors")))
    assert 420 < count < 580
    few = {*apart(documents_of_part(together(documents[:900], chat=False), "priors"))}
    every = {*apart(documents_of_part(together(documents, chat=False), "priors"))}
    assert few == every & {*documents[:900]}


def mixture(folder: Path, **changes) -> DataConfig:
    """Two domains of files, and one that is a single file."""
    for name, letter in (("small", "s"), ("large", "l")):
        (folder / name).mkdir()
        for number in range(24):
            (folder / name / f"{number}").write_text(f"{letter}{number:02}" * (number % 7 + 2))
    (folder / "alone").write_text("".join(f"a{number:03}" for number in range(100)))
    sources = (
        MixtureConfig("text", str(folder / "small")),
        MixtureConfig("text", str(folder / "large"), name="LARGE"),
        MixtureConfig("text", str(folder / "alone")),
    )
    config = DataConfig(source="mixture", mixture=sources, sequence_length=LENGTH, held_out=0.5)
    return replace(config, **changes)


def same(first, second) -> bool:
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)
        for one, other in zip(first, second, strict=True)
    )


def pairs(batches) -> Counter:
    """Every target that counts, with its token."""
    found = Counter()
    for batch in batches:
        counted = batch["targets"] != IGNORED_TARGET
        found.update(zip(batch["tokens"][counted], batch["targets"][counted], strict=True))
    return found


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_domain_and_its_parts_are_read_alone(tmp_path, packing):
    config = mixture(tmp_path, packing=packing)
    assert config.domains() == ("small", "LARGE", "alone")
    every = list(held_out_batches(config, 3))
    assert same(every, held_out_batches(config, 3, part="all", domain=None))
    domains = [list(held_out_batches(config, 3, domain=name)) for name in config.domains()]
    assert sum(map(pairs, domains), Counter()) == pairs(every)
    one = replace(config, source="text", path=str(tmp_path / "small"), mixture=None)
    assert same(domains[0], held_out_batches(one, 3))
    assert one.domains() == ("small",)
    for name, own in zip(config.domains()[:2], domains, strict=False):
        parts = [
            pairs(held_out_batches(config, 3, part=p, domain=name)) for p in ("priors", "scores")
        ]
        assert parts[0].total() < parts[1].total()
        if packing == "documents":
            # Every number is of one document, so the parts share only letters and marks.
            assert parts[0] + parts[1] == pairs(own)
    for part in ("priors", "scores"):
        of_part = list(held_out_batches(config, 1, part=part))
        each = [held_out_batches(config, 1, part=part, domain=name) for name in config.domains()]
        assert sum(map(pairs, each), Counter()) == pairs(of_part)


def test_a_part_shorter_than_a_sequence_is_named(tmp_path):
    config = mixture(tmp_path, sequence_length=150)
    assert list(held_out_batches(config, 1, domain="alone"))
    with refusal("data.sequence_length = ...for priors of the domain alone has 50 tokens"):
        held_out_batches(config, 1, part="priors", domain="alone")
    with pytest.raises(InputError, match="part = 'prior': unknown name"):
        held_out_batches(config, 1, part="prior")
    with pytest.raises(InputError, match="domain = 'medium': unknown name"):
        held_out_batches(config, 1, domain="medium")


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ([("text", "a/books")], ["books"]),
        (
            [("text", "a/books/"), ("text", "b/books"), ("python", None)],
            ["books", "books-2", "python"],
        ),
        ([("jsonl", "code/*.jsonl"), ("jsonl", "gs://bucket/wiki/**/*.gz")], ["code", "wiki"]),
        ([("text", "."), ("text", "~"), ("jsonl", "../*")], ["text", "text-2", "jsonl"]),
    ],
)
def test_a_domain_without_a_name_is_called_after_its_path(sources, names):
    mixture = [MixtureConfig(*one) for one in sources]
    assert list(DataConfig(source="mixture", mixture=tuple(mixture)).domains()) == names
    # A name that is given is nobody else's.
    mixture.append(MixtureConfig("python", name=names[0]))
    last = DataConfig(source="mixture", mixture=tuple(mixture)).domains()
    assert last[-1] == names[0] != last[0]


@pytest.mark.parametrize(("name", "problem"), [("books", "two domains"), ("", "must be text")])
def test_a_wrong_name_is_refused(name, problem):
    sources = tuple(MixtureConfig("python", name=one) for one in ("books", name))
    with refusal(f"data.mixture[1].name = ...{problem}"):
        DataConfig(source="mixture", mixture=sources)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_document_starts(tmp_path, packing):
    config = mixture(tmp_path, packing=packing)
    inside = 0
    for batch in held_out_batches(config, 4, domain="small"):
        kept = copy.deepcopy(batch)
        starts = document_starts(batch, ByteTokenizer.begin)
        assert same([batch], [kept])
        expected = batch["tokens"] == ByteTokenizer.begin
        if "begins" in batch:
            assert (starts[:, 1:] == batch["begins"][:, 1:]).all()
            # Pieces of documents that are too long start anew, too.
            assert not (expected & ~starts).any()
        expected[:, 0] = True
        assert starts[:, 0].all()
        if "begins" not in batch:
            assert (starts == expected).all()
        inside += starts[:, 1:].sum()
    assert inside
