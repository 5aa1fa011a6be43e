"""Does an iteration take as long as its plan says, on links like those of the internet?

    python -m experiments.benchmarks.network.wan --json wan.json      (needs root and iproute2)

Hosts are network namespaces of this machine, one JAX process in each, joined by links that `tc`
shapes to a table of bandwidths between cloud regions, scaled so that a hop takes 0.1 to 2 seconds.
`skippipe measure` measures these links and the stages of a small LLaMA; every method plans for
the case that it wrote; the model is trained along each plan, averaging included; and the seconds of
its iterations are held against the prediction. All of that is done for each
format in which activations and their gradients travel, as `--arms` names it beside methods, and for
averaging that nobody waits for: its iterations are timed over one cycle, after another. With
`--slower-links 4` hops take so many times as long, so that they dominate an iteration. With
`--shared-connections 3` the links of a host share its connection, as at home, which `skippipe
measure` has to find.

The full pipeline is placed as the reference places it: its genetic search scores one activation
inside a stage, not the bytes that averaging moves. Links are cut to that range of hops: the one
published for NL and London is a thousand times slower than its neighbours, and hosts of one region
are quicker linked than two cores can serve twenty processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from skippipe_sched import fields
from skippipe_sched.methods import dtfm, make_plan
from skippipe_sched.problem import links
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.open_case import load_cases
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import AllHosts, set_words, write_config
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from experiments.paper import drawing
from experiments.paper.drawing import BLUE, SKY
from skippipe_jax import Run
from skippipe_jax.storage.recording import measured_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AS_COMPUTED = "float32"
HOPS = (AS_COMPUTED, "bfloat16", "int8")
EXACT, OUTER = "exact", "outer"
AVERAGING = {"mode": OUTER, "delay": 1, "dtype": "int8"}
MOST_FRAGMENTS = 4
METHODS = ("full", "dtfm-skip", "skippipe-no-tc2", "skippipe", "joint", "full-joint")
SEED = 0
FASTEST_HOP_S, SLOWEST_HOP_S = 0.1, 2.0
LINKS = "gcp12"
SAME_LOCATION = links.Link(1e-3, 2.0 * links.GIBIBYTE)
# What a packet's headers leave of a rate for what TCP carries.
PAYLOAD_SHARE = 0.956
# A link whose bandwidth is measured to be further from its rate is measured again, so often.
FAR_OFF, MOST_PROFILES = 0.15, 3


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained: a stage has `blocks` of a small LLaMA, and a path visits `path_length`."""

    stages: tuple[int, ...]
    path_length: int
    microbatches_per_data_node: int
    memory: int
    width: int = 64
    ffn_width: int = 128
    microbatch_size: int = 6
    sequence_length: int = 256
    blocks: int = 1

    @property
    def hosts(self) -> int:
        return sum(self.stages)

    @property
    def activation_bytes(self) -> int:
        return self.microbatch_size * self.sequence_length * self.width * 4


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things that are compared: a method, how replicas average, and how hops travel."""

    method: str
    averaging: str = EXACT
    hops: str = AS_COMPUTED


# As the command line names them: joint, joint/outer or joint/outer/int8.
ARMS = {
    "/".join(parts): Arm(*parts)
    for given in (1, 2, 3)
    for parts in itertools.product(*(METHODS, (EXACT, OUTER), HOPS)[:given])
}
HEADS = 4
WORKLOADS = {
    20: Workload((5, 3, 3, 3, 3, 3), path_length=3, microbatches_per_data_node=6, memory=3),
    4: Workload((2, 1, 1), path_length=2, microbatches_per_data_node=2, memory=2),
}


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Measure the network, plan for it by every method, and train along each plan."""
    workload = WORKLOADS[arguments.hosts]
    sequences = workload.microbatch_size * workload.sequence_length // arguments.sequence_length
    workload = dataclasses.replace(
        workload,
        blocks=arguments.blocks,
        sequence_length=arguments.sequence_length,
        microbatch_size=sequences,
    )
    arms = [ARMS[name] for name in arguments.arms]
    locations, rates = shaped_rates(workload)
    rates, connections = rates / arguments.slower_links, None
    if arguments.shared_connections is not None:
        factor = fields.number(
            arguments.shared_connections, "--shared-connections", 0.0, above=True
        )
        fastest = np.where(np.eye(len(rates), dtype=bool), 0.0, rates).max(axis=1)
        connections = np.stack([fastest, factor * fastest], axis=1)
    network = ShapedNetwork(rates, connections)
    rows, profiles = [], {}
    with reporting.folder_for(arguments.keep, "wan") as folder, network:
        for averaging, hops in dict.fromkeys((arm.averaging, arm.hops) for arm in arms):
            kind = hops if averaging == EXACT else f"{hops}-{averaging}"
            own = folder / kind
            own.mkdir(exist_ok=True)
            hosts = AllHosts(network, own, arguments.hosts)
            every = arguments.every if averaging == OUTER else None
            config = config_of(folder, workload, locations, hops, every)
            case, profiles[kind] = profiled(hosts, config, rates)
            profiles[kind]["contention"] = case.contention
            own_arms = [arm for arm in arms if (arm.averaging, arm.hops) == (averaging, hops)]
            if arguments.busy_stages:
                first = plan_by(own_arms[0].method, case, arguments.budget)
                case, profiles[kind]["busy"] = busy(first, hosts, config)
            for arm in own_arms:
                plan = plan_by(arm.method, case, arguments.budget)
                row = trained(plan, hosts, config, arguments.iterations)
                rows.append({"hops": hops, "averaging": averaging} | row)
                print(_line(rows[-1], rows), flush=True)
    report |= {
        "hosts": arguments.hosts,
        "workload": dataclasses.asdict(workload),
        "links": LINKS,
        "slower_links": arguments.slower_links,
        "shared_connections": arguments.shared_connections,
        "profiles": profiles,
        "methods": rows,
    }
    if arguments.figure is not None:
        title = f"{arguments.hosts} hosts, links shaped to {LINKS}"
        drawing.write_svg(picture(rows, title), arguments.figure)


def profiled(
    hosts: AllHosts, config: Path, rates: Float[np.ndarray, "hosts hosts"]
) -> tuple[Case, dict[str, Any]]:
    """The case that is measured, how long that took, and how far its bandwidths are from `tc`'s.

    A busy machine may hold up all transfers over a link: one that is far off is measured again.
    """
    output, tries = hosts.folder / "case.yaml", itertools.count(1)
    while True:
        start = time.monotonic()
        hosts.run("profile", "skippipe_jax", "measure", "--config", config, "-o", output)
        seconds = time.monotonic() - start
        [case] = load_cases(output)
        deviation, (source, target) = bandwidth_deviation(case, rates)
        print(
            f"profile: {seconds:.0f} s; largest deviation of a bandwidth from tc's rate: "
            f"{deviation:.1%}, from host {source} to host {target}",
            flush=True,
        )
        if deviation <= FAR_OFF or next(tries) == MOST_PROFILES:
            return case, {"seconds": seconds, "bandwidth_deviation": deviation}


def busy(plan: Plan, hosts: AllHosts, config: Path) -> tuple[Case, dict[str, float]]:
    """The case of a plan with the seconds that operations took, on average, as it was trained by.

    And how many times those of the profile they are, by kind of operation.
    """
    case, policy = plan.case, plan.case.averaging
    # An iteration in which nothing is compiled any more, and no fragment is sent or applied.
    steps = policy.every + policy.delay + 3 if policy.is_outer else 3
    run_dir = train(plan, hosts, config, "busy", steps)
    measured = measured_timeline(run_dir, plan, steps)
    predicted = simulate_plan(plan)

    def mean_s(timeline: Timeline, kind: str) -> float:
        own = (run for run in timeline.runs if run.operation.kind == kind)
        return statistics.mean(run.end_s - run.start_s for run in own)

    times = {kind: mean_s(measured, kind) / mean_s(predicted, kind) for kind in "FBL"}
    told = ", ".join(f"{kind} {own:.2f}" for kind, own in times.items())
    print(f"slowdown of operations while all hosts train: {told}", flush=True)
    nodes = tuple(
        dataclasses.replace(node, forward_s=node.forward_s * times["F"]) for node in case.nodes
    )
    return (
        dataclasses.replace(
            case,
            nodes=nodes,
            backward_ratio=case.backward_ratio * times["B"] / times["F"],
            loss_ratio=case.loss_ratio * times["L"] / times["F"],
        ),
        times,
    )


def shaped_rates(
    workload: Workload,
    regions: Sequence[str] = (),
    hops_s: tuple[float, float] = (FASTEST_HOP_S, SLOWEST_HOP_S),
) -> tuple[list[str], Float[np.ndarray, "hosts hosts"]]:
    """Locations of the hosts, and bytes per second that `tc` is told between them.

    Hosts are dealt out to the `regions`, by default to all of the table; the quickest and the
    slowest hop take `hops_s`.
    """
    of_locations = links.table(LINKS, SAME_LOCATION)
    names = regions or list(dict.fromkeys(name for pair in of_locations.links for name in pair))
    locations = [names[host % len(names)] for host in range(workload.hosts)]
    _, bandwidth = of_locations.matrices(locations)
    # The slowest but one: NL and London's is a case of its own.
    fastest, slowest = (workload.activation_bytes / seconds for seconds in hops_s)
    scale = slowest / np.unique(bandwidth)[:2].max()
    payload = np.clip(bandwidth * scale, slowest, fastest)
    return locations, payload / PAYLOAD_SHARE


def config_of(
    folder: Path,
    workload: Workload,
    locations: Sequence[str],
    hops: str,
    every: int | None = None,
) -> Path:
    """Write the configuration of a kind; with `every`, replicas are averaged so rarely."""
    config = {
        "compilation_cache": str(folder / "compiled"),
        "model": {
            "width": workload.width,
            "layers": workload.blocks * len(workload.stages),
            "heads": HEADS,
            "kv_heads": HEADS,
            "ffn_width": workload.ffn_width,
            "context": workload.sequence_length,
        },
        "plan": {
            "case": {
                "locations": list(locations),
                "stages": list(workload.stages),
                "path_length": workload.path_length,
                "microbatches_per_data_node": workload.microbatches_per_data_node,
                "memory": workload.memory,
                "rules": {"max_swaps": 2, "max_swap_distance": 1, "max_jump": 4},
            }
        },
        "data": {
            "source": "python",
            "sequence_length": workload.sequence_length,
            "microbatch_size": workload.microbatch_size,
        },
        "network": {"averaging": "ring"},
        "cluster": {"insecure": True},  # The hosts have the shaped network for themselves.
    }
    if hops != AS_COMPUTED:
        config["network"]["activation_dtype"] = hops
    if every is not None:
        fragments = min(workload.blocks, MOST_FRAGMENTS)
        config["averaging"] = AVERAGING | {"every": every, "fragments": fragments}
    return write_config(folder / f"{hops}-{EXACT if every is None else OUTER}.yaml", config)


def bandwidth_deviation(
    case: Case, rates: Float[np.ndarray, "hosts hosts"]
) -> tuple[float, tuple[int, int]]:
    """Return the largest deviation of a bandwidth from the rate of its link, as a share.

    And from which host to which that is so.
    """
    _, bandwidth = case.link_matrices
    deviations = np.where(np.eye(len(rates), dtype=bool), 0.0, np.abs(bandwidth / rates - 1))
    source, target = np.unravel_index(np.argmax(deviations), deviations.shape)
    return float(deviations[source, target]), (int(source), int(target))


def plan_by(method: str, case: Case, budget_s: float) -> Plan:
    """The plan of a method within so many seconds; `full` on the reference's kind of placement."""
    placement = reference_placement(case, budget_s) if method == "full" else None
    return make_plan(case, method, Search(SEED, budget_s, placement))


def reference_placement(case: Case, budget_s: float) -> Placement:
    """DT-FM's search when averaging a stage counts as one activation, as the reference has it."""
    stage_bytes = (case.activation_bytes,) * len(case.stages)
    return dtfm.place(dataclasses.replace(case, stage_bytes=stage_bytes), Search(SEED, budget_s), 1)


def trained(plan: Plan, hosts: AllHosts, config: Path, iterations: int) -> dict[str, Any]:
    """Train along a plan on all hosts; what was predicted and measured."""
    before, policy = 1, plan.case.averaging
    if policy.is_outer:
        # Until all goes on as it does in any cycle, and each fragment has been applied once.
        before, iterations = policy.every + policy.delay + 1, policy.every
    run_dir = train(plan, hosts, config, plan.method, before + iterations)
    lines = Run(run_dir).metrics[before:]
    seconds = [line["seconds_per_iteration"] for line in lines]
    measure = statistics.mean if policy.is_outer else statistics.median
    return {
        "method": plan.method,
        "predicted_s": plan.predicted.iteration_s,
        "measured_s": measure(seconds),
        "measured_each_s": seconds,
        "predicted_pipeline_s": plan.predicted.pipeline_s,
        "bytes_sent": lines[-1]["bytes_sent"],
        "last_loss": lines[-1]["loss"],
    }


def train(plan: Plan, hosts: AllHosts, config: Path, name: str, steps: int) -> Path:
    """Train so many steps along a plan on all hosts; returns the folder of the run."""
    file, run_dir = hosts.folder / f"{name}.json", hosts.folder / name
    plan.save(file)
    settings = {
        "run_dir": run_dir,
        "plan": json.dumps({"file": str(file)}),
        "train.steps": steps,
        "trace": f"every {steps}",
        "checkpoint.every": steps,
    }
    words = set_words(*(f"{key}={value}" for key, value in settings.items()))
    hosts.run(name, "skippipe_jax.train", "--config", config, *words)
    return run_dir


def picture(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw for every method a bar as predicted, and under it one as measured."""
    figure, [[axes]] = drawing.panels(1, 0.8 + 0.45 * len(rows))
    for number, row in enumerate(rows):
        for aside, name, color in ((-0.18, "predicted", SKY), (0.18, "measured", BLUE)):
            seconds, label = row[f"{name}_s"], name if number == 0 else None
            axes.barh(number + aside, seconds, 0.34, color=color, label=label)
            text = f" {seconds:.2f} s"
            if name == "measured":
                text += f", {seconds / row['predicted_s']:.3f} of predicted"
            axes.text(seconds, number + aside, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [*map(_name, rows)])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_title(f"{title}: seconds of one iteration, averaging included")
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.06))
    return figure


def _name(row: dict[str, Any]) -> str:
    """What a row is called in the picture."""
    own = (row["averaging"], EXACT), (row["hops"], AS_COMPUTED)
    return ", ".join([row["method"], *(given for given, usual in own if given != usual)])


def _line(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    # With the same hops if it was run with them.
    full = {r["hops"]: r["measured_s"] for r in rows if r["method"] == "full"}
    baseline = full.get(row["hops"], next(iter(full.values()), None))
    to_full = "" if baseline is None else f"  {row['measured_s'] / baseline:6.3f} of full"
    return (
        f"{row['method']:16}  {row['averaging']:5}  {row['hops']:8}  "
        f"predicted {row['predicted_s']:7.2f} s  "
        f"measured {row['measured_s']:7.2f} s  "
        f"({row['measured_s'] / row['predicted_s']:.3f}){to_full}"
    )


def main() -> int:
    """Parse the command line, measure, and print a table; returns the exit code."""
    numbers = {
        "iterations": (5, 1, "timed iterations, after one that compiles"),
        "blocks": (1, 1, "blocks of each stage"),
        "every": (20, 2, "averaging.every of outer averaging"),
        "slower_links": (1.0, 0.0, "factor by which all links are slower"),
        "budget": (30.0, None, "seconds of each search"),
    }
    options = {
        "--hosts": {"type": int, "default": 20, "choices": WORKLOADS, "help": "(%(default)s)"},
        "--arms": {
            "nargs": "+",
            "metavar": "METHOD/AVERAGING/HOPS",
            "choices": ARMS,
            "default": METHODS,
            "help": "what is compared, for example joint/outer/int8 (all methods, exact, as "
            "computed)",
        },
        "--sequence-length": {
            "type": int,
            "default": 256,
            "choices": [32, 64, 128, 256],
            "help": "more and shorter sequences need less compute for hops of the same size "
            "(%(default)s)",
        },
        "--shared-connections": {
            "type": float,
            "metavar": "FACTOR",
            "help": "all links of a host share a connection: it sends as fast as the fastest of "
            "them, and receives FACTOR times as fast (default: links have rates of their own)",
        },
        "--busy-stages": {
            "action": "store_true",
            "help": "plan with operation times measured while all hosts train, not on an idle "
            "machine, because many processes on few cores share caches",
        },
    }
    paths = {
        "figure": "draw the results as an SVG to this file",
        "keep": "keep plans, runs and timelines in this folder",
    }
    return reporting.run(
        "network.wan", __doc__, measure, numbers=numbers, options=options, paths=paths
    )


if __name__ == "__main__":
    sys.exit(main())
