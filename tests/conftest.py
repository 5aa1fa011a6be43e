"""Tests run on four virtual CPU devices, and share compiled programs with their processes.

Arrays are held to the shapes in annotations, but not in these processes, which are as users' are.

With `-n 2` two processes take them by files. Tests that are marked as alone have the machine for
themselves then: what they hold a clock to would depend on the test beside them.
"""

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.shapes import enforce_shapes

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile far more than they compute, and these flags make XLA a quick compiler.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "skippipe_jax_tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
enforce_shapes()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that is alone wait for those that run, and the next ones wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = Path(tempfile.gettempdir(), f"skippipe_jax_tests_of_{os.getuid()}")
    folder.mkdir(exist_ok=True)
    # Whoever comes passes the door; who is alone keeps it shut until the end.
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        alone = item.get_closest_marker("alone") is not None
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """What a module has compiled is not kept: in one process, memory maps are limited in number."""
    yield
    import jax

    jax.clear_caches()
