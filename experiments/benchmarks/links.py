"""How much of a shaped link transfers between hosts use, and the ring that averages gradients.

    python -m experiments.benchmarks.links --json links.json       (needs root and iproute2)

Hosts are network namespaces of this machine, joined by links that `tc` shapes. First they pass
arrays over `skippipe_jax.runtime.transport`: one at a time, and several at once. An array is
offered before it is asked for, and its seconds are those from asking for it until it is there. Then
they train a model of one stage, of which every host has a replica, and its averaging is taken from
recorded iterations: from when the last host begins until the last host has the sums.

A share is that of the rate that `tc` was told, which is of Ethernet packets: 95.6% of it is all
that TCP can carry. The rate of a ring is that of its slowest link, and the share that of the bound
`2(n-1)/n * bytes / rate`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jaxtyping import Float
from skippipe_sched.errors import run_command
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.timing.averaging import averaging_s, best_ring

from experiments.benchmarks import machine
from experiments.benchmarks.shaped_network import ShapedNetwork
from experiments.benchmarks.wan import ENVIRONMENT, Hosts
from skippipe_jax.config import ModelConfig
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.transport import Transfers
from skippipe_jax.storage.recording import measured_timeline
from skippipe_jax.storage.run_dir import RunDir

MB = 1e6
# A transfer is repeated while all of its kind take no longer than this.
REPEAT_S = 3.0
ITERATIONS = 4


@dataclass(frozen=True)
class Transfer:
    """So many bytes from one host to another, over a link of so many bytes per second."""

    source: int
    target: int
    bytes: int
    rate: float


@dataclass(frozen=True)
class RingWorkload:
    """A stage whose replicas average, on links of `rates[source][target]` in bytes per second."""

    name: str
    rates: Float[np.ndarray, "hosts hosts"]
    averaging_dtype: str | None = None
    width: int = 256


def main() -> int:
    """Parse the command line, measure, and print two tables."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="a short check of a few seconds")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to this file")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        host, hosts, address = arguments.serve
        return serve(int(host), int(hosts), address)
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    transfers = [
        row
        for rates, sets in (small_transfers() if arguments.small else full_transfers())
        for row in measured_transfers(rates, sets)
    ]
    rings = [
        measured_ring(workload) for workload in (small_rings() if arguments.small else full_rings())
    ]
    if arguments.json is not None:
        result = {"machine": machine.describe(), "transfers": transfers, "rings": rings}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


# What is measured.


def full_transfers() -> Iterator[tuple[Float[np.ndarray, "hosts hosts"], list[list[Transfer]]]]:
    """Networks, and for each the sets of transfers that go at once in it."""
    for rate, sizes in ((0.25, (1, 4)), (1, (1, 4, 16)), (5, (1, 4, 16)), (20, (1, 4, 16))):
        rates = MB * np.full((2, 2), rate)
        alone = [transfers(rates, (0, 1), bytes=int(size * MB)) for size in sizes]
        yield rates, [*alone, transfers(rates, (0, 1), (1, 0), bytes=int(4 * MB))]
    rates = MB * np.array([[0, 1, 2, 5], [4, 0, 1, 1], [1, 1, 0, 1], [2, 1, 1, 0]])
    from_0, to_0 = [(0, 1), (0, 2), (0, 3)], [(1, 0), (2, 0), (3, 0)]
    for_5_s = [
        replace(transfer, bytes=int(5 * transfer.rate))
        for transfer in transfers(rates, *from_0, *to_0, bytes=0)
    ]
    yield rates, [for_5_s[:3], for_5_s[3:], for_5_s]


def small_transfers() -> Iterator[tuple[Float[np.ndarray, "hosts hosts"], list[list[Transfer]]]]:
    """One transfer, and both directions at once."""
    rates = MB * np.array([[0, 4], [2, 0]])
    yield (
        rates,
        [
            transfers(rates, (0, 1), bytes=int(4 * MB)),
            transfers(rates, (0, 1), (1, 0), bytes=int(2 * MB)),
        ],
    )


def transfers(
    rates: Float[np.ndarray, "hosts hosts"], *pairs: tuple[int, int], bytes: int
) -> list[Transfer]:
    return [Transfer(*pair, bytes=bytes, rate=float(rates[pair])) for pair in pairs]


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


# Transfers.


def measured_transfers(
    rates: Float[np.ndarray, "hosts hosts"], sets: Sequence[Sequence[Transfer]]
) -> list[dict[str, Any]]:
    """Measure and print each set of transfers: median seconds and share of the rate of each."""
    rows = []
    with ShapedNetwork(rates) as network, _serving(network, len(rates)) as servers:
        # Whoever gives something to someone for the first time connects with him.
        first = [replace(transfer, bytes=1) for at_once in sets for transfer in at_once]
        _pass(servers, list(dict.fromkeys(first)))
        for at_once in sets:
            longest_s = max(transfer.bytes / transfer.rate for transfer in at_once)
            repetitions = max(1, int(REPEAT_S / longest_s))
            seconds = [_pass(servers, at_once) for _ in range(repetitions)]
            for transfer, each_s in zip(at_once, zip(*seconds, strict=True), strict=True):
                rows.append(
                    {
                        **asdict(transfer),
                        "at_once": len(at_once),
                        "seconds": statistics.median(each_s),
                        "each_s": each_s,
                        "share": transfer.bytes / transfer.rate / statistics.median(each_s),
                    }
                )
                print(_transfer_line(rows[-1]), flush=True)
    return rows


def _transfer_line(row: dict[str, Any]) -> str:
    return (
        f"{row['source']} to {row['target']}, {row['at_once']} at once  "
        f"{row['bytes'] / MB:5.2f} MB  {row['rate'] / MB:5.2f} MB/s  "
        f"{row['seconds']:7.3f} s  share {row['share']:.3f}"
    )


@contextmanager
def _serving(network: ShapedNetwork, hosts: int) -> Iterator[list[subprocess.Popen[str]]]:
    """A process on each host that does what it is told (see `serve`), connected to the others."""
    with ExitStack() as stack:
        servers = []
        for host in range(hosts):
            module = [sys.executable, "-m", "experiments.benchmarks.links"]
            place = ["--serve", str(host), str(hosts), network.address(host)]
            server = subprocess.Popen(
                [*network.command(host), *module, *place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
            stack.enter_context(server)
            stack.callback(server.kill)
            servers.append(server)
        addresses = [_hear(server) for server in servers]
        for server in servers:
            _tell(server, addresses)
        yield servers


def _pass(servers: Sequence[subprocess.Popen[str]], at_once: Sequence[Transfer]) -> list[float]:
    """Let transfers happen at the same time; the seconds of each."""
    for server in servers:
        _tell(server, [asdict(transfer) for transfer in at_once])
    for server in servers:
        _hear(server)
    for server in servers:
        _tell(server, "begin")
    seconds = dict(entry for server in servers for entry in _hear(server))
    return [seconds[number] for number in range(len(at_once))]


def _tell(server: subprocess.Popen[str], value: Any) -> None:
    assert server.stdin is not None
    print(json.dumps(value), file=server.stdin, flush=True)


def _hear(server: subprocess.Popen[str]) -> Any:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"a host exited with code {server.wait()}; see its output above")
    return json.loads(line)


def serve(host: int, hosts: int, address: str) -> int:
    """Pass arrays to and from other hosts as stdin says, until it ends; one JSON value a line.

    First this host tells where it is reached, and hears where all are. Then, again and again, it
    hears of transfers, tells that what it sends is offered, hears that all begin, and tells the
    number and the seconds of each transfer to itself.
    """

    device = jax.local_devices()[0]
    requests = {other: f"{address}:0" for other in range(hosts) if other != host}
    transfers = Transfers(host, device.client, requests, address)
    _say(transfers.endpoint)
    transfers.connect(json.loads(sys.stdin.readline()))
    links = transfers.links()

    def receive(hop: Hop, iteration: int, size: int) -> tuple[int, float]:
        like = jax.ShapeDtypeStruct((size,), jnp.uint8)
        start = time.perf_counter()
        links[hop.source].receive(hop, iteration, like).block_until_ready()
        return hop.number, time.perf_counter() - start

    for iteration, line in enumerate(iter(sys.stdin.readline, "")):
        at_once = [Transfer(**transfer) for transfer in json.loads(line)]
        hops = [(Hop(i, t.source, t.target), iteration, t.bytes) for i, t in enumerate(at_once)]
        for hop, _, size in hops:
            if hop.source == host:
                array = jax.device_put(np.zeros(size, np.uint8), device).block_until_ready()
                links[hop.target].send(hop, iteration, array)
        _say("offered")
        sys.stdin.readline()
        arriving = [entry for entry in hops if entry[0].target == host]
        with ThreadPoolExecutor(len(hops)) as threads:
            _say(list(threads.map(lambda entry: receive(*entry), arriving)))
    return 0


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


# Rings.


def measured_ring(workload: RingWorkload) -> dict[str, Any]:
    """Train as many replicas as there are hosts; print the median seconds of averaging them."""
    hosts = len(workload.rates)
    with (
        tempfile.TemporaryDirectory(prefix="links-") as name,
        ShapedNetwork(workload.rates) as network,
    ):
        folder = Path(name)
        config = write_config(folder, workload)
        Hosts(network, folder, hosts).run("train", "skippipe_jax.train", "--config", config)
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


def write_config(folder: Path, workload: RingWorkload) -> Path:
    """A model of one stage; every node is a data node that runs one microbatch alone."""
    hosts, dtype = len(workload.rates), workload.averaging_dtype
    model: dict[str, Any] = {
        "width": workload.width,
        "layers": 1,
        "ffn_width": 3 * workload.width,
        "context": 32,
    }
    [stage] = stage_shapes(ModelConfig(**model), 1)
    (folder / "text").write_text("skipping pipeline stages\n" * 2000)
    config = {
        "run_dir": str(folder / "run"),
        "compilation_cache": str(folder / "compiled"),
        "trace": "every 1",
        "model": model,
        "plan": {
            "method": "balanced",
            "case": {
                "nodes": hosts,
                "locations": [str(host) for host in range(hosts)],
                "links": [
                    [
                        str(source),
                        str(target),
                        0.0,
                        float(workload.rates[source, target]) / GIBIBYTE,
                    ]
                    for source, target in itertools.permutations(range(hosts), 2)
                ],
                "stages": [hosts],
                "path_length": 1,
                "microbatches_per_data_node": 1,
                "memory": 1,
                "forward_s": 0.01,
                "activation_bytes": 0,
                "stage_bytes": parameter_count(stage) * jnp.dtype(dtype or jnp.float32).itemsize,
            },
        },
        "data": {
            "source": "text",
            "path": str(folder / "text"),
            "sequence_length": 32,
            "microbatch_size": 1,
        },
        "network": {"averaging": "ring", "averaging_dtype": dtype},
        "cluster": {"insecure": True},  # The hosts have the shaped network for themselves.
        "train": {"steps": 1 + ITERATIONS},
        "checkpoint": {"every": 1 + ITERATIONS},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
