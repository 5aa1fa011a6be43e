"""Docstrings and pages keep the rules of plain English that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT))
    for package in ("skippipe_jax", "sched/skippipe_sched")
    for path in ROOT.glob(f"{package}/**/__init__.py")
)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "experiments/**/*.md")
    for path in ROOT.glob(pattern)
)
# Docstrings name their subject, or say what a function does.
RELATIVE = re.compile(r"(What|Whether|Those|That|How|Of|Which|Who|So)\b")
AVOIDED = re.compile(r"\b(nobody|besides|anew|in vain|hardly|for ever|as ever)\b", re.I)
CODE = re.compile(r"```.*?^```|`[^`]*`", re.M | re.S)


def docstrings(path: Path) -> Iterator[str]:
    """Yield all docstrings of a module, those of attributes too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(ast.Constant(str(text))):
                        yield text


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_their_subject_or_a_verb(package: str):
    found = [
        f"{path.relative_to(ROOT)}: {text.strip().splitlines()[0]}"
        for path in sorted((ROOT / package).glob("*.py"))
        for text in docstrings(path)
        if RELATIVE.match(text.strip())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_only_words_of_today(page: str):
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = [line for line in text.splitlines() if AVOIDED.search(line)]
    assert not found, "\n".join(found)
