"""Documents become windows, windows become microbatches, and a saved position is exact."""

import json
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.data import (
    NOT_COUNTED,
    ByteTokenizer,
    DataConfig,
    TrainingBatches,
    check_vocabulary,
    held_out_batches,
    load_corpus,
    split_names,
)

LENGTH = 7  # and with its last target, a window holds one of the 8-byte counters below


def counters(count: int) -> bytes:
    """Text in which no two windows are alike."""
    return b"".join(b"%08d" % number for number in range(count))


def text_config(path: Path, **changes) -> DataConfig:
    values = {"sequence_length": LENGTH, "microbatch_size": 2} | changes
    return DataConfig(source="text", path=str(path), **values)


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


@given(st.binary())
def test_tokens_are_bytes(data):
    tokens = ByteTokenizer().encode(data)
    assert tokens.astype(np.uint8).tobytes() == data
    assert len(tokens) == len(data)
    assert ByteTokenizer().decode(tokens) == data.decode(errors="replace")


@given(st.text())
def test_tokenizer_round_trip_leaves_marks_out(text):
    tokenizer = ByteTokenizer()
    marks = [tokenizer.begin, tokenizer.end, tokenizer.padding, NOT_COUNTED]
    tokens = [*marks, *tokenizer.encode(text).tolist(), *marks]
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < tokenizer.vocabulary_size


def test_vocabulary_must_hold_every_token():
    check_vocabulary(ByteTokenizer.vocabulary_size)
    with pytest.raises(InputError, match="too small for the tokenizer") as caught:
        check_vocabulary(ByteTokenizer.vocabulary_size - 1)
    assert caught.value.field == "model.vocabulary_size"


@given(
    st.sets(st.text(min_size=1), min_size=2, max_size=30),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32 - 1),
    st.randoms(),
)
def test_every_name_is_in_one_part_whatever_the_order(names, held_out, seed, random):
    training, evaluation = split_names(names, held_out, seed)
    assert training
    assert evaluation
    assert sorted(training + evaluation) == sorted(names)
    shuffled = random.sample(sorted(names), len(names))
    assert split_names(shuffled, held_out, seed) == (training, evaluation)


def test_a_new_file_moves_no_other():
    names = [f"chapter{number}" for number in range(400)]
    _, before = split_names(names, 0.1, 3)
    _, after = split_names([*names, "appendix"], 0.1, 3)
    assert set(before) == set(after) - {"appendix"}
    assert 20 <= len(before) <= 60
    assert before != split_names(names, 0.1, 4)[1]


def test_held_out_and_training_share_no_file(tmp_path):
    texts = {bytes([letter]) * 40 for letter in b"abcdefghij"}
    for text in texts:
        (tmp_path / text[:1].decode()).write_bytes(text)
    corpus = load_corpus(text_config(tmp_path, held_out=0.3))
    parts = [
        {text for text in texts if text in tokens[tokens < 256].astype(np.uint8).tobytes()}
        for tokens in (corpus.training, corpus.held_out)
    ]
    assert parts[0]
    assert parts[1]
    assert parts[0] | parts[1] == texts
    assert not parts[0] & parts[1]


def test_the_tail_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "only.txt").write_bytes(b"a" * 75 + b"b" * 25)
    corpus = load_corpus(text_config(tmp_path, held_out=0.25))
    begin, end = ByteTokenizer.begin, ByteTokenizer.end
    assert corpus.training.tolist() == [begin, *b"a" * 75, end]
    assert corpus.held_out.tolist() == [begin, *b"b" * 25, end]


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
    both = sorted([corpus.training.tolist(), corpus.held_out.tolist()])
    assert both == [[begin, *b"m" * 20, end], [begin, *b"\xff\xfe" * 10, end]]


def test_fingerprint_tells_the_text(tmp_path):
    for name, text in (("one", counters(30)), ("same", counters(30)), ("other", counters(31))):
        (tmp_path / name).write_bytes(text)
    one, same, other = (
        load_corpus(text_config(tmp_path / name)).fingerprint for name in ("one", "same", "other")
    )
    assert one == same != other


def test_batches_have_one_shape_and_fresh_arrays(file_config):
    batches = TrainingBatches(file_config)
    first, second = batches[0], batches[1]
    for array in (first["tokens"], first["targets"], second["tokens"], second["targets"]):
        assert array.shape == (2, LENGTH)
        assert array.dtype == np.int32
    kept = second["tokens"].copy()
    second["tokens"][:] = 0
    np.testing.assert_array_equal(batches[1]["tokens"], kept)


@settings(max_examples=15, deadline=None)
@given(microbatch_size=st.integers(1, 3), spare=st.integers(0, 20), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_has_each_sequence_once(microbatch_size, spare, seed):
    count = 2 * microbatch_size + spare
    # The marks make two more tokens than bytes, and the last text is held out.
    size = count * (LENGTH + 1) - 2
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(counters(count)[:size] + b"." * size)
        config = text_config(text, microbatch_size=microbatch_size, held_out=0.5, shuffle_seed=seed)
        tokens = load_corpus(config).training
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


@settings(max_examples=15, deadline=None)
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
        with pytest.raises(InputError) as caught:
            batches.position(TrainingBatches(other).state(7))
        assert caught.value.field == f"data_state.{name}"
    for read in (None, -1, "3"):
        with pytest.raises(InputError) as caught:
            batches.position(batches.state(0) | {"microbatches": read})
        assert caught.value.field == "data_state.microbatches"


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_held_out_windows_come_once_and_the_last_batch_is_padded(file_config, batch_size):
    config = text_config(Path(str(file_config.path)), held_out=0.5)
    tokens = load_corpus(config).held_out
    count = len(tokens) // (LENGTH + 1)
    expected = [tuple(row) for row in tokens[: count * (LENGTH + 1)].reshape(count, -1).tolist()]
    batches = list(held_out_batches(config, batch_size))
    assert len(batches) == -(-count // batch_size)
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, LENGTH)}
    real = len(expected) - (len(batches) - 1) * batch_size
    last = batches[-1]
    assert (last["targets"][real:] == NOT_COUNTED).all()
    assert (last["tokens"][real:] == ByteTokenizer.padding).all()
    batches[-1] = {"tokens": last["tokens"][:real], "targets": last["targets"][:real]}
    assert sorted(windows(batches)) == sorted(expected)
    assert windows(batches) != expected


def test_held_out_order_is_fixed_and_a_limit_takes_its_beginning(file_config):
    config = text_config(Path(str(file_config.path)), held_out=0.5)
    every = list(held_out_batches(config, 3))
    assert_same(list(held_out_batches(config, 3, limit=4)), every[:4])
    assert_same(list(held_out_batches(config, 3, limit=10_000)), every)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("source", {"source": "web"}),
        ("path", {"source": "text"}),
        ("path", {"source": "text", "path": ""}),
        ("path", {"source": "python", "path": "corpus"}),
        ("sequence_length", {"sequence_length": 0}),
        ("microbatch_size", {"microbatch_size": 0}),
        ("held_out", {"held_out": 0.0}),
        ("held_out", {"held_out": 1.0}),
        ("held_out", {"held_out": float("nan")}),
        ("shuffle_seed", {"shuffle_seed": -1}),
        ("shuffle_seed", {"shuffle_seed": 2**32}),
    ],
)
def test_a_wrong_value_is_named(field, values):
    with pytest.raises(InputError) as caught:
        DataConfig(**values)
    assert caught.value.field == f"data.{field}"


def test_missing_and_empty_paths_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.txt").touch()
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "link").symlink_to(tmp_path / "nowhere")
    for path in ("missing", "folder", "folder/empty.txt", "dangling"):
        with pytest.raises(InputError) as caught:
            load_corpus(text_config(tmp_path / path))
        assert caught.value.field == "data.path"
        assert path in str(caught.value)


def test_too_little_text_is_named(file_config):
    path = Path(str(file_config.path))
    for length, part in ((5000, "training"), (100, "held-out")):
        with pytest.raises(InputError, match=f"the {part} text") as caught:
            TrainingBatches(text_config(path, sequence_length=length))
        assert caught.value.field == "data.sequence_length"
    with pytest.raises(InputError, match="95 sequences of 7 tokens are too few for") as caught:
        TrainingBatches(text_config(path, microbatch_size=96))
    assert caught.value.field == "data.path"
    assert TrainingBatches(text_config(path, microbatch_size=95))[0]


def test_the_standard_library_without_tests_and_installed_packages():
    corpus = load_corpus(DataConfig())
    assert corpus.training.size > 5_000_000
    parts = [
        tokens[tokens < 256].astype(np.uint8).tobytes()
        for tokens in (corpus.training, corpus.held_out)
    ]
    library = Path(sysconfig.get_path("stdlib"))
    argparse = (library / "argparse.py").read_bytes()
    assert sum(argparse in part for part in parts) == 1
    for file in (Path(np.__file__), *library.glob("test/support/*.py")):
        text = file.read_bytes()
        assert not text or not any(text in part for part in parts), file
    batch = TrainingBatches(DataConfig())[2]
    assert batch["tokens"].shape == (4, 256)
