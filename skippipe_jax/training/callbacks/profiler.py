"""Traces of iterations by JAX's profiler, for TensorBoard's profile page, XProf or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from skippipe_jax.runtime.runtime import Runtime

PROFILE = "profile"


@contextmanager
def profile_step(runtime: Runtime, run_dir: Path, step: int, host: int) -> Iterator[None]:
    """Trace the iteration that runs in the block into RUN/profile/STEP/host_H.

    The trace covers all device activity from the end of the previous iteration to the end of this
    one. Every dispatch is named after its operation, stage, node and microbatch; its kernels on the
    device have the name of the jitted function, which stages share.
    """
    options = jax.profiler.ProfileOptions()
    # Python calls would dominate the trace and slow down the iteration.
    options.python_tracer_level = 0
    folder = run_dir / PROFILE / f"{step:08d}" / f"host_{host}"
    _wait(runtime)
    runtime.operations.names_dispatches = True
    try:
        with (
            jax.profiler.trace(folder, profiler_options=options),
            jax.profiler.StepTraceAnnotation("iteration", step_num=step),
        ):
            yield
            _wait(runtime)
    finally:
        runtime.operations.names_dispatches = False


def _wait(runtime: Runtime) -> None:
    jax.block_until_ready([state.parameters for state in runtime.states.values()])
