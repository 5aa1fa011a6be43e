"""Count of the programs that XLA compiles in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.monitoring

from skippipe_jax import log

# Seconds between progress lines during compilation.
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Compilations:
    """Number of programs that XLA compiled or loaded from its cache, and the seconds it took."""

    count: int = 0
    seconds: float = 0.0


class CompilationCounter:
    """Counter of the programs that XLA compiles, or loads from its cache, in this process.

    During long compilations it reports progress with `log_line`.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, log_line: Callable[[str], None] = log.info):
        """Start at zero; counting begins on entering the context."""
        self.compilations = Compilations()
        self.log_line = log_line
        self.logged_s = time.perf_counter()

    def take(self) -> Compilations:
        """Return the compilations since the last call."""
        taken, self.compilations = self.compilations, Compilations()
        return taken

    def __enter__(self) -> CompilationCounter:
        """Start counting."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == self.EVENT:
            before = self.compilations
            now = Compilations(before.count + 1, before.seconds + duration_secs)
            self.compilations = now
            if time.perf_counter() - self.logged_s > SECONDS_BETWEEN_LINES:
                self.logged_s = time.perf_counter()
                programs = f"{now.count} program{'s' * (now.count > 1)}"
                self.log_line(f"compiling: {programs} so far, {now.seconds:.0f} s")
