"""Compiled functions, kept on disk under a name that changes with any code they consist of.

numba keeps what it compiled beside each module and looks only at that module's own file: after an
update of evaluator.py alone, it would go on with an annealing.py that has the old evaluator in it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config
from numba.extending import register_jitable

# The modules that compiled code is made of, besides all of this room.
MODULES = ("methods/dtfm.py", "problem/rules.py", "timing/averaging.py")


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call; it then runs without the interpreter's lock."""
    settings: Any = config
    others_folder = settings.CACHE_DIR
    settings.CACHE_DIR = _cache_folder()
    try:
        return njit(cache=True, nogil=True)(function)
    finally:
        settings.CACHE_DIR = others_folder


def compiled_within(function: Callable[..., Any]) -> None:
    """Let compiled functions call one of plain Python, which stays as it is for everyone else."""
    register_jitable(function)


def is_compiled(function: Any) -> bool:
    """Whether a `compiled` function was compiled before on this machine, for this installation."""
    # numba has a folder for each place in which a module lies: another installation compiles anew.
    folder = Path(function._cache.cache_path)
    return any(folder.glob(f"*.{function.py_func.__name__}-*.nbi"))


@cache
def _cache_folder() -> str:
    """A folder for this very code: the user's cache, or the system's temporary files."""
    here = Path(__file__).parents[1]
    modules = [*sorted(here.glob("search/*.py")), *(here / name for name in MODULES)]
    digest = hashlib.sha256(b"".join(module.read_bytes() for module in modules)).hexdigest()
    name = f"skippipe_sched/{digest[:16]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        (user / name).mkdir(parents=True, exist_ok=True)
    except OSError:  # A home that cannot be written to, as service users often have.
        return f"{tempfile.gettempdir()}/{name}"
    return str(user / name)
