"""Kernels: functions that run as they are, or compiled, which takes a machine some time, once.

Whoever calls a kernel from Python says `fast(kernel)(...)`; kernels call each other by name. numba
is loaded when the first one is compiled. It keeps what it compiled beside each module and looks
only at that module's own file: after an update of evaluator.py alone, it would go on with an
annealing.py that has the old evaluator in it. So all is kept under a name that changes with any
code that kernels consist of.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from skippipe_sched.timing import averaging, hops

# The modules that compiled code is made of, besides all of this room.
MODULES = ("methods/dtfm.py", "problem/rules.py", "timing/averaging.py", "timing/hops.py")

Function = TypeVar("Function", bound=Callable[..., Any])
_not_registered: list[Callable[..., Any]] = [*averaging.ON_ARRAYS, *hops.ON_ARRAYS]
_lock = threading.Lock()
_mode = threading.local()


def kernel(function: Function) -> Function:
    """Let compiled kernels call a function, which stays as it is."""
    _not_registered.append(function)
    return function


def fast(function: Callable[..., Any]) -> Any:
    """Give a kernel in machine code; it then runs without the interpreter's lock.

    While this thread is `interpreting`, give the function as it is.
    """
    return function if getattr(_mode, "interprets", False) else _machine_code(function)


@contextmanager
def interpreting() -> Iterator[None]:
    """Run kernels of this thread by the interpreter, about a thousand times as slowly."""
    _mode.interprets = True
    try:
        with np.errstate(over="ignore"):  # Random numbers leave out what does not fit.
            yield
    finally:
        _mode.interprets = False


@cache
def _machine_code(function: Callable[..., Any]) -> Any:
    from numba import njit
    from numba.core import config
    from numba.extending import register_jitable

    settings: Any = config
    with _lock:
        while _not_registered:
            register_jitable(_not_registered.pop())
        others_folder = settings.CACHE_DIR
        settings.CACHE_DIR = str(_cache_folder())
        try:
            return njit(cache=True, nogil=True)(function)
        finally:
            settings.CACHE_DIR = others_folder


def is_compiled() -> bool:
    """Tell whether a search was compiled before on this machine, for this installation."""
    return _mark().exists()


def mark_as_compiled() -> None:
    """Note that whatever a search needs is compiled, for those that come after."""
    _mark().touch()


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Wait until no other process of this machine compiles."""
    with (_cache_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Compilation:
    """Another process that compiles the search; it stays if this one ends."""

    def __init__(self, program: str):
        """Run a program in Python; what it says goes to a file beside the compiled code."""
        self._said = _cache_folder() / "compilation.txt"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip
        self._is_failure_told = False

    def succeeded(self) -> bool | None:
        """Tell whether it has; None while it runs. Its failure is printed on stderr, once."""
        code = self._process.poll()
        if code and not self._is_failure_told:
            self._is_failure_told = True
            print(
                f"the search could not be compiled (exit code {code}, see {self._said}): it goes "
                "on in plain Python, about a thousand times as slowly",
                file=sys.stderr,
            )
        return None if code is None else code == 0


def _mark() -> Path:
    # numba has a folder for each place in which a module lies: another installation compiles anew.
    place = hashlib.sha256(str(Path(__file__).parent).encode()).hexdigest()[:16]
    name = f"{place}-{sys.implementation.cache_tag}-numba-{importlib.metadata.version('numba')}"
    return _cache_folder() / name


@cache
def _cache_folder() -> Path:
    """Make a folder for this very code: in the user's cache, or among temporary files."""
    here = Path(__file__).parents[1]
    modules = [*sorted(here.glob("search/*.py")), *(here / name for name in MODULES)]
    digest = hashlib.sha256(b"".join(module.read_bytes() for module in modules)).hexdigest()
    name = f"skippipe_sched/{digest[:16]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = user / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # A home that cannot be written to, as service users often have.
        folder = Path(tempfile.gettempdir(), name)
        folder.mkdir(parents=True, exist_ok=True)
    return folder
