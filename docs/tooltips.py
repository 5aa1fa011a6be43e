"""The first mention of a term on each page of the site shows its meaning in docs/glossary.md."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.pages import Page

GLOSSARY = Path(__file__).with_name("glossary.md")
ROW = re.compile(r"^\| \*(.+?)\* \| (.+?) \|", re.MULTILINE)
TAG = re.compile(r"(<[^>]*>)")
# Words that pages also use in an ordinary sense: in this case, in order, the path of a file.
AMBIGUOUS = {"case", "commit", "order", "path", "place", "program"}
# Within these nothing is marked.
UNMARKED = re.compile(r"</?(?:a|abbr|button|code|h[1-6]|pre|script|style|svg)[\s>]")


@cache
def meanings() -> dict[str, str]:
    """Return the terms of the glossary, each with its meaning."""
    return dict(ROW.findall(GLOSSARY.read_text(encoding="utf-8").replace("`", "")))


@cache
def shown() -> dict[str, str]:
    """Return the terms that pages mark."""
    return {term: meaning for term, meaning in meanings().items() if term not in AMBIGUOUS}


def on_page_content(page_html: str, page: Page, **_: Any) -> str:
    """MkDocs calls this for every page: mark its terms."""
    return page_html if page.file.src_uri == GLOSSARY.name else marked(page_html, shown())


def marked(page_html: str, meaning_of: Mapping[str, str]) -> str:
    """Return a page with a tooltip at the first mention of each term in its text."""
    longest_first = sorted(meaning_of, key=len, reverse=True)
    mention = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})s?\b", re.IGNORECASE)
    unseen, depth, parts = set(meaning_of), 0, []

    def mark(found: re.Match[str]) -> str:
        term = found[1].lower()
        if term not in unseen:
            return found[0]
        unseen.remove(term)
        return f'<abbr title="{html.escape(meaning_of[term])}">{found[0]}</abbr>'

    for part in TAG.split(page_html):
        if UNMARKED.match(part):
            depth += -1 if part.startswith("</") else 1
        is_text = not depth and not part.startswith("<")
        parts.append(mention.sub(mark, part) if is_text else part)
    return "".join(parts)
