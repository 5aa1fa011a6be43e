"""Cache of compiled XLA programs that runs share."""

from __future__ import annotations

import os
import tempfile

import jax

from skippipe_jax import log


def enable_compilation_cache(cache: str | None) -> None:
    """Make JAX cache compiled programs in a folder; warn if the folder cannot be used."""
    if cache is None:
        return
    cache = os.path.expanduser(cache)
    try:
        os.makedirs(cache, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            jax.config.update("jax_compilation_cache_dir", cache)
            # No minimum time, as a run has many programs that compile fast.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    except OSError as error:
        log.warning(
            f"compilation_cache = {cache!r}: cannot be used: {error.strerror}. Programs "
            "are compiled again in every run",
        )
