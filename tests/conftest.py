"""Tests run on four virtual CPU devices, and share compiled programs with their processes.

Arrays are held to the shapes in annotations, but not in processes that tests start, which are as
users' are. With `-n 2` two workers take the tests by files, those with most tests first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.harness.shapes import enforce_shapes

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile far more than they compute, and these flags make XLA a quick compiler. An unknown
# flag ends the process: the last one is gone from JAX 0.11.
xla_flags = "--xla_force_host_platform_device_count=4 --xla_cpu_parallel_codegen_split_count=1"
if metadata.version("jaxlib").startswith("0.10."):
    xla_flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", xla_flags)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "skippipe_jax_tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
enforce_shapes()
# How long an example takes depends on what runs beside it, so none has a deadline. A default run
# repeats the examples of the last one; `--hypothesis-profile nightly` draws new ones.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("nightly", deadline=None, max_examples=200, print_blob=True)
settings.load_profile("default")
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def print_at_once() -> None:
    """Have hosts of these processes print as they say it, where a test looks for it."""
    from skippipe_jax import log

    log.configure = lambda: None


# A process keeps what it has compiled, and the C library the memory of what it has dropped. Linux
# allows a process 65,530 memory maps, too, of which a compiled program takes several.
MAX_MEMORY_MAPS = 30_000
MAX_RESIDENT_BYTES = 3 * 2**30
MEMORY_MAPS = Path("/proc/self/maps")


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not in what was imported: 2% of the time of tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def bound_memory() -> Iterator[None]:
    """Drop what was compiled before a process holds too much of it."""
    yield
    if not MEMORY_MAPS.exists():
        return
    with MEMORY_MAPS.open() as maps:
        number = sum(1 for _ in maps)
    if number > MAX_MEMORY_MAPS or psutil.Process().memory_info().rss > MAX_RESIDENT_BYTES:
        import jax

        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
