"""Pieces of text: they end between characters, and before what ends an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from skippipe_jax.inference.text_stream import REPLACEMENT, AnswerText, TextStream

# No character of its own that stands for a broken one.
TEXTS = st.text(st.characters(exclude_characters=REPLACEMENT, exclude_categories=["Cs"]))
BYTES = ByteTokenizer()


def pieces_of(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*map(stream.push, tokens), stream.rest()]


@given(TEXTS, TEXTS, st.data())
def test_no_piece_ends_within_a_character(prompt: str, text: str, data: st.DataObject):
    before, tokens = BYTES.encode(prompt).tolist(), BYTES.encode(text).tolist()
    for _ in range(data.draw(st.integers(0, 2))):  # Marks, which have no text.
        tokens.insert(data.draw(st.integers(0, len(tokens))), BYTES.end)
    pieces = pieces_of(TextStream(BYTES.decode, before), tokens)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, 258), max_size=300), st.lists(st.integers(0, 258)))
def test_whatever_bytes_come_their_text_is_told_once(tokens: list[int], prompt: list[int]):
    # A prompt that ends within a character leaves that to whoever wrote it.
    prompt = [*prompt, ord(".")]
    pieces = pieces_of(TextStream(BYTES.decode, prompt), tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


@given(st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0x80, 0xFF]), min_size=100, max_size=400))
def test_of_bytes_that_are_no_text_few_are_held_back(tokens: list[int]):
    stream, told = TextStream(BYTES.decode, []), ""
    for count, token in enumerate(tokens, 1):
        told += stream.push(token)
        assert len(told) >= len(BYTES.decode(tokens[:count])) - 3
    assert told + stream.rest() == BYTES.decode(tokens)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A tokenizer as Llama 2's: words begin with a space, other characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return load_tokenizer(str(Path(folder)))


@given(text=st.text("ab é€😀", min_size=1, max_size=40))
def test_a_tokenizer_that_falls_back_to_bytes_loses_neither_them_nor_spaces(
    byte_fallback: ByteTokenizer, text: str
):
    tokens = [int(token) for token in byte_fallback.encode(text)]
    prompt = [byte_fallback.end, *map(int, byte_fallback.encode("b"))]
    for mark in (False, True):  # A mark in between has no text, and the space behind it stays.
        given = [byte_fallback.end, *tokens] if mark else tokens
        pieces = pieces_of(TextStream(byte_fallback.decode, prompt), given)
        assert "".join(pieces) == f" {text}"
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(
    st.lists(st.text("abé", max_size=3), max_size=8),
    st.lists(st.text("abé", max_size=4), max_size=3),
)
def test_the_text_of_an_answer_ends_before_its_first_stop(pieces: list[str], stops: list[str]):
    """However it is cut into tokens, which are numbers of pieces here."""
    answer = AnswerText(lambda tokens: "".join(pieces[one] for one in tokens), [], stops)
    text, told, ends = "", "", []
    for token in (*range(len(pieces)), None):
        text += "" if token is None else pieces[token]
        told += answer.push(token, is_last=token is None)
        assert answer.length == len(text)
        ends = [text.index(stop) for stop in stops if stop and stop in text]
        assert answer.has_stopped == bool(ends)
        if ends:
            break
        assert text.startswith(told)
    assert told == text[: min(ends, default=None)]
