"""Where the programs that XLA compiles are kept from run to run."""

from __future__ import annotations

import os
import tempfile

import jax

from skippipe_jax import log


def keep_programs(cache: str | None) -> None:
    """Let JAX keep compiled programs in a folder; one that cannot be used costs time only."""
    if cache is None:
        return
    cache = os.path.expanduser(cache)
    try:
        os.makedirs(cache, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            jax.config.update("jax_compilation_cache_dir", cache)
            # All of them: a run has many that compile quickly.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    except OSError as error:
        log.warning(
            f"compilation_cache = {cache!r}: cannot be used: {error.strerror}. Programs "
            "are compiled anew in every run",
        )
