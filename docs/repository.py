"""Pages link to files of the repository that lie outside docs/: these become part of the site.

So a link is right wherever the page is read, on the site or in a checkout. What is Markdown itself
(experiments/launch/README.md) becomes a page, with all that it links to; anything else a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The target of a Markdown link or picture, without what follows # in it.
TARGET = re.compile(r"(?<=\]\()(?!\w+:)[^\s)#]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this with the files of docs/: add the others that the site needs."""
    unread = [page for page in sorted(DOCS.glob("*.md"))]
    found: set[Path] = set()
    for page in unread:  # which grows meanwhile
        for target in linked_files(page):
            if target not in found and DOCS not in target.parents and target != ROOT / "README.md":
                found.add(target)
                files.append(
                    File.generated(config, place_on_site(target), abs_src_path=str(target))
                )
                unread += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """MkDocs calls this for every page: let its links lead to where the files are on the site."""
    source = Path(str(page.file.abs_src_path))
    start = os.path.dirname(page.file.src_uri) or "."

    def on_site(link: re.Match[str]) -> str:
        target = target_of(source, link[0])
        return os.path.relpath(place_on_site(target), start) if target.is_file() else link[0]

    return TARGET.sub(on_site, markdown)


def linked_files(page: Path) -> Iterator[Path]:
    """Return the files of the repository that a page links to."""
    for link in TARGET.findall(page.read_text(encoding="utf-8")):
        target = target_of(page, link)
        if target.is_file():
            yield target


def target_of(page: Path, link: str) -> Path:
    """Return the path of a relative link on a page."""
    return Path(os.path.normpath(page.parent / link))


def place_on_site(path: Path) -> str:
    """Where the site has a file of the repository; its front page stands for README.md."""
    if path == ROOT / "README.md":
        return "index.md"
    return path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()
