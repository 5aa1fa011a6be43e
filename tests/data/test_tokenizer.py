"""Tokenizers of every kind, where their marks come from, and how documents become tokens."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.config import DocumentSource, parse_config
from skippipe_jax.data import tokenizer as tokenizer_module
from skippipe_jax.data.documents import Document
from skippipe_jax.data.rows import IGNORED_TARGET
from skippipe_jax.data.tokenizer import (
    ByteTokenizer,
    encode_documents,
    load_tokenizer,
    token_dtype,
)
from skippipe_jax.data.tokenizing import train_bpe
from tests.harness.messages import refusal

TEXT = "Skipping pipeline stages brings skipped stages, and pipelines that skip.\n" * 20
SOURCE = DocumentSource("text", "text")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a byte-level BPE."""
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_bpe([(Document("text", b"", TEXT.encode()), SOURCE)], 300, folder)
    return folder


@given(st.binary())
def test_tokens_are_bytes(data):
    tokens = ByteTokenizer().encode(data)
    assert tokens.astype(np.uint8).tobytes() == data
    assert len(tokens) == len(data)
    assert ByteTokenizer().decode(tokens) == data.decode(errors="replace")


@given(st.text())
def test_tokenizer_round_trip_leaves_marks_out(text):
    tokenizer = ByteTokenizer()
    marks = [tokenizer.begin, tokenizer.end, tokenizer.padding, IGNORED_TARGET]
    tokens = [*marks, *tokenizer.encode(text).tolist(), *marks]
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < tokenizer.vocabulary_size


def test_a_trained_tokenizer_takes_any_text(trained, tmp_path):
    tokenizer = load_tokenizer(str(trained))
    assert (tokenizer.begin, tokenizer.end, tokenizer.padding) == (0, 1, 2)
    assert 259 < tokenizer.vocabulary_size <= 300
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2
    for text in (TEXT, "", "Ünïcödé 中文 🙂\n\n\ttabs  and  spaces ", "\0\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    marked = [tokenizer.begin, *tokenizer.encode("ab"), tokenizer.end, IGNORED_TARGET, 10**6]
    assert tokenizer.decode(marked) == "ab"
    assert load_tokenizer(str(trained / "tokenizer.json")).digest == tokenizer.digest
    train_bpe([(Document("text", b"", TEXT.encode()), SOURCE)], 290, tmp_path / "other")
    assert load_tokenizer(str(tmp_path / "other")).digest != tokenizer.digest


def test_the_model_has_as_many_tokens_as_its_tokenizer(trained: Path, tmp_path: Path):
    unigram = tokenizers.models.Unigram([("u", -1.0), ("x", -2.0)], unk_id=0)
    tokenizer = tokenizers.Tokenizer(unigram)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (trained, trained / "tokenizer.json", tmp_path):
        own = load_tokenizer(str(path)).vocabulary_size
        data = {"source": "text", "path": "text", "tokenizer": str(path)}
        for model in ({}, {"preset": "tiny"}):
            assert parse_config({"data": data, "model": model}).model.vocabulary_size == own
        given = parse_config({"data": data, "model": {"vocabulary_size": 512}})
        assert given.model.vocabulary_size == 512
    missing = {"data": {"tokenizer": str(tmp_path / "none")}, "model": {"preset": "500m"}}
    assert parse_config(missing).model.vocabulary_size == 32000


def test_a_sentence_piece_model_means_the_tokenizer_beside_it(trained: Path, tmp_path: Path):
    model = tmp_path / "tokenizer.model"
    model.touch()
    for name in (model, tmp_path):
        told = f'SentencePiece models are not supported...from_pretrained("{tmp_path}")'
        with refusal(f"data.tokenizer = ...{told}"):
            load_tokenizer(str(name))
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    assert load_tokenizer(str(model)).digest == load_tokenizer(str(trained)).digest


@pytest.mark.parametrize(
    ("settings", "special_tokens", "expected"),
    [
        ({}, None, ("<s>", "</s>", "</s>")),
        ({"eos_token": "x"}, None, ("<s>", "x", "x")),
        ({"eos_token": {"content": "x", "lstrip": False}, "pad_token": "p"}, None,
         ("<s>", "x", "p")),
        ({"bos_token": None}, {"bos_token": "p", "eos_token": "x"}, ("p", "x", "x")),
        ({"eos_token": "x"}, {"eos_token": "p"}, ("<s>", "x", "x")),
    ],
)  # fmt: skip
def test_marks_come_from_the_files_beside_it(tmp_path, settings, special_tokens, expected):
    vocabulary = {text: number for number, text in enumerate(["u", "<s>", "</s>", "x", "p"])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="u")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if special_tokens is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_tokens))
    tokenizer = load_tokenizer(str(tmp_path))
    marks = (tokenizer.begin, tokenizer.end, tokenizer.padding)
    assert marks == tuple(vocabulary[text] for text in expected)
    assert tokenizer.vocabulary_size == 5


def test_a_tokenizer_without_marks_or_with_others_marks_is_refused(tmp_path):
    model = tokenizers.models.WordLevel({"u": 0}, unk_token="u")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="no token marks the end"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(InputError, match="does not contain the eos_token '</s>'"):
        load_tokenizer(str(tmp_path))


def test_what_is_no_tokenizer_is_named(tmp_path):
    for name in ("nowhere", "empty", "broken.json", "broken.model"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        if name.startswith("broken"):
            (tmp_path / name).write_text("{")
        with refusal(f"data.tokenizer = ...{name}"):
            load_tokenizer(str(tmp_path / name))


def test_a_name_on_the_hub_is_no_tokenizer_and_how_to_fetch_it_is_said(tmp_path):
    with refusal(
        "...openai-community/gpt2 does not exist, and nothing is downloaded...run hf download "
        "openai-community/gpt2 --include...--local-dir gpt2, and name the folder gpt2"
    ):
        load_tokenizer("openai-community/gpt2")
    # A path is no such name, and a folder that is there lacks a file.
    for name in (str(tmp_path / "gpt2"), str(tmp_path)):
        with pytest.raises(InputError) as caught:
            load_tokenizer(name)
        assert "hf download" not in caught.value.remedy


def test_documents_stand_between_marks(trained):
    tokenizer = load_tokenizer(str(trained))
    texts = ["pipeline", "", "stages"]
    tokens, ends = encode_documents(tokenizer, texts)
    expected = [[tokenizer.begin, *tokenizer.encode(text), tokenizer.end] for text in texts]
    assert tokens.tolist() == [token for document in expected for token in document]
    assert ends.tolist() == np.cumsum([len(document) for document in expected]).tolist()
    assert tokens.dtype == np.uint16


def test_long_texts_are_encoded_in_pieces_to_the_same_tokens(trained, monkeypatch):
    tokenizer = load_tokenizer(str(trained))
    text = "one line\n\n  another, indented\nand  the\tlast \n" * 50
    whole, _ = encode_documents(tokenizer, [text])
    monkeypatch.setattr(tokenizer_module, "_PIECE", 40)
    assert len(list(tokenizer_module.text_pieces(text))) > 20
    np.testing.assert_array_equal(encode_documents(tokenizer, [text])[0], whole)


@pytest.mark.parametrize(
    ("size", "dtype"), [(259, "uint16"), (65536, "uint16"), (65537, "uint32"), (128256, "uint32")]
)
def test_tokens_take_no_more_bytes_than_they_need(size, dtype):
    assert token_dtype(size).name == dtype
