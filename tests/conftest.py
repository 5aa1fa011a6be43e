"""Tests run on four virtual CPU devices, and share compiled programs with their processes."""

import os
import tempfile
from collections.abc import Iterator

import pytest

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


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """What a module has compiled is not kept: in one process, memory maps are limited in number."""
    yield
    import jax

    jax.clear_caches()
