"""Import of optional packages, with instructions to install them in the error."""

from __future__ import annotations

import importlib
from typing import Any

from skippipe_sched.errors import InputError


def require_extra(module: str, extra: str, field: str, value: Any) -> Any:
    """Return the module of an optional package, which the extra `extra` installs.

    Raises:
        InputError: naming `field` and `value`, which need the package, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            field,
            value,
            f"needs the package {module.partition('.')[0]}, which is not installed",
            f'Run pip install -e ".[{extra}]" in a clone of the repository, '
            f'or pip install "FILE.whl[{extra}]" with the wheel',
        ) from error
