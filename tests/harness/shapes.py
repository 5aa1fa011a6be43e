"""Shapes in annotations hold: calls are checked against them, wherever the tests make them.

The other types are left to pyright, which sees all calls, not only those that tests make.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

PACKAGE = Path(__file__).parents[2] / "skippipe_jax"


def enforce_shapes() -> None:
    """Have modules that are imported from now on check the arrays that they take and return."""
    install_import_hook(modules_with_shapes(), "tests.harness.shapes.checked")


def modules_with_shapes() -> list[str]:
    """Return the modules of the package that import jaxtyping."""
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if "from jaxtyping import" in path.read_text()
    ]


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check those arguments, and that result, of a function whose annotations hold a shape."""
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if has_shape(hint)}
    return beartype(function) if function.__annotations__ else function


def has_shape(hint: Any) -> bool:
    """Whether an annotation is one of an array, or of a container of arrays."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    parts = (*typing.get_args(hint), getattr(hint, "leaftype", None))
    return any(has_shape(part) for part in parts if part is not None)
