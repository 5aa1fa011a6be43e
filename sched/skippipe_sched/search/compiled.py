"""Kernels: functions that run interpreted, or compiled once for each machine.

Python code calls a kernel with `fast(kernel)(...)`; kernels call each other by name. numba is
loaded when the first one is compiled. It caches compiled code next to each module and checks only
that module's own file: after an update of evaluator.py alone, it would use a cached annealing.py
that contains the old evaluator. So the cache folder's name depends on the code of all kernels.
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

# Modules with compiled code outside this package.
MODULES = ("methods/dtfm.py", "problem/rules.py", "timing/averaging.py", "timing/hops.py")

Function = TypeVar("Function", bound=Callable[..., Any])
_not_registered: list[Callable[..., Any]] = [*averaging.ON_ARRAYS, *hops.ON_ARRAYS]
_allocating = {*_not_registered}
_lock = threading.Lock()
_mode = threading.local()


def kernel(function: Function) -> Function:
    """Register a function so that compiled kernels can call it; return it unchanged.

    It may not allocate arrays, nor assign slices of them. A kernel that may counts references to
    all arrays of its arguments at every call, which can take longer than its work.
    """
    _not_registered.append(function)
    return function


def allocating_kernel(function: Function) -> Function:
    """Register a kernel that allocates arrays."""
    _allocating.add(function)
    return kernel(function)


def _counting(function: Callable[..., Any]) -> dict[str, Any]:
    """Return numba's setting for whether a function counts references."""
    return {"_nrt": function in _allocating}


def fast(function: Callable[..., Any]) -> Any:
    """Return a kernel in machine code, which runs without the interpreter's lock.

    Return the function itself while this thread is `interpreting`.
    """
    return function if getattr(_mode, "interprets", False) else _machine_code(function)


@contextmanager
def interpreting() -> Iterator[None]:
    """Run kernels of this thread by the interpreter, about a thousand times as slowly."""
    _mode.interprets = True
    try:
        with np.errstate(over="ignore"):  # Random numbers overflow on purpose.
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
            register_jitable(**_counting(_not_registered[-1]))(_not_registered.pop())
        previous_folder = settings.CACHE_DIR
        settings.CACHE_DIR = str(_cache_folder())
        try:
            return njit(cache=True, nogil=True, **_counting(function))(function)
        finally:
            settings.CACHE_DIR = previous_folder


def is_compiled() -> bool:
    """Return whether a search was compiled on this machine for this installation."""
    return _mark().exists()


def mark_as_compiled() -> None:
    """Record that a search is compiled, for later processes."""
    _mark().touch()


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Wait until no other process on this machine compiles, and keep others from compiling."""
    with (_cache_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Compilation:
    """Separate process that compiles the search; it continues if this one ends."""

    def __init__(self, program: str):
        """Run a program in Python; its output is written to a file next to the compiled code."""
        self._log = _cache_folder() / "compilation.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._is_failure_reported = False

    def succeeded(self) -> bool | None:
        """Return whether it has succeeded; None while it runs. Print a failure once."""
        code = self._process.poll()
        if code and not self._is_failure_reported:
            self._is_failure_reported = True
            print(
                f"the search could not be compiled (exit code {code}, see {self._log}); it "
                "continues in plain Python, about 1,000 times slower",
                file=sys.stderr,
            )
        return None if code is None else code == 0


def _mark() -> Path:
    # numba has a folder for each location of a module: another installation compiles again.
    location = hashlib.sha256(str(Path(__file__).parent).encode()).hexdigest()[:16]
    name = f"{location}-{sys.implementation.cache_tag}-numba-{importlib.metadata.version('numba')}"
    return _cache_folder() / name


@cache
def _cache_folder() -> Path:
    """Make a cache folder for this code: in the user's cache, or among temporary files."""
    package = Path(__file__).parents[1]
    modules = [*sorted(package.glob("search/*.py")), *(package / name for name in MODULES)]
    digest = hashlib.sha256(b"".join(module.read_bytes() for module in modules)).hexdigest()
    name = f"skippipe_sched/{digest[:16]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = user / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # The home may not be writable, as is common for service users.
        folder = Path(tempfile.gettempdir(), name)
        folder.mkdir(parents=True, exist_ok=True)
    return folder
