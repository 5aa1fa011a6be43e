"""The texts of the studies with gates, each in three parts: the standard library, or some of it.

A module and its tests belong to one part, so nothing that is measured was trained on. Two domains
can be left out for a model that goes on with one of them: modules of windows, where a file and its
tests belong to one part, and the documentation of the language, where a page does.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from skippipe_jax.storage.files import atomic_write

TRAINING, VALIDATION, TEST = PARTS = ("training", "validation", "test")
# Of all modules, by a hash of their names.
SHARES = {VALIDATION: 0.08, TEST: 0.16}
STANDARD = Path(sysconfig.get_path("stdlib"))
INSTALLED = {"site-packages", "dist-packages"}
BETWEEN = b"\n\0"
# The texts; GENERAL is ALL without the domains. They lie in folders of these names.
ALL, GENERAL = "", "general"
DOMAINS = WINDOWS, DOCUMENTATION = "windows", "documentation"
MODULES_OF_WINDOWS = {
    *("idle", "idlelib", "tk", "tkinter", "ttk_guionly", "ttk_textonly", "turtle", "turtledemo")
}


def part_of(name: str) -> str:
    """Name the part of the text to which the module of this name belongs."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    place = int.from_bytes(digest) / 2**64
    return next((part for part, below in SHARES.items() if place < below), TRAINING)


def module_of(path: Path) -> str:
    """Name the module to which a file of the library belongs: of a test, what it tests."""
    names = [name.removesuffix(".py") for name in path.relative_to(STANDARD).parts]
    if names[0] == "test" and len(names) > 1:
        names = names[1:]
    return names[0].removeprefix("test_").strip("_")


def standard_library() -> Iterator[tuple[str, Path]]:
    """Each source file of the standard library, and its module."""
    # Without walking through the many files of installed packages.
    tops = [top for top in STANDARD.iterdir() if top.name not in INSTALLED]
    modules = [top for top in tops if top.suffix == ".py" and top.is_file()]
    for path in sorted([*modules, *(path for top in tops for path in top.rglob("*.py"))]):
        yield module_of(path), path


def documents_of(text: str) -> Iterator[tuple[str, bytes]]:
    """Each document of a text, and the name by which it belongs to a part."""
    if text == DOCUMENTATION:
        yield from ((topic, page.encode()) for topic, page in topics.items())
        return
    for module, path in standard_library():
        if text == WINDOWS and module in MODULES_OF_WINDOWS:
            yield path.stem.removeprefix("test_").strip("_"), path.read_bytes()
        elif text == ALL or (text == GENERAL and module not in {*MODULES_OF_WINDOWS, "pydoc_data"}):
            yield module, path.read_bytes()


def write(folder: Path, text: str) -> None:
    """Write the three parts as files of bytes, documents in the order of their hashes."""
    documents: dict[str, list[bytes]] = {part: [] for part in PARTS}
    for name, document in documents_of(text):
        documents[part_of(name)].append(document)
    for part, own in documents.items():
        own.sort(key=lambda document: hashlib.blake2b(document, digest_size=8).digest())
        atomic_write(folder / f"{part}.txt", BETWEEN.join(own))


def read(folder: Path, text: str = ALL) -> dict[str, np.ndarray]:
    """Read the bytes of each part of a text, which are written first if they are not there."""
    folder = folder / text
    if not (folder / f"{TEST}.txt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, text)
    return {part: np.fromfile(folder / f"{part}.txt", np.uint8) for part in PARTS}
