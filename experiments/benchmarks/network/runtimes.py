"""What it costs that each host has its own JAX: iterations and starts, beside one JAX for all.

    python -m experiments.benchmarks.network.runtimes --json FILE      (needs Linux and taskset)

Two hosts on 127.0.0.1, each with a core of its own, serve two stages of two replicas each, so that
activations, gradients and totals cross between them in every iteration. The same run is trained
with `cluster.runtime: independent`, where a step counts only once the leader has said so, and with
`distributed`, in turns, the order reversed from turn to turn; what is compared are the medians of
each pair's iterations. Then so many hosts are started with either, in turns as well, on all cores:
the time until the first step has been reported. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import (
    AllHosts,
    Loopback,
    Network,
    OwnCores,
    alike_nodes,
    small_run,
    write_config,
)
from skippipe_jax import Run
from skippipe_jax.config.cluster import DISTRIBUTED, INDEPENDENT
from skippipe_jax.storage.run_dir import METRICS

# The first iteration compiles, and the second may still load what others compiled.
WARMUP_ITERATIONS = 2
# By size: width, blocks of a stage, microbatch size, sequence length.
SIZES = {"full": (256, 2, 4, 256), "small": (64, 1, 2, 64)}
REPLICAS, STAGES = 2, 2
HOSTS_OF_NODES = [0, 1, 1, 0]
START_STAGES = 5
POLL_S = 0.02
SHOWN_START_S = 600.0


def config_of(folder: Path, runtime: str, iterations: int, size: str = "full") -> dict[str, Any]:
    """The run whose iterations are timed."""
    width, layers, microbatch_size, sequence_length = SIZES[size]
    case = alike_nodes([REPLICAS] * STAGES, microbatches=4 * REPLICAS)
    return small_run(
        folder,
        (width, STAGES * layers, microbatch_size, sequence_length),
        {"method": "full", "budget_s": 0.5, "case": case},
        WARMUP_ITERATIONS + iterations,
        compilation_cache=str(folder.parent / "compiled"),
        cluster={"runtime": runtime, "host_of_node": HOSTS_OF_NODES},
        network={"averaging": "ring"},
    )


def start_config_of(folder: Path, runtime: str, hosts: int) -> dict[str, Any]:
    """A run of two steps on so many hosts, a node each."""
    config = config_of(folder, runtime, 0, "small")
    stages = [
        hosts // START_STAGES + (stage < hosts % START_STAGES) for stage in range(START_STAGES)
    ]
    config["model"]["layers"] = START_STAGES
    config["plan"]["case"] = alike_nodes(stages, microbatches=hosts)
    del config["cluster"]["host_of_node"]
    return config


def trained(folder: Path, config: dict[str, Any], network: Network, hosts: int) -> float:
    """Train on so many hosts; seconds until the first step has been reported."""
    folder.mkdir()
    path = write_config(folder / "config.yaml", config)
    metrics = folder / "run" / METRICS
    began = time.monotonic()
    shown_s: list[float] = []

    def look() -> None:
        while time.monotonic() - began < SHOWN_START_S:
            if metrics.exists() and metrics.stat().st_size:
                shown_s.append(time.monotonic() - began)
                return
            time.sleep(POLL_S)

    looking = Thread(target=look, daemon=True)
    looking.start()
    AllHosts(network, folder, hosts).run("train", "skippipe_jax.train", "--config", path)
    looking.join()
    return shown_s[0]


def iteration_s(folder: Path) -> float:
    """The median of the iterations that count."""
    lines = Run(folder / "run").metrics[WARMUP_ITERATIONS:]
    return statistics.median(line["seconds_per_iteration"] for line in lines)


def compare(folder: Path, turns: int, iterations: int) -> dict[str, Any]:
    """Medians of both runtimes, turn by turn, and their ratios."""
    network = OwnCores()

    def median_s(own: Path, runtime: str) -> float:
        trained(own, config_of(own, runtime, iterations), network, 2)
        return iteration_s(own)

    return compared([pair(folder, "turn", turn, turns, median_s) for turn in range(1, turns + 1)])


def compare_starts(folder: Path, starts: int, hosts: int) -> dict[str, Any]:
    """Seconds until the first step of both runtimes, turn by turn, and their ratios."""

    def start_s(own: Path, runtime: str) -> float:
        return trained(own, start_config_of(own, runtime, hosts), Loopback(), hosts)

    # The first pair compiles.
    _, *pairs = (pair(folder, "start", turn, starts, start_s) for turn in range(starts + 1))
    return {"hosts": hosts} | compared(pairs)


def pair(
    folder: Path, kind: str, turn: int, turns: int, measured_s: Callable[[Path, str], float]
) -> dict[str, float]:
    """Measure both runtimes in new folders, the one first that was second in the turn before."""
    order = (INDEPENDENT, DISTRIBUTED)[:: 1 if turn % 2 else -1]
    found = {runtime: measured_s(folder / f"{kind}_{runtime}_{turn}", runtime) for runtime in order}
    print(f"{kind} {turn} of {turns}: {shown(found)}", file=sys.stderr, flush=True)
    return found


def compared(pairs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The figures of pairs, and the median of their ratios."""
    ratios = [pair[INDEPENDENT] / pair[DISTRIBUTED] for pair in pairs]
    return {
        "pairs_s": pairs,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 4),
    }


def shown(found: dict[str, float]) -> str:
    """Seconds of both, and how many times as long the first one takes."""
    ratio = found[INDEPENDENT] / found[DISTRIBUTED]
    parts = [f"{name} {seconds:.3f} s" for name, seconds in sorted(found.items())]
    return f"{', '.join(parts)}: {ratio:.3f}"


def table(report: dict[str, Any]) -> str:
    """A line for iterations, and one for starts."""
    lines = []
    for name, figures in (("an iteration", report["iterations"]), ("a start", report["starts"])):
        if figures is not None:
            ratios = figures["ratios"]
            lines.append(
                f"{name} with {INDEPENDENT} hosts takes {figures['ratio']:.3f} times as long as "
                f"with {DISTRIBUTED} ({min(ratios):.3f} to {max(ratios):.3f} over "
                f"{len(ratios)} turns)"
            )
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Compare iterations, and starts."""
    starts, hosts = arguments.starts, arguments.hosts
    with tempfile.TemporaryDirectory(prefix="runtimes-") as name:
        report["iterations"] = compare(Path(name), arguments.turns, arguments.iterations)
        report["starts"] = compare_starts(Path(name), starts, hosts) if starts else None
    return table(report)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {
        "turns": (6, 1, "pairs of runs"),
        "iterations": (20, 1, "counted iterations of a run"),
        "starts": (3, 0, "pairs of starts"),
        "hosts": (20, START_STAGES, "hosts to start"),
    }
    return reporting.run("network.runtimes", __doc__, measure, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
