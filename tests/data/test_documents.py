"""Documents come from files, lines and rows; what is wrong with one is said with its place."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as arrow
import pytest
from fsspec.utils import compressions
from pyarrow import parquet
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig, DocumentSource
from skippipe_jax.data.batches import TrainingBatches, load_corpora
from skippipe_jax.data.documents import read_documents

TEXTS = [f"document {number} " + "x" * number for number in range(30)]


def lines(texts: list[str], key: str = "text") -> str:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts)


def texts_of(kind: str, path: Path | str, **changes: str) -> list[str]:
    return [one.text.decode() for one in read_documents(DocumentSource(kind, str(path), **changes))]


def refused(kind: str, path: Path | str, **changes: str) -> InputError:
    with pytest.raises(InputError) as caught:
        texts_of(kind, path, **changes)
    return caught.value


def test_a_file_that_is_one_list_is_read_and_its_first_wrong_entry_named(tmp_path):
    rows = [{"text": text} for text in TEXTS[:3]]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    assert texts_of("jsonl", tmp_path / "list.json") == TEXTS[:3]
    (tmp_path / "list.json").write_text(json.dumps([*rows, 7]))
    error = refused("jsonl", tmp_path / "list.json")
    assert "list.json, entry 4: not a JSON object" in error.problem
    (tmp_path / "list.json").write_text('[{"text": "a"},\n {"text" "b"}]\n')
    error = refused("jsonl", tmp_path / "list.json")
    assert "list.json, line 2, column 10: not valid JSON" in error.problem


def test_lines_of_files_folders_and_globs(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS[:10]) + "\n" + lines(["", "tail"]))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines(TEXTS[10:]))
    (tmp_path / "cut.gz").write_bytes((tmp_path / "b.jsonl.gz").read_bytes()[:-20])
    assert "cannot read" in refused("jsonl", tmp_path / "cut.gz").problem
    (tmp_path / "damaged.xz").write_bytes(lzma.compress(b"{}")[:-20] + bytes(20))
    assert "damaged.xz: Corrupt" in refused("jsonl", tmp_path / "damaged.xz").problem
    (tmp_path / "readme.md").write_text("no JSON")
    first, second = [*TEXTS[:10], "tail"], TEXTS[10:]
    assert texts_of("jsonl", tmp_path / "a.jsonl") == first
    assert texts_of("jsonl", tmp_path) == first + second
    assert texts_of("jsonl", tmp_path / "b*") == second
    assert texts_of("text", tmp_path / "*.md") == ["no JSON"]


def test_compressed_text_is_decompressed_or_refused(tmp_path, monkeypatch):
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(b"text"))
    assert texts_of("text", tmp_path) == ["text"]
    monkeypatch.delitem(compressions, "zst", raising=False)
    for name, problem in (("a.jsonl.zst", "needs the package zstandard"), ("a.zip", "an archive")):
        (tmp_path / name).write_bytes(b"any")
        for kind in ("text", "jsonl"):
            assert f"{name} " in (found := refused(kind, tmp_path / name).problem)
            assert problem in found


@pytest.mark.parametrize(
    ("kind", "pattern", "problem"),
    [
        ("chat", "", "does not contain any file whose name ends in .jsonl, .jsonl.gz, "),
        ("parquet", "", "does not contain any file whose name ends in .parquet"),
        ("chat", "*.jsonl", "does not match any file"),
        ("text", "none*", "does not match any file"),
    ],
)
def test_what_was_looked_for_is_said_where_nothing_is_found(tmp_path, kind, pattern, problem):
    (tmp_path / "book.txt").write_text("text")
    error = refused(kind, tmp_path / pattern)
    assert (error.field, error.problem[: len(problem)]) == ("data.path", problem)
    # A file that is named itself may be called anything.
    assert "Name a single file" in error.remedy
    assert texts_of("text", tmp_path / "book.txt") == ["text"]


def test_rows_of_parquet(tmp_path):
    table = arrow.table({"id": range(len(TEXTS) + 1), "body": [*TEXTS, None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert texts_of("parquet", tmp_path, text_field="body") == TEXTS
    error = refused("parquet", tmp_path)
    assert (error.field, error.value) == ("data.text_field", "text")
    assert "a.parquet" in error.problem
    assert "id, body" in error.problem
    error = refused("parquet", tmp_path, text_field="id")
    assert "row 1: contains int, not text" in error.problem
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    assert "b.parquet is not a Parquet file" in refused("parquet", tmp_path / "b.parquet").problem


def test_what_fsspec_knows_is_read_from_there():
    system = fsspec.filesystem("memory")
    system.pipe("/corpus/a.jsonl", lines(TEXTS[:20]).encode())
    system.pipe("/corpus/deep/b.jsonl", lines(TEXTS[20:]).encode())
    system.pipe("/corpus/.hidden.jsonl", b"{")
    try:
        assert texts_of("jsonl", "memory://corpus") == TEXTS
        assert texts_of("jsonl", "memory://corpus/*.jsonl") == TEXTS[:20]
        assert texts_of("text", "memory://corpus/a.jsonl") == [lines(TEXTS[:20])]
        config = DataConfig("jsonl", "memory://corpus", sequence_length=20)
        assert TrainingBatches(config)[0]["tokens"].shape == (4, 20)
        assert "No such file" in refused("text", "memory://nowhere").problem
        assert "cannot be opened by fsspec" in refused("text", "nosuch://corpus").problem
    finally:
        system.rm("/corpus", recursive=True)


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        ('{"text": "half', "data.path", "line 3, column 10: not valid JSON: Unterminated"),
        (' {"text": "a"', "data.path", "line 3, column 14: not valid JSON: Expecting"),
        ("[1]", "data.path", "line 3: not a JSON object"),
        ('{"text": 3}', "data.text_field", "line 3: contains int, not text"),
        (
            '{"Text": "a", "id": 1}',
            "data.text_field",
            "line 3 does not have this field; it has Text, id",
        ),
        ('{"text": "\\ud800"}', "data.path", "line 3: half of a surrogate pair"),
        ("\xff", "data.path", "line 3: not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, field, problem):
    file = tmp_path / "a.jsonl"
    file.write_bytes((lines(TEXTS[:1]) + "\n").encode() + line.encode("latin-1") + b"\n")
    error = refused("jsonl", file)
    assert error.field == field
    assert f"{file}, {problem}" in error.problem
    assert error.problem.count("line ") == 1


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_conversations_that_are_read_as_text_are_told_of(key, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({key: []}))
    assert "set the source to chat (data.source)" in refused("jsonl", tmp_path).remedy


def test_rows_are_held_out_by_their_own_text(tmp_path):
    def held_out(texts: list[str], seed: int = 0) -> set[bytes]:
        file = tmp_path / f"{len(texts)}.jsonl"
        file.write_text(lines(texts))
        given: dict[str, Any] = {"sequence_length": 8, "held_out": 0.3, "shuffle_seed": seed}
        [corpus] = load_corpora(DataConfig("jsonl", str(file), **given))
        part = corpus.held_out
        return {
            bytes(piece[1:-1].astype(np.uint8))
            for piece in np.split(part.tokens[:], part.ends[:-1])
        }

    some, every = held_out(TEXTS[:20]), held_out(TEXTS)
    assert 0 < len(some) < 20
    assert some == every & {text.encode() for text in TEXTS[:20]}
    assert held_out(TEXTS[::-1] * 2) == every != held_out(TEXTS, seed=1)


def test_files_are_told_apart_by_what_a_glob_leaves_open(tmp_path):
    memory = fsspec.filesystem("memory")
    for number in range(40):
        (tmp_path / f"book{number}").mkdir()
        (tmp_path / f"book{number}" / "text.txt").write_text(f"book {number} " * 20)
        memory.pipe(f"/library/book{number}/text.txt", f"book {number} ".encode() * 20)
    try:
        found = []
        for path in (str(tmp_path), f"{tmp_path}/*/text.txt", "memory://library/*/text.txt"):
            config = DataConfig("text", path, sequence_length=8, held_out=0.3)
            [corpus] = load_corpora(config)
            found.append(corpus.held_out.tokens[:].tolist())
            assert 5 <= len(corpus.held_out.ends) <= 20
        assert found[0] == found[1] == found[2]
    finally:
        memory.rm("/library", recursive=True)
