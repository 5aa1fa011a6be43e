"""How much of a shaped link the ring that averages gradients uses.

    python -m experiments.benchmarks.network.rings --json rings.json       (needs root and iproute2)

Hosts are network namespaces of this machine, joined by links that `tc` shapes. They train a model
of one stage, of which every host has a replica, and its averaging is taken from recorded
iterations: from when the last host begins until the last host has the sums.

The rate of a ring is that of its slowest link, of Ethernet packets: 95.6% of it is all that TCP can
carry. A share is that of the bound `2(n-1)/n * bytes / rate`. How much of a link a single transfer
uses is measured by `skippipe measure`, which `network.wan` compares with the rates of `tc`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.timing.averaging import averaging_s, best_ring

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import (
    AllHosts,
    alike_nodes,
    small_run,
    write_config,
)
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from skippipe_jax.config import ModelConfig
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.storage.recording import measured_timeline
from skippipe_jax.storage.run_dir import RunDir

MB = 1e6
ITERATIONS = 4


@dataclass(frozen=True)
class RingWorkload:
    """A stage whose replicas average, on links of `rates[source][target]` in bytes per second."""

    name: str
    rates: Float[np.ndarray, "hosts hosts"]
    averaging_dtype: str | None = None
    width: int = 256


def full_rings() -> list[RingWorkload]:
    """Rings of 2, 3 and 4 hosts; one whose links differ, and one that rounds what it sends."""
    different = MB * np.array([[0, 5, 2, 3], [2, 0, 4, 5], [5, 2, 0, 3], [4, 3, 2.5, 0]])
    alike = [MB * np.full((hosts, hosts), 3.0) for hosts in (2, 3, 4)]
    return [
        *(RingWorkload(f"{len(rates)} hosts", rates) for rates in alike),
        RingWorkload("4 hosts, links differ", different),
        RingWorkload("4 hosts, bfloat16", alike[-1], averaging_dtype="bfloat16"),
    ]


def small_rings() -> list[RingWorkload]:
    """One ring of two hosts, with a slow way and a quick one."""
    return [RingWorkload("2 hosts", MB * np.array([[0, 4], [2, 0]]), width=128)]


def measured_ring(workload: RingWorkload) -> dict[str, Any]:
    """Train as many replicas as there are hosts; print the median seconds of averaging them."""
    hosts = len(workload.rates)
    with (
        tempfile.TemporaryDirectory(prefix="rings-") as name,
        ShapedNetwork(workload.rates) as network,
    ):
        folder = Path(name)
        config = config_of(folder, workload)
        AllHosts(network, folder, hosts).run("train", "skippipe_jax.train", "--config", config)
        plan = RunDir(folder / "run").plan()
        # The first iteration connects the hosts.
        timelines = [
            measured_timeline(folder / "run", plan, step) for step in range(2, ITERATIONS + 2)
        ]
    each_s = [
        averaging.end_s - averaging.start_s
        for timeline in timelines
        for averaging in timeline.averagings
    ]
    ring = best_ring(plan.case, 0, plan.stages[0])
    row = {
        "name": workload.name,
        "hosts": hosts,
        "bytes": plan.case.stage_bytes[0],
        "slowest_rate": min(workload.rates[a, b] for a, b in pairwise((*ring, ring[0]))),
        "bound_s": averaging_s(plan.case, 0, ring),
        "seconds": statistics.median(each_s),
        "each_s": each_s,
    }
    row["share"] = row["bound_s"] / row["seconds"]
    print(
        f"ring of {workload.name:22}  {row['bytes'] / MB:5.2f} MB  slowest link "
        f"{row['slowest_rate'] / MB:5.2f} MB/s  {row['seconds']:7.3f} s  share {row['share']:.3f}",
        flush=True,
    )
    return row


def config_of(folder: Path, workload: RingWorkload) -> Path:
    """Write a model of one stage; every node is a data node that runs one microbatch alone."""
    hosts, dtype = len(workload.rates), workload.averaging_dtype
    shape = workload.width, 1, 1, 32
    config = small_run(
        folder,
        shape,
        {"method": "balanced"},
        1 + ITERATIONS,
        trace="every 1",
        data={"source": "text", "path": str(folder / "text")},
        network={"averaging": "ring", "averaging_dtype": dtype},
        cluster={"insecure": True},  # The hosts have the shaped network for themselves.
    )
    [stage] = stage_shapes(ModelConfig(**config["model"]), 1)
    (folder / "text").write_text("skipping pipeline stages\n" * 2000)
    links = [
        [str(source), str(target), 0.0, float(workload.rates[source, target]) / GIBIBYTE]
        for source, target in itertools.permutations(range(hosts), 2)
    ]
    config["plan"]["case"] = alike_nodes(
        [hosts],
        locations=[str(host) for host in range(hosts)],
        links=links,
        microbatches_per_data_node=1,
        memory=1,
        activation_bytes=0,
        stage_bytes=parameter_count(stage) * jnp.dtype(dtype or jnp.float32).itemsize,
    )
    return write_config(folder / "config.yaml", config)


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Measure the rings."""
    rings = small_rings() if arguments.small else full_rings()
    report["rings"] = [measured_ring(workload) for workload in rings]


def main() -> int:
    """Parse the command line, measure, and print a line for each ring; returns the exit code."""
    small = {"action": "store_true", "help": "a short check of a few seconds"}
    return reporting.run("network.rings", __doc__, measure, options={"--small": small})


if __name__ == "__main__":
    sys.exit(main())
