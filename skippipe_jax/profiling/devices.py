"""Peak floating-point rates of devices, and their free and used memory."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import jax

MEMORY_OF_MACHINE = Path("/proc/meminfo")

# Floating-point operations per second of dense matrix products in bfloat16, by the name that JAX
# gives to a device, from the vendors' data sheets. TPU v2 and v3 have two devices per chip.
PEAK_FLOPS_PER_SECOND = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    # No bfloat16 in hardware: these are the rates of float16.
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
}


def peak_flops_per_second(device_kinds: Iterable[str]) -> float | None:
    """Return the sum of the peaks of devices of these kinds; None if a kind is unknown."""
    peaks = [PEAK_FLOPS_PER_SECOND.get(kind) for kind in device_kinds]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def available_bytes(device: jax.Device, nodes_on_device: int, nodes_on_machine: int) -> float:
    """Return the bytes that a node may use: its share of free memory of its device or machine."""
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return (stats["bytes_limit"] - stats["bytes_in_use"]) / nodes_on_device
    if MEMORY_OF_MACHINE.exists():
        lines = dict(line.split(":") for line in MEMORY_OF_MACHINE.read_text().splitlines())
        available = 1024.0 * int(lines["MemAvailable"].removesuffix("kB"))
    else:
        available = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return available / nodes_on_machine


def peak_memory_bytes(device: jax.Device) -> int | None:
    """Return the peak bytes used on a device so far; None if the device does not report them."""
    stats = device.memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def peak_process_bytes() -> int:
    """Return the peak resident bytes of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
