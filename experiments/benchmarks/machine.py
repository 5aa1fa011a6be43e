"""What a benchmark says about the machine that it ran on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax

from skippipe_jax.profiling import devices as device_figures


def describe() -> dict[str, Any]:
    """The machine, the software, and how busy the machine is: a number means little without."""
    device = jax.devices()[0]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """The name of the processor, as well as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def peak_memory_bytes(device: jax.Device) -> int:
    """The most that was in use so far: on the device, or in this process where devices are CPUs."""
    if device.platform == "cpu":
        return device_figures.peak_process_bytes()
    return device.memory_stats()["peak_bytes_in_use"]
