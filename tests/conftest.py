"""Tests run on four virtual CPU devices, and share compiled programs with their processes."""

import os
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "skippipe_jax_tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# Tests compile far more than they compute, and this is what takes compilers longest.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """What a module has compiled is not kept: in one process, memory maps are limited in number."""
    yield
    import jax

    jax.clear_caches()
