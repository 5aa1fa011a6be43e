"""Readers of documents: files of text, lines of JSON, rows of Parquet; local or remote."""

from __future__ import annotations

import errno
import functools
import glob
import itertools
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import compressions
from skippipe_sched.errors import InputError

from skippipe_jax.config import DocumentSource
from skippipe_jax.config.data import CONVERSATIONS
from skippipe_jax.config.extras import require_extra

_SUFFIXES = {
    "python": (".py", ".txt", ".rst", ".md"),
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json"),
    "parquet": (".parquet",),
}
_PYTHON_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """Text in UTF-8, or for `chat` a JSON object.

    `where` is its origin, for messages. `key`, a file's name or a row's own text, decides whether
    it is held out, independently of other documents.
    """

    where: str
    key: bytes
    text: bytes

    def decoded(self, source: DocumentSource) -> str:
        """Return the text as a string; raise `InputError` if it is not UTF-8."""
        try:
            return self.text.decode()
        except UnicodeDecodeError as error:
            problem = f"{self.where} is not UTF-8 text (byte {error.start})"
            raise source.error(
                problem, "Save it as UTF-8, or set the tokenizer to bytes"
            ) from error


def read_documents(source: DocumentSource) -> Iterator[Document]:
    """Yield every document that is not empty, in a fixed order.

    Raises:
        InputError: naming file and line or row, if something cannot be read or holds no text; or
            naming the expected endings of file names, if no file has one of them.
    """
    system, files = _files(source)
    if not files:
        raise _no_files_error(source)
    read = {"jsonl": _read_lines, "chat": _read_lines, "parquet": _read_parquet}.get(
        source.kind, _read_file
    )
    for name, file in sorted(files):
        try:
            yield from (one for one in read(source, system, name, file) if one.text)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            problem = f"cannot read {file}: {getattr(error, 'strerror', None) or error}"
            raise source.error(problem, "Name a file or folder that can be read") from error


@functools.lru_cache(maxsize=64)  # Files are listed once per process, as text is read once.
def require_disjoint(sources: tuple[DocumentSource, ...]) -> None:
    """Refuse a file that is a document of two sources with different paths.

    Each source decides by the file's name in its own folder whether it is held out, so one might
    train on a file that the other holds out. Rows are held out by their text, in any source.

    Raises:
        InputError: naming the second source and the file.
    """
    path_of: dict[str, str | None] = {}
    for source in sources:
        if source.kind not in ("python", "text"):
            continue
        for _, file in _files(source)[1]:
            if path_of.setdefault(file, source.path) != source.path:
                problem = (
                    f"{file} is in another source too, and may be held out in only one of them"
                )
                raise source.error(problem, "Name paths that do not overlap")


def require_outside(source: DocumentSource, folder: str, field: str) -> None:
    """Refuse a folder below that of the source, which would read the files written there.

    Raises:
        InputError: naming `field`.
    """
    if source.path is None or source.kind in ("tokens", "parquet") or _is_url(source.path):
        return
    root, written = (Path(os.path.realpath(os.path.expanduser(p))) for p in (source.path, folder))
    if not (root.is_dir() and written.is_relative_to(root)):
        return
    if not any(part.startswith(".") for part in written.relative_to(root).parts):
        problem = f"lies in {source.path}, whose files are read as text"
        remedy = "Name a folder outside of it, or put the text into a folder of its own"
        raise InputError(field, folder, problem, remedy)


def local_path(path: str) -> str:
    """Return the absolute path of a local file; a URL is unchanged."""
    return path if _is_url(path) else os.path.abspath(os.path.expanduser(path))


def _files(source: DocumentSource) -> tuple[Any, list[tuple[str, str]]]:
    """Return the file system, and each file's name relative to the source and its path there."""
    suffixes = _SUFFIXES[_kind_of_file(source)]
    try:
        if source.path is not None and _is_url(source.path):
            return _remote_files(source.path, suffixes)
        root = Path(local_path(source.path or sysconfig.get_path("stdlib")))
        skipped = () if source.path else _PYTHON_SKIPPED
        files = list(_local_files(root, skipped, suffixes))
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
        raise source.error(problem, "Name a file or folder that exists") from error
    except (ImportError, ValueError) as error:
        raise source.error(
            f"cannot be opened by fsspec: {error}",
            "Correct it, or install the package that fsspec needs",
        ) from error
    return LocalFileSystem(), files


def _no_files_error(source: DocumentSource) -> InputError:
    remedy = "Name a single file, or a folder or glob with matching files"
    endings = [ending for ending in _SUFFIXES[_kind_of_file(source)] if ending]
    if glob.has_magic(source.path or ""):
        return source.error("does not match any file", remedy)
    if not endings:
        return source.error("does not contain any file", remedy)
    problem = f"does not contain any file whose name ends in {', '.join(endings)}"
    remedy += f", or set another kind of source than {source.kind}"
    return source.error(problem, remedy)


def _kind_of_file(source: DocumentSource) -> str:
    return "jsonl" if source.kind == "chat" else source.kind


def _is_url(path: str) -> bool:
    return "://" in path


def _local_files(
    root: Path, skipped: Collection[str], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    if root.is_dir():
        for folder, subfolders, names in os.walk(root, onerror=_raise):
            subfolders[:] = [name for name in subfolders if name[0] != "." and name not in skipped]
            for name in names:
                if name[0] != "." and name.endswith(suffixes):
                    file = Path(folder, name)
                    yield file.relative_to(root).as_posix(), str(file)
    elif not root.exists() and glob.has_magic(str(root)):
        matches = [file for file in glob.glob(str(root), recursive=True) if os.path.isfile(file)]
        yield from ((_name_in(str(root), file), file) for file in matches)
    else:
        yield root.name, str(root)


def _remote_files(url: str, suffixes: tuple[str, ...]) -> tuple[Any, list[tuple[str, str]]]:
    system, root = fsspec.url_to_fs(url)
    if system.isfile(root):
        return system, [(PurePosixPath(root).name, root)]
    if glob.has_magic(root):
        matches = [file for file in system.glob(root) if PurePosixPath(file).name[0] != "."]
        return system, [(_name_in(root, file), file) for file in matches]
    matches = [(file.removeprefix(root).lstrip("/"), file) for file in system.find(root)]
    if not matches:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    visible = [(name, file) for name, file in matches if not ("/" + name).count("/.")]
    return system, [(name, file) for name, file in visible if name.endswith(suffixes)]


def _name_in(pattern: str, file: str) -> str:
    """Return the rest of a file's path, from the first part that the glob leaves open."""
    parts = PurePosixPath(pattern).parts
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), parts)
    return PurePosixPath(file).relative_to(PurePosixPath(*fixed)).as_posix()


def _raise(error: OSError) -> NoReturn:
    raise error


def _opened(source: DocumentSource, system: Any, file: str) -> Any:
    """Open a file; it is decompressed if the ending of its name says so."""
    if file.endswith(".zip"):  # fsspec would read its first file only.
        raise source.error(f"{file} is an archive, which is not read", "Unpack it")
    if file.endswith(".zst") and "zst" not in compressions:
        problem = f"{file} needs the package zstandard, which is not installed"
        raise source.error(problem, "Run pip install zstandard, or decompress the file")
    return system.open(file, "rb", compression="infer")


def _read_file(source: DocumentSource, system: Any, name: str, file: str) -> Iterator[Document]:
    with _opened(source, system, file) as opened:
        yield Document(file, name.encode(errors="surrogateescape"), opened.read())


def _read_lines(source: DocumentSource, system: Any, name: str, file: str) -> Iterator[Document]:
    with _opened(source, system, file) as opened:
        for number, line in enumerate(opened, 1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith(b"["):
                yield from _read_list(source, file, line + opened.read())
                return
            row = _parse_json(source, file, number, line, "Correct that line")
            yield _document_of_object(source, where, line.strip(), row)


def _read_list(source: DocumentSource, file: str, text: bytes) -> Iterator[Document]:
    """Read a file that is one JSON list of objects."""
    rows = _parse_json(source, file, 1, text, "Write a list of {...}, or one {...} per line")
    for number, row in enumerate(rows, 1):
        content = json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass")
        yield _document_of_object(source, f"{file}, entry {number}", content, row)


def _parse_json(source: DocumentSource, file: str, first: int, text: bytes, remedy: str) -> Any:
    """Read the JSON that begins on line `first` of a file."""
    try:
        return json.loads(text.rstrip())
    except (ValueError, RecursionError) as error:
        where, problem = f"{file}, line {first}", str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"{file}, line {first + error.lineno - 1}, column {error.colno}"
            problem = error.msg
        raise source.error(f"{where}: not valid JSON: {problem}", remedy) from error


def _document_of_object(source: DocumentSource, where: str, content: bytes, row: Any) -> Document:
    if not isinstance(row, dict):
        raise source.error(f"{where}: not a JSON object", "Write one {...} per line")
    if source.kind == "chat":
        return Document(where, content, content)
    return _document_of_row(source, where, row)


def _document_of_row(source: DocumentSource, where: str, row: dict[str, Any]) -> Document:
    if source.text_field not in row:
        raise _missing_field_error(source, where, list(row))
    text = row[source.text_field]
    if text is None:
        return Document(where, b"", b"")
    if not isinstance(text, str):
        raise InputError(
            f"{source.field}.text_field",
            source.text_field,
            f"{where}: contains {type(text).__name__}, not text",
            "Name a key whose values are text",
        )
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise source.error(
            f"{where}: half of a surrogate pair is not text", "Correct that line"
        ) from error
    return Document(where, content, content)


def _read_parquet(source: DocumentSource, system: Any, name: str, file: str) -> Iterator[Document]:
    arrow = require_extra("pyarrow", "data", *source.origin)
    parquet = require_extra("pyarrow.parquet", "data", *source.origin)
    with system.open(file, "rb") as opened:
        try:
            table = parquet.ParquetFile(opened)
            if source.text_field not in table.schema_arrow.names:
                raise _missing_field_error(source, file, table.schema_arrow.names)
            number = 0
            for batch in table.iter_batches(columns=[source.text_field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield _document_of_row(
                        source, f"{file}, row {number}", {source.text_field: text}
                    )
        except arrow.ArrowException as error:
            raise source.error(
                f"{file} is not a Parquet file: {error}", "Replace or remove it"
            ) from error


def _missing_field_error(source: DocumentSource, where: str, names: list[str]) -> InputError:
    remedy = "Name the field that contains the text"
    if source.kind == "jsonl" and not CONVERSATIONS.isdisjoint(names):
        remedy += ", or set the source to chat (data.source) if these are conversations"
    return InputError(
        f"{source.field}.text_field",
        source.text_field,
        f"{where} does not have this field; it has {', '.join(map(str, names)) or 'none'}",
        remedy,
    )
