"""Tests run on four virtual CPU devices, and share compiled programs with their processes.

Arrays are held to the shapes in annotations, but not in these processes, which are as users' are.

With `-n 2` two processes take them by files. Tests that are marked as alone have the machine for
themselves then: what they hold a clock to would depend on the test beside them. Their files come
first, so that they wait for one another and not for long tests, and then those that take longest,
so that no process is left with one of them when the other has nothing to do.
"""

import fcntl
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

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
# How long an example takes depends on what runs beside it.
settings.register_profile("tests", settings(), deadline=None)
settings.load_profile("tests")
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
DEAREST = (
    "test_docs.py",
    "multihost/test_training_hosts.py",
    "test_notebooks.py",
    "training/test_kill.py",
    "test_benchmarks.py",
    "training/test_resume.py",
    "multihost/test_launch_recipes.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files, and within a file those tests first that are alone."""
    alone = {item.path for item in items if is_alone(item)}
    first = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    dear = {TESTS / name: number for number, name in enumerate(DEAREST)}
    assert all(path.exists() for path in dear)

    def turn(item: pytest.Item) -> tuple[bool, int, int, bool]:
        path = item.path
        return path not in alone, dear.get(path, len(dear)), first[path], not is_alone(item)

    items.sort(key=turn)


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that is alone wait for those that run, and the next ones wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = Path(tempfile.gettempdir(), f"skippipe_jax_tests_of_{os.getuid()}")
    folder.mkdir(exist_ok=True)
    # Whoever comes passes the door; who is alone keeps it shut until the end.
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        alone = is_alone(item)
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
