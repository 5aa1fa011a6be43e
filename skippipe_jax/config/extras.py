"""Optional packages: imported where they are needed, with a word on how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from skippipe_sched.errors import InputError


def require(module: str, extra: str, field: str, value: Any) -> Any:
    """Return the module of an optional package, which the extra of that name installs.

    `field` and `value` are what asks for it. Raises `InputError` if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            field,
            value,
            f"needs the package {module.partition('.')[0]}, which is not installed here",
            f'Install it, in a clone of the repository: pip install -e ".[{extra}]", '
            f'or with the file of the wheel: pip install "FILE.whl[{extra}]"',
        ) from error
