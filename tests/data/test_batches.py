"""Documents become windows, windows become microbatches, and a saved position is exact."""

import json
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig, MixtureConfig
from skippipe_jax.data.batches import (
    TrainingBatches,
    held_out_batches,
    load_corpora,
    too_long_lines,
)
from skippipe_jax.data.corpus import Corpus, held_out_of
from skippipe_jax.data.rows import IGNORED_TARGET
from skippipe_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, write_byte_tokenizer
from skippipe_jax.data.tokenizing import write_tokens
from skippipe_jax.storage.files import new_directory
from tests.harness.messages import refusal

LENGTH = 7  # and with its last target, a window holds one of the 8-byte counters below


def counters(count: int) -> bytes:
    """Text in which no two windows are alike."""
    return b"".join(b"%08d" % number for number in range(count))


def text_config(path: Path, **changes) -> DataConfig:
    values: dict[str, Any] = {"sequence_length": LENGTH, "microbatch_size": 2} | changes
    return DataConfig(source="text", path=str(path), **values)


def load_corpus(config: DataConfig) -> Corpus:
    [corpus] = load_corpora(config)
    return corpus


@pytest.fixture
def file_config(tmp_path) -> DataConfig:
    (tmp_path / "text.txt").write_bytes(counters(100))
    return text_config(tmp_path / "text.txt")


def windows(batches) -> list[tuple[int, ...]]:
    """Every window of the batches, as its tokens and its last target."""
    rows = []
    for batch in batches:
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        whole = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)
        rows += [tuple(row) for row in whole.tolist()]
    return rows


def take(batches: TrainingBatches, count: int) -> list:
    return [batches[number] for number in range(count)]


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
        np.testing.assert_array_equal(one["targets"], other["targets"])


@given(
    st.lists(st.binary(min_size=1, max_size=2), min_size=2, max_size=30),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32 - 1),
    st.randoms(),
)
def test_no_part_is_empty_and_equal_documents_stay_together_whatever_the_order(
    keys, held_out, seed, random
):
    assume(len(set(keys)) > 1)

    def parts(keys: list[bytes]) -> list[set[bytes]]:
        mask = held_out_of(keys, held_out, seed)
        return [
            {key for key, out in zip(keys, mask, strict=True) if out == part}
            for part in (False, True)
        ]

    training, held = parts(keys)
    assert training
    assert held
    assert not training & held
    assert parts(random.sample(keys, len(keys))) == [training, held]


def test_a_process_tokenizes_each_document_once_whatever_the_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names, texts, opened = ("a", "b", "c"), Counter[str](), list[Path]()
    for name in names:
        (tmp_path / name).mkdir()
        for number in range(6):
            (tmp_path / name / f"{number}.txt").write_text(f"{name}{number} " * 9)
    for folder in (tmp_path / "tokenizer", tmp_path / "run"):
        folder.mkdir()
        write_byte_tokenizer(folder, "--output")
        # A process reads a tokenizer once, and other tests read theirs.
        with (folder / "tokenizer.json").open("a") as file:
            file.write(" " * 9)
    begin, encode = HuggingFaceTokenizer.__init__, HuggingFaceTokenizer.encode_batch

    def counting_files(self: Any, file: Path, field: str) -> None:
        opened.append(file)
        begin(self, file, field)

    def counting_texts(self: Any, given: Any) -> Any:
        texts.update(given)
        return encode(self, given)

    monkeypatch.setattr(HuggingFaceTokenizer, "__init__", counting_files)
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_batch", counting_texts)

    def mixed(names: Sequence[str], tokenizer: str) -> DataConfig:
        entries = tuple(MixtureConfig(path=str(tmp_path / name)) for name in names)
        given = {"sequence_length": LENGTH, "microbatch_size": 2, "held_out": 0.3}
        named = str(tmp_path / tokenizer)
        return DataConfig(source="mixture", mixture=entries, tokenizer=named, **given)

    # A run keeps the tokenizer in its own folder, and experts train on some of the domains.
    all_of_them, of_run = mixed(names, "tokenizer"), mixed(names, "run")
    TrainingBatches(all_of_them)
    assert [*held_out_batches(of_run, 2)]
    too_long_lines(of_run)
    for one in (mixed("b", "run"), mixed("ca", "run")):
        TrainingBatches(one)
    assert len(texts) == 18
    assert set(texts.values()) == {1}
    assert len(opened) == 1


def test_a_folder_is_read_whole_but_for_hidden_and_empty_files(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "tests" / "bytes").write_bytes(b"\xff\xfe" * 10)
    (tmp_path / "plain.md").write_bytes(b"m" * 20)
    for hidden in (".git/config", ".hidden"):
        (tmp_path / hidden).write_bytes(b"h" * 20)
    (tmp_path / "empty").touch()
    corpus = load_corpus(text_config(tmp_path))
    begin, end = ByteTokenizer.begin, ByteTokenizer.end
    both = sorted([corpus.training.tokens[:].tolist(), corpus.held_out.tokens[:].tolist()])
    assert both == [[begin, *b"m" * 20, end], [begin, *b"\xff\xfe" * 10, end]]


def test_batches_have_one_shape_and_fresh_arrays(file_config):
    batches = TrainingBatches(file_config)
    first, second = batches[0], batches[1]
    for array in (first["tokens"], first["targets"], second["tokens"], second["targets"]):
        assert array.shape == (2, LENGTH)
        assert array.dtype == np.int32
    kept = second["tokens"].copy()
    second["tokens"][:] = 0
    np.testing.assert_array_equal(batches[1]["tokens"], kept)


@settings(max_examples=15)
@given(microbatch_size=st.integers(1, 3), spare=st.integers(0, 20), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_has_each_sequence_once(microbatch_size, spare, seed):
    count = 2 * microbatch_size + spare
    # The marks make two more tokens than bytes, and the last text is held out.
    size = count * (LENGTH + 1) - 2
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(counters(count)[:size] + b"." * size)
        config = text_config(text, microbatch_size=microbatch_size, held_out=0.5, shuffle_seed=seed)
        tokens = load_corpus(config).training.tokens[:]
        order = windows(take(TrainingBatches(config), -(-2 * count // microbatch_size)))
    expected = {tuple(row) for row in tokens.reshape(count, LENGTH + 1).tolist()}
    assert len(expected) == count
    for epoch in range(2):
        seen = order[epoch * count : (epoch + 1) * count]
        assert len(seen) == count
        assert set(seen) == expected


def test_the_seed_fixes_the_order_and_each_epoch_has_its_own(file_config):
    def order(seed: int) -> list:
        config = text_config(
            Path(str(file_config.path)), shuffle_seed=seed, microbatch_size=1, held_out=0.1
        )
        return windows(take(TrainingBatches(config), 180))

    first = order(5)
    assert first == order(5)
    assert first[:90] != order(6)[:90]
    assert first[:90] != first[90:]
    assert sorted(first[:90]) == sorted(first[90:]) == sorted(order(6)[:90])


@settings(max_examples=15)
@given(numbers=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_any_microbatch_is_the_same_whenever_it_is_read(numbers):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_bytes(counters(200))
        batches, others = (TrainingBatches(text_config(Path(folder))) for _ in range(2))
        in_order = take(others, max(numbers) + 1)
        assert_same([batches[number] for number in numbers], [in_order[n] for n in numbers])


def test_a_position_in_other_data_is_refused(file_config, tmp_path):
    (tmp_path / "other.txt").write_bytes(counters(101))
    path = Path(str(file_config.path))
    batches = TrainingBatches(file_config)
    assert batches.position(json.loads(json.dumps(batches.state(7)))) == 7
    others = {
        "fingerprint": text_config(tmp_path / "other.txt"),
        "microbatch_size": text_config(path, microbatch_size=3),
        "sequence_length": text_config(path, sequence_length=6),
        "shuffle_seed": text_config(path, shuffle_seed=1),
    }
    for name, other in others.items():
        with refusal(f"data_state.{name} = "):
            batches.position(TrainingBatches(other).state(7))
    for read in (None, -1, "3"):
        with refusal("data_state.microbatches = "):
            batches.position(batches.state(0) | {"microbatches": read})


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_held_out_windows_come_once_and_the_last_batch_is_padded(file_config, batch_size):
    config = text_config(Path(str(file_config.path)), held_out=0.5)
    tokens = load_corpus(config).held_out.tokens[:]
    count = len(tokens) // (LENGTH + 1)
    expected = [tuple(row) for row in tokens[: count * (LENGTH + 1)].reshape(count, -1).tolist()]
    batches = list(held_out_batches(config, batch_size))
    assert len(batches) == -(-count // batch_size)
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, LENGTH)}
    real = len(expected) - (len(batches) - 1) * batch_size
    last = batches[-1]
    assert (last["targets"][real:] == IGNORED_TARGET).all()
    assert (last["tokens"][real:] == ByteTokenizer.padding).all()
    batches[-1] = {"tokens": last["tokens"][:real], "targets": last["targets"][:real]}
    assert sorted(windows(batches)) == sorted(expected)
    assert windows(batches) != expected


def test_held_out_order_is_fixed_and_a_limit_takes_its_beginning(file_config):
    config = text_config(Path(str(file_config.path)), held_out=0.5)
    every = list(held_out_batches(config, 3))
    assert_same(list(held_out_batches(config, 3, 12)), every[:4])
    assert_same(list(held_out_batches(config, 3, 10_000)), every)
    *whole, last = held_out_batches(config, 3, 11)
    assert_same(whole, every[:3])
    np.testing.assert_array_equal(last["tokens"][:2], every[3]["tokens"][:2])
    assert (last["targets"][2] == IGNORED_TARGET).all()


def test_missing_and_empty_paths_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.txt").touch()
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "link").symlink_to(tmp_path / "nowhere")
    for path in ("missing", "folder", "folder/empty.txt", "dangling"):
        with refusal(f"data.path = ...{path}"):
            load_corpus(text_config(tmp_path / path))


def test_too_little_text_is_named(file_config):
    path = Path(str(file_config.path))
    for length, part in ((5000, "training"), (100, "held-out")):
        with refusal(f"data.sequence_length = ...the {part} text"):
            TrainingBatches(text_config(path, sequence_length=length))
    with refusal("data.path = ...95 sequences of 7 tokens are too few for"):
        TrainingBatches(text_config(path, microbatch_size=96))
    assert TrainingBatches(text_config(path, microbatch_size=95))[0]


def chapters(folder: Path, lengths: list[int]) -> DataConfig:
    """A file of so many letters for each length, packed as documents."""
    folder.mkdir()
    for number, length in enumerate(lengths):
        (folder / f"{number:03d}").write_bytes(bytes([65 + number % 60]) * length)
    return text_config(folder, packing="documents", sequence_length=16, held_out=0.2)


def test_a_mixture_keeps_its_proportions_and_each_source_its_own_epochs(tmp_path):
    for name in ("small", "large"):
        text = b"".join(b"%c%07d" % (name.encode()[0], number) for number in range(50))
        (tmp_path / name).write_bytes(text)
    small, large = (MixtureConfig("text", str(tmp_path / name)) for name in ("small", "large"))
    mixture = replace(small, weight=0.7), replace(large, weight=0.3)
    config = DataConfig(
        source="mixture", mixture=mixture, sequence_length=LENGTH, microbatch_size=3, held_out=0.5
    )
    rows = windows(take(TrainingBatches(config), 200))
    from_small = [row for row in rows if ord("s") in row]
    assert len(from_small) == 420
    epoch = 25
    assert len(set(from_small[:epoch])) == epoch
    assert set(from_small[:epoch]) == set(from_small[epoch : 2 * epoch])
    assert from_small[:epoch] != from_small[epoch : 2 * epoch]
    other = TrainingBatches(replace(config, mixture=(mixture[0], large))).state(1)
    with pytest.raises(InputError, match="fingerprint"):
        TrainingBatches(config).position(other)


@pytest.mark.parametrize("part", ["inner", "inner/03", "inner/*"])
def test_what_one_source_holds_out_no_other_trains_on(tmp_path, part):
    (tmp_path / "inner").mkdir()
    for number in range(20):
        (tmp_path / "inner" / f"{number:02}").write_bytes(counters(9))

    def config(*paths: str) -> DataConfig:
        sources = tuple(MixtureConfig("text", str(tmp_path / path)) for path in paths)
        return DataConfig(source="mixture", mixture=sources, sequence_length=LENGTH, held_out=0.3)

    with refusal("data.mixture[1].path = ...may be held out in only one of them"):
        load_corpora(config("", part))
    # To be read twice as often as others, a source may be named twice.
    first, second = load_corpora(config("inner", "inner"))
    np.testing.assert_array_equal(first.held_out.tokens[:], second.held_out.tokens[:])


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_tokens_on_disk_are_read_as_text_is(tmp_path, packing):
    config = chapters(tmp_path / "text", [300, 4000, 14, 1500, 1, 7, 30, 9000, 5, 5, 2, 16])
    # In a folder so small, the text itself holds out one document at least: ask for a share at
    # which the hashes alone decide the same.
    config = replace(config, packing=packing, held_out=0.5)
    with new_directory(tmp_path / "tokens", "--output") as folder:
        [source] = config.sources()
        write_tokens(folder, [source], "bytes", 0.5, config.shuffle_seed, processes=1)
    held_out = DataConfig.held_out
    tokens = replace(config, source="tokens", path=str(tmp_path / "tokens"), held_out=held_out)
    assert TrainingBatches(tokens).fingerprint == TrainingBatches(config).fingerprint
    numbers = [0, 1, 70, 3, 900]
    ours, theirs = TrainingBatches(tokens), TrainingBatches(config)
    for one, other in zip([ours[n] for n in numbers], [theirs[n] for n in numbers], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    assert_same(list(held_out_batches(tokens, 3)), list(held_out_batches(config, 3)))


def test_the_standard_library_without_tests_and_installed_packages():
    corpus = load_corpus(DataConfig())
    assert corpus.training.tokens.size > 5_000_000
    parts = [
        tokens[tokens < 256].astype(np.uint8).tobytes()
        for tokens in (corpus.training.tokens[:], corpus.held_out.tokens[:])
    ]
    library = Path(sysconfig.get_path("stdlib"))
    argparse = (library / "argparse.py").read_bytes()
    assert sum(argparse in part for part in parts) == 1
    for file in (Path(np.__file__), *library.glob("test/support/*.py")):
        text = file.read_bytes()
        assert not text or not any(text in part for part in parts), file
    batch = TrainingBatches(DataConfig())[2]
    assert batch["tokens"].shape == (4, 256)
