"""The versions of the package and of JAX, and the devices that JAX finds."""

from __future__ import annotations

import os
from collections import Counter
from importlib import metadata

from skippipe_sched.errors import loading


def version_text() -> str:
    """Return three lines; a TPU that another process uses is reported as such, not waited for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # Or a GPU's memory is taken.
    with loading():
        import jax

    try:
        own = metadata.version("skippipe-jax")
    except metadata.PackageNotFoundError:
        own = "(not installed)"
    try:
        kinds = Counter(device.device_kind for device in jax.devices())
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    except RuntimeError as error:  # Only one process can use a TPU.
        devices = f"not available: {str(error).splitlines()[0]}"
    return f"skippipe {own}\njax {jax.__version__}\ndevices: {devices}"
