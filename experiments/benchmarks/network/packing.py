"""What it costs to pack hops in fewer bytes, and how many bytes then go through the sockets.

    python -m experiments.benchmarks.network.packing --json FILE

kernels  processor time of packing and unpacking all that the quickstart sends from node to node in
         an iteration, as a share of the processor time of that iteration, by format
sockets  two hosts on 127.0.0.1 train a model in two stages, of one node each, so that nothing is
         averaged; what they have sent by `bytes_acked` of TCP_INFO (Linux), over what hops have by
         formula: the rest are headers, and what hosts tell each other besides
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from skippipe_sched.errors import run_command

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import (
    QUICKSTART,
    AllHosts,
    Loopback,
    alike_nodes,
    small_run,
    write_config,
)
from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    connect_from_args,
)
from skippipe_jax.config import Config, NetworkConfig, load_config
from skippipe_jax.models.footprint import hop_bytes
from skippipe_jax.runtime.stage_functions import wire_of_run
from skippipe_jax.runtime.wire_format import WireFormat
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.planning import plan_of
from skippipe_jax.training.trainer import Trainer

FORMATS = {
    "bfloat16": NetworkConfig(activation_dtype="bfloat16"),
    "int8": NetworkConfig(activation_dtype="int8"),
    "int8, gradients by chance": NetworkConfig(
        activation_dtype="int8", gradient_rounding="stochastic"
    ),
}
# The first iterations compile.
WARMUP_ITERATIONS = 2
CALLS, TURNS = 20, 5
HOSTS, MICROBATCHES = 2, 8
# The first argument of a process that is one of the hosts.
HOST = "host"
# Where `bytes_acked` is in Linux's struct tcp_info: behind 8 bytes, 24 numbers of 4, and 2 of 8.
BYTES_ACKED, TCP_INFO_BYTES = 8 + 24 * 4 + 2 * 8, 256


class ProcessorTime(Callback):
    """Processor time of this process by the end of each step [s]."""

    def __init__(self):
        """Nothing yet."""
        self.seconds: list[float] = []

    def on_step_end(self, run: RunView, metrics: Any) -> None:
        """Note it."""
        self.seconds.append(time.process_time())


def kernels(overrides: Sequence[str], iterations: int) -> dict[str, Any]:
    """Processor time of each format's kernels, and of the quickstart's iteration without any."""
    config = load_config(QUICKSTART, overrides)
    plan = plan_of(config, QUICKSTART.parent)
    each_way = sum(len(path) for path in plan.microbatches if len(path) > 1)
    iteration_s = iteration_processor_s(overrides, iterations)
    rows = []
    for name, network in FORMATS.items():
        wire = wire_of_run(dataclasses.replace(config, network=network))
        # Both are unpacked alike.
        (pack_s, unpack_s), (pack_gradient_s, _) = map(kernel_s, (wire.activations, wire.gradients))
        seconds = each_way * (pack_s + pack_gradient_s + 2 * unpack_s)
        rows.append(
            {
                "format": name,
                "pack_ms": round(1e3 * pack_s, 4),
                "pack_gradient_ms": round(1e3 * pack_gradient_s, 4),
                "unpack_ms": round(1e3 * unpack_s, 4),
                "share": round(seconds / iteration_s, 5),
            }
        )
    return {"hops_each_way": each_way, "iteration_processor_s": iteration_s, "formats": rows}


def iteration_processor_s(overrides: Sequence[str], iterations: int) -> float:
    """The median over iterations of the quickstart, all nodes on one device."""
    with tempfile.TemporaryDirectory() as folder:
        steps = WARMUP_ITERATIONS + iterations
        own = [f"run_dir={folder}/run", f"train.steps={steps}", f"checkpoint.every={steps}"]
        config = load_config(QUICKSTART, [*overrides, *own])
        noted = ProcessorTime()
        Trainer(config, [noted], config_folder=QUICKSTART.parent).run()
    spent = np.diff(noted.seconds)[WARMUP_ITERATIONS - 1 :]
    return statistics.median(spent.tolist())


def kernel_s(how: WireFormat) -> tuple[float, float]:
    """Processor seconds of packing one array and of unpacking it: the least of several turns."""
    array = jax.random.normal(jax.random.key(0), how.computed.shape, how.computed.dtype)
    draw = jax.numpy.arange(4, dtype="uint32")
    pack, unpack = jax.jit(how.pack), jax.jit(how.unpack)
    packed = pack(array, draw)
    return least_s(lambda: pack(array, draw)), least_s(lambda: unpack(packed))


def least_s(call: Callable[[], jax.Array]) -> float:
    """Processor seconds of one call."""
    jax.block_until_ready(call())
    turns = []
    for _ in range(TURNS):
        start_s = time.process_time()
        for _ in range(CALLS):
            jax.block_until_ready(call())
        turns.append((time.process_time() - start_s) / CALLS)
    return min(turns)


def sockets(dtype: str, width: int, iterations: int) -> dict[str, Any]:
    """What two hosts send in training with hops in a dtype, and what hops have by formula."""
    with tempfile.TemporaryDirectory(prefix="packing-") as folder:
        path = config_of(Path(folder), dtype, width, iterations)
        hosts = AllHosts(Loopback(), Path(folder), HOSTS)
        module = "experiments.benchmarks.network.packing"
        hosts.run("train", module, HOST, folder, "--config", path)
        sent = sum(int(_count_of(Path(folder), host).read_text()) for host in range(HOSTS))
        formula = iterations * bytes_per_iteration(load_config(path))
    return {
        "dtype": dtype,
        "bytes_acked": sent,
        "by_formula": formula,
        "ratio": round(sent / formula, 5),
    }


class Sent(Callback):
    """Writes how many bytes this host has sent, from the first step to the end of the last."""

    def __init__(self, folder: Path):
        """Into a file of `folder`, named after the host."""
        self.folder = folder
        self.before = 0

    def on_train_begin(self, run: RunView) -> None:
        """Leave out what was sent until now."""
        self.before = bytes_acked()

    def on_train_end(self, run: RunView) -> None:
        """Count while connections are still open."""
        count = bytes_acked() - self.before
        _count_of(self.folder, run.group.index).write_text(f"{count}\n")


def bytes_acked() -> int:
    """What the other ends of all TCP connections of this process have confirmed."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # Most are no sockets, and some are closed by now.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                [acked] = struct.unpack_from("=Q", info, BYTES_ACKED)
                total += acked
    return total


def host_main(words: Sequence[str]) -> int:
    """Train as `skippipe_jax.train` does, on one of the hosts; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    arguments = parser.parse_args(words)

    def train() -> int:
        config, folder = load_config(arguments.config, arguments.set), arguments.config.parent
        with connect_from_args(arguments, config) as host:
            Trainer(config, [Sent(arguments.folder)], host=host, config_folder=folder).run()
        return 0

    return run_command(train)


def _count_of(folder: Path, host: int) -> Path:
    return folder / f"sent{host}.txt"


def bytes_per_iteration(config: Config) -> int:
    """Of hops: an activation to the other stage and one back, and two gradients."""
    hop = hop_bytes(config)
    return MICROBATCHES * 2 * (hop.activation + hop.gradient)


def config_of(folder: Path, dtype: str, width: int, iterations: int) -> Path:
    """Write the configuration of a run of two stages of a node each, along full paths."""
    case = alike_nodes([1, 1], microbatches_per_data_node=MICROBATCHES, memory=4)
    config = small_run(
        folder,
        (width, 2, 4, 256),
        {"method": "full", "case": case},
        iterations,
        model={"heads": 2, "kv_heads": 1, "ffn_width": width},
        network={"activation_dtype": dtype},
    )
    return write_config(folder / "config.yaml", config)


def table(report: dict[str, Any]) -> str:
    """A line for each format, and one for what went through the sockets in each."""
    kernel = report["kernels"]
    return "\n".join(
        [
            f"an iteration takes {kernel['iteration_processor_s']:.3f} s of a processor, and has "
            f"{kernel['hops_each_way']} hops each way",
            *(
                f"{own['format']:<26} pack {own['pack_ms']:.3f} ms, a gradient "
                f"{own['pack_gradient_ms']:.3f} ms, unpack {own['unpack_ms']:.3f} ms: "
                f"{own['share']:.2%}"
                for own in kernel["formats"]
            ),
            *(
                f"{own['dtype']:<10} {own['bytes_acked'] / 1e6:.3f} MB through sockets, "
                f"{own['by_formula'] / 1e6:.3f} MB by formula: {own['ratio']:.4f} times"
                for own in report["sockets"]
            ),
        ]
    )


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Measure kernels and sockets."""
    given = arguments.width, arguments.iterations
    report["kernels"] = kernels(arguments.set, arguments.iterations)
    report["sockets"] = [sockets(dtype, *given) for dtype in arguments.dtypes]
    return table(report)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    if sys.argv[1:2] == [HOST]:
        return host_main(sys.argv[2:])
    numbers = {
        "iterations": (10, 1, "iterations of each run"),
        "width": (512, 1, "width of the model of the two hosts"),
    }
    dtypes = {"nargs": "*", "default": ["float32", "bfloat16", "int8"]}
    options = {"--dtypes": dtypes | {"help": "dtypes of the hops between the hosts (all)"}}
    overrides = "override one key of the quickstart; may be given often"
    return reporting.run(
        "network.packing", __doc__, measure, numbers=numbers, options=options, overrides=overrides
    )


if __name__ == "__main__":
    sys.exit(main())
