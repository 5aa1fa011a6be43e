"""Starts a process of a run that `churn` strikes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# With the threads of one core, hosts do not stand in each other's way more than they must.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1",
}


def started(
    words: Sequence[str], output: Path, namespace: str | None = None, lower: int = 0
) -> subprocess.Popen[bytes]:
    """Start Python with these words, in a network namespace where one is named.

    What it prints goes to `output`, a new file. Its priority is lower than that of this process by
    as many steps of `nice`.
    """
    before = ["nice", "-n", str(lower)] if lower else []
    if namespace is not None:
        before += ["ip", "netns", "exec", namespace]
    with output.open("wb") as file:
        return subprocess.Popen(
            [*before, sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
        )
