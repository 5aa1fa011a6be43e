"""The command that tokenizes: what it writes, and what is left of it when it fails."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from skippipe_sched.errors import TEMPORARY_EXIT_CODE, InputError

from skippipe_jax.cli.main import main
from skippipe_jax.config import DataConfig, DocumentSource
from skippipe_jax.data import token_shards
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.data.corpus import held_out_of, read_corpus
from skippipe_jax.data.token_shards import BLOCK, PartWriter, open_part, read_index
from skippipe_jax.data.tokenizer import ByteTokenizer, encode_documents, load_tokenizer
from skippipe_jax.data.tokenizing import write_tokens
from skippipe_jax.storage.files import new_directory
from tests.harness.messages import expect_error, refusal

REPOSITORY = Path(__file__).parents[2]
SHARD = "training-00001.array_record"


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "skippipe_jax", "tokenize", *map(str, words)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    random = np.random.default_rng(0)
    words = ["stage", "skip", "swap", "pipeline", "Köln", "\n", "  ", "microbatch", "path"]
    return [" ".join(random.choice(words, 900)) for _ in range(300)]


@pytest.fixture(scope="module")
def jsonl(texts, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def written(jsonl, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "tokens"
    words = ["--text-field", "body", "--held-out", "0.2", "--num-workers", "2"]
    words = command(jsonl, "-o", folder, *words, "--train-bpe", "290")
    finished = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    about, _, to_paste = finished.stdout.splitlines()
    assert about.endswith(", with a new BPE tokenizer")
    assert to_paste == f"skippipe train --data {folder}"
    return folder


def test_the_tokens_are_those_of_the_text(written, texts):
    tokenizer = load_tokenizer(str(written / "tokenizer"))
    index = read_index(str(written), "data.path")
    assert (index.tokenizer, index.vocabulary_size) == (tokenizer.digest, 290)
    out = held_out_of([text.encode() for text in texts], 0.2, 0)
    for part, chosen in (("training", ~out), ("held_out", out)):
        expected, ends = encode_documents(tokenizer, [texts[n] for n in np.flatnonzero(chosen)])
        documents = open_part(str(written), part, index, "data.path")
        np.testing.assert_array_equal(documents.ends, ends)
        assert documents.tokens.size == len(expected) == index.parts[part].tokens
        np.testing.assert_array_equal(documents.tokens[:], expected)
        for start, stop in ((0, 1), (BLOCK - 1, BLOCK + 1), (BLOCK, 3 * BLOCK), (77, 99)):
            np.testing.assert_array_equal(documents.tokens[start:stop], expected[start:stop])
    assert index.parts["training"].tokens > 10 * BLOCK


def test_training_reads_them_with_their_own_tokenizer(written, jsonl):
    config = DataConfig("tokens", str(written), sequence_length=64)
    batch = TrainingBatches(config)[5]
    assert batch["tokens"].shape == (4, 64)
    assert batch["tokens"].max() > 256
    with refusal(f"data.path = '{written}': contains tokens of another tokenizer"):
        TrainingBatches(DataConfig("tokens", str(written), tokenizer="bytes"))
    given = {"text_field": "body", "tokenizer": str(written / "tokenizer"), "held_out": 0.2}
    rows = DataConfig("jsonl", str(jsonl), sequence_length=64, **given)
    np.testing.assert_array_equal(TrainingBatches(rows)[5]["tokens"], batch["tokens"])


def test_one_process_writes_the_same(written, jsonl, tmp_path):
    words = ["tokenize", str(jsonl), "-o", str(tmp_path / "tokens"), "--num-workers", "1"]
    words += ["--text-field", "body", "--tokenizer", str(written / "tokenizer")]
    assert main([*words, "--held-out", "0.2"]) == 0
    names = sorted(path.name for path in written.iterdir())
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == names
    for path in written.iterdir():
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "tokens" / path.name).read_bytes(), path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("JSONL", "input.text_field = 'text': JSONL, line 1 does not have this field; it has body"),
        ("nowhere", "input.path = 'nowhere': cannot read"),
        ("JSONL --tokenizer nowhere", "--tokenizer = 'nowhere': nowhere does not exist"),
        ("JSONL --train-bpe 100", "--train-bpe = 100: must be at least 259"),
        ("JSONL --held-out 1", "--held-out = 1.0: must be below 1"),
        ("JSONL --tokenizer-only", "--tokenizer-only = True: requires a tokenizer"),
        (
            "docs --source jsonl",
            "input.path = 'docs': does not contain any file whose name ends in",
        ),
        ("EMPTY", "INPUT = 'EMPTY': has 0 documents, none with training text"),
        ("JSONL --text-field body --held-out 1e-6", "...the held-out part would have no documents"),
        ("JSONL --text-field body --held-out 0.999999", "...the training part would have no doc"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(jsonl, tmp_path, capsys, words, told):
    empty = jsonl.with_name("empty.jsonl")
    empty.touch()
    words, told = (
        text.replace("JSONL", str(jsonl)).replace("EMPTY", str(empty)) for text in (words, told)
    )
    given = ["tokenize", *words.split(), "-o", str(tmp_path / "tokens"), "--num-workers", "1"]
    code, printed = main(given), capsys.readouterr()
    expect_error((code, printed.out, printed.err), told)
    assert not list(tmp_path.iterdir())


def test_the_output_is_outside_of_the_text_that_is_read(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some text", encoding="utf-8")
    output = str(tmp_path / "tokens")
    code, printed = main(["tokenize", str(tmp_path), "-o", output]), capsys.readouterr()
    told = f"--output = '{output}': is in {tmp_path}, which is read as text"
    expect_error((code, printed.out, printed.err), told)


def test_a_tokenizer_alone(jsonl, tmp_path):
    words = ["tokenize", str(jsonl), "-o", str(tmp_path / "own"), "--text-field", "body"]
    assert main([*words, "--train-bpe", "270", "--tokenizer-only"]) == 0
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["tokenizer"]
    assert load_tokenizer(str(tmp_path / "own" / "tokenizer")).vocabulary_size == 270


def test_a_killed_command_leaves_nothing_that_looks_whole(jsonl, tmp_path):
    words = ["-o", tmp_path / "tokens", "--text-field", "body", "--num-workers", "2"]
    process = subprocess.Popen(
        command(*[jsonl] * 200, *words),
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".tokens.*/*.array_record")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        assert not (tmp_path / "tokens").exists()
        [partial] = tmp_path.iterdir()
        with pytest.raises(InputError, match=r"no index\.json"):
            read_index(str(partial), "data.path")
        # Its workers end by themselves.
        while _alive(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def chat(tmp_path) -> Path:
    """Conversations, one with an answer of several blocks."""
    file = tmp_path / "chat.jsonl"
    turns = [("hello", "ab" * (5 if number else 3 * BLOCK)) for number in range(30)]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in turns
    ]
    file.write_text("".join(json.dumps(row | {"id": n}) + "\n" for n, row in enumerate(rows)))
    return file


def test_the_command_takes_conversations(chat, tmp_path, capsys):
    words = [chat, "--source", "chat", "--held-out", "0.3", "--num-workers", "1"]
    parts = tokenize(tmp_path / "tokens", *words)
    about, _, to_paste = capsys.readouterr().out.splitlines()
    assert about.endswith("as bytes; for a pretrained model, give its --tokenizer")
    assert to_paste == f"skippipe train --data {tmp_path / 'tokens'} --set data.packing=documents"
    for part, described in parts.items():
        index = read_index(str(tmp_path / "tokens"), "data.path")
        documents = open_part(str(tmp_path / "tokens"), part, index, "data.path")
        assert documents.learnt is not None
        learnt = documents.learnt
        assert learnt.sum() == described.learnt
        assert set(documents.tokens[:][learnt].tolist()) == {*b"ab", ByteTokenizer.end}
    # What is said becomes a tokenizer too, and nothing of how it is written down.
    tokenize(tmp_path / "own", *words, "--train-bpe", "262")
    vocabulary = json.loads((tmp_path / "own" / "tokenizer" / "tokenizer.json").read_text())
    merged = ["".join(pair) for pair in vocabulary["model"]["merges"]]
    assert merged
    assert all(set(one) <= set("helloab") for one in merged)


def test_the_template_of_conversations_is_kept_with_their_tokens(chat, tmp_path, capsys):
    for number, words in enumerate(([], ["--chat-template", "plain"])):
        output = tmp_path / f"tokens{number}"
        arguments = [str(chat), "-o", str(output), "--source", "chat", "--train-bpe", "300"]
        assert main(["tokenize", *arguments, *words, "--num-workers", "1"]) == 0
        kept = output / "tokenizer" / "chat_template.jinja"
        assert kept.is_file() == bool(words)
        assert ("has no chat template" in capsys.readouterr().err) != bool(words)


def test_the_day_of_conversations_is_given_to_the_command(chat, tmp_path, capsys):
    own = tmp_path / "own"
    words = [chat, "--source", "chat", "--held-out", "0.3", "--num-workers", "1"]
    tokenize(tmp_path / "first", *words, "--train-bpe", "262")
    (tmp_path / "first" / "tokenizer").rename(own)
    (own / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    words = [*words, "--tokenizer", own]
    tokenize(tmp_path / "tokens", *words, "--today", "2031-05-06")
    index = read_index(str(tmp_path / "tokens"), "data.path")
    documents = open_part(str(tmp_path / "tokens"), "training", index, "data.path")
    text = load_tokenizer(str(own)).decode(documents.tokens[: int(documents.ends[0])])
    assert text.startswith("2031hello")
    for day, error in (("soon", "--today = 'soon': is not a date"), (None, "input.today = None")):
        given = [] if day is None else ["--today", day]
        assert main(list(map(str, ["tokenize", *words, "-o", "no", *given]))) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 140)]
)
def test_tokens_that_lack_what_is_learnt_are_refused(chat, tmp_path, damage):
    words = [chat, "--source", "chat", "--held-out", "0.3", "--num-workers", "1"]
    tokenize(tmp_path / "tokens", *words)
    damage(tmp_path / "tokens" / "training.learnt.npy")
    with pytest.raises(InputError, match="Tokenize the text again"):
        read_corpus(DocumentSource("tokens", str(tmp_path / "tokens")), ByteTokenizer(), 0.1, 0)


def test_a_full_disk_is_told_of_in_one_line(tmp_path):
    # As array_record and safetensors report it, which raise no OSError.
    error = RuntimeError(f"write() failed: {os.strerror(errno.ENOSPC)}; at byte 0")
    told = refusal("--output = ...tokens': cannot be written: No space")
    with told as caught, new_directory(tmp_path / "tokens", "--output"):
        raise error
    assert caught.value.exit_code == TEMPORARY_EXIT_CODE
    assert not list(tmp_path.iterdir())


@pytest.fixture
def shards(tmp_path, monkeypatch) -> DocumentSource:
    """Bytes in several shards of few records."""
    monkeypatch.setattr(token_shards, "_SHARD", 3)
    folder = tmp_path / "tokens"
    random = np.random.default_rng(1)
    with new_directory(folder, "--output") as partial:
        parts = {}
        for part in token_shards.PARTS:
            writer = PartWriter(partial, part, np.dtype(np.uint16))
            for size in (5, 3 * BLOCK, 17, 4 * BLOCK - 22, 9):
                writer.add(random.integers(0, 256, size).astype(np.uint16), np.array([size]))
            parts[part] = writer.close()
        token_shards.write_index(
            partial, token_shards.TokenIndex("bytes", 259, "uint16", 0.1, 0, parts)
        )
    return DocumentSource("tokens", str(folder))


def test_spans_reach_over_shards(shards):
    corpus = read_corpus(shards, ByteTokenizer(), 0.1, 0)
    whole = corpus.training.tokens[:]
    assert len(whole) == 7 * BLOCK + 9
    assert len(list(Path(str(shards.path)).glob("training-*"))) == 3
    for start in range(0, len(whole), 1111):
        np.testing.assert_array_equal(
            corpus.training.tokens[start : start + 5000], whole[start : start + 5000]
        )


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("index.json", Path.unlink, "no index.json"),
        ("index.json", lambda file: file.write_text("{}"), "index.json is not valid"),
        (SHARD, Path.unlink, f"{SHARD} is missing"),
        (SHARD, lambda file: os.truncate(file, 70000), "training"),
        ("held_out.ends.npy", lambda file: os.truncate(file, 130), "the held_out part"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(shards, file, damage, problem):
    damage(Path(str(shards.path)) / file)
    with refusal(f"data.path = ...{problem}"):
        read_corpus(shards, ByteTokenizer(), 0.1, 0)


def tokenize(folder: Path, *words: str | Path) -> dict[str, token_shards.PartIndex]:
    assert main(["tokenize", *map(str, words), "-o", str(folder)]) == 0
    return read_index(str(folder), "data.path").parts


def test_files_named_one_by_one_are_held_out_one_by_one(tmp_path):
    files = [tmp_path / f"{number:02}.txt" for number in range(40)]
    for file in files:
        file.write_text(file.name * 50)
    words = ["--held-out", "0.3", "--num-workers", "1"]
    parts = tokenize(tmp_path / "tokens", *files, *words)
    assert 5 <= parts["held_out"].documents <= 20
    # Which these are, the names of the files say, however they were given.
    assert tokenize(tmp_path / "again", tmp_path / "*.txt", *words) == parts
    sources = [DocumentSource("text", str(path)) for path in (tmp_path, files[3])]
    with pytest.raises(InputError, match=r"03\.txt is in another source too"):
        write_tokens(tmp_path / "twice", sources, "bytes", 0.3, 0, processes=1)


def test_the_tail_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "only.txt").write_bytes(b"a" * 75 + b"b" * 25)
    words = [tmp_path / "only.txt", "--held-out", "0.25", "--num-workers", "1"]
    tokenize(tmp_path / "tokens", *words)
    tokens = DocumentSource("tokens", str(tmp_path / "tokens"))
    text = DocumentSource("text", str(tmp_path / "only.txt"))
    one, other = (read_corpus(source, ByteTokenizer(), 0.25, 0) for source in (tokens, text))
    for part in ("training", "held_out"):
        found, expected = getattr(one, part), getattr(other, part)
        np.testing.assert_array_equal(found.tokens[:], expected.tokens)
        np.testing.assert_array_equal(found.ends, expected.ends)
    assert one.training.tokens[:].tolist() == [256, *b"a" * 75, 257]
    assert one.held_out.tokens[:].tolist() == [256, *b"b" * 25, 257]
