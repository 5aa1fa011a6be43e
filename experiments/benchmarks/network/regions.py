"""Is a plan for the hosts that are left there soon, and does it take as long as it says?

    python -m experiments.benchmarks.network.regions --json FILE --picture FILE
                                                                   (needs root and iproute2)

Twelve hosts in four regions are network namespaces of this machine, a JAX process in each. `tc`
shapes the links between them to the bandwidths between cloud regions, scaled so that a hop takes
0.3 to 1.2 seconds. `skippipe measure` measures them, and a small LLaMA in 4 stages of 3
replicas is trained by the plan for that case. Then the three hosts of a region are killed at once,
and after some iterations started again by --resume. Each time the others go on by a quick plan, and
by a better one as soon as it is found. For each generation of hosts it tells

    what its plan predicts of an iteration, what was measured (the median over those that compiled
    nothing), and whether the two are within 10%
    when a better plan arrived: from when the quick plan was gone on by, to when the run goes on by
    the better one; and whether that is within 15 s
    how many nodes changed their stage, so that states had to move

A host that comes back makes a generation, so there may be several until all three are there; one
of which no iteration was made but the first is only named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched.figures.tables import aligned
from skippipe_sched.problem.plan import Plan, load_plan

from experiments.benchmarks.churn.records import read_lines
from experiments.benchmarks.harness import launching, reporting
from experiments.benchmarks.harness.launching import set_words
from experiments.benchmarks.network import wan
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from experiments.paper import drawing
from experiments.paper.drawing import BLUE, VERMILION
from skippipe_jax.storage.run_dir import GENERATIONS, MEMBERSHIP, METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REGIONS = ("Germany", "Iowa", "Japan", "Australia")
LOST = REGIONS[0]  # With the leader.
# So small that two cores serve twelve hosts: links are what takes time.
WORKLOAD = wan.Workload(
    (3, 3, 3, 3),
    path_length=3,
    microbatches_per_data_node=2,
    memory=3,
    width=32,
    ffn_width=64,
    microbatch_size=8,
    sequence_length=128,
)
HOPS_S = 0.3, 1.2
PORT = 61440
ENDLESS = 1_000_000
FOUND = "a faster plan was found"
LOOK_S = 0.02
WITHIN_SHARE, WITHIN_S = 0.1, 15.0
LEAST_ITERATIONS = 2


class Run:
    """The processes of a run, one for each host, and what it has left so far.

    Attributes:
        seen_s: when the line of each generation was first seen, by the clock of `time.time`.
    """

    def __init__(self, folder: Path, network: ShapedNetwork, words: Sequence[str], limit_s: float):
        """Start all hosts; what they print goes to files in `folder`."""
        self.folder, self.run_dir = folder, folder / "run"
        self.seen_s: dict[int, float] = {}
        self._network, self._words, self._limit_s = network, words, limit_s
        self._processes = {host: self._started(host) for host in range(WORKLOAD.hosts)}

    def _started(self, host: int, *more: str) -> subprocess.Popen[bytes]:
        command = ["-m", "skippipe_jax.train", *self._words]
        command += ["--coordinator", f"{self._network.address(0)}:{PORT}"]
        command += ["--hosts", str(WORKLOAD.hosts), "--host-id", str(host), *more]
        output = self.folder / f"host{host}{''.join(more)}.txt"
        return launching.started(command, output, self._network.command(host))

    def kill(self, hosts: Sequence[int]) -> None:
        """End hosts without notice, all at once."""
        launching.kill([self._processes.pop(host) for host in hosts])

    def start_again(self, hosts: Sequence[int]) -> None:
        """Start hosts that were killed."""
        self._processes |= {host: self._started(host, "--resume") for host in hosts}

    def close(self) -> None:
        """End all of them."""
        self.kill(list(self._processes))

    def generations(self) -> list[dict[str, Any]]:
        """The lines of membership.jsonl."""
        lines = read_lines(self.run_dir / MEMBERSHIP)
        for line in lines:
            self.seen_s.setdefault(line["generation"], time.time())
        return lines

    def iterations(self, generation: int) -> int:
        """How many iterations of a generation have ended."""
        lines = read_lines(self.run_dir / METRICS)
        return sum(line["generation"] == generation for line in lines)

    def wait(self, what: str, condition: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until something is the case; whether it is when a limit has passed, if one is given.

        Raises:
            RuntimeError: a host has ended, or it takes too long.
        """
        until_s = time.monotonic() + (limit_s or self._limit_s)
        while not condition():
            ended = {h: code for h, p in self._processes.items() if (code := p.poll()) is not None}
            if ended:
                raise RuntimeError(f"hosts exited while waiting for {what}; codes by host: {ended}")
            if time.monotonic() > until_s:
                if limit_s is None:
                    raise RuntimeError(f"timed out after {self._limit_s:g} s waiting for {what}")
                return False
            time.sleep(LOOK_S)
        return True

    def goes_on(self, hosts: int, iterations: int, patience_s: float) -> None:
        """Wait until so many hosts have made iterations by a better plan, if one is found.

        Where none is after `patience_s`, they have made them by the quick one.
        """

        def last() -> dict[str, Any]:
            lines = self.generations()
            return lines[-1] if lines else {"members": [], "generation": 0}

        def are_there() -> bool:
            return len(last()["members"]) == hosts

        self.wait(f"a generation of {hosts} hosts", are_there)
        if last()["generation"] > 1:
            self.wait("a better plan", lambda: is_better(last()), patience_s)

        def is_enough() -> bool:
            return are_there() and self.iterations(last()["generation"]) > iterations

        self.wait(f"{iterations} iterations of {hosts} hosts", is_enough)


def is_better(generation: Mapping[str, Any]) -> bool:
    """Whether a generation goes on by a plan that was searched for."""
    return generation["cause"] == FOUND


def measured_generations(
    generations: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    seen_s: Mapping[int, float],
    stages: Mapping[int, Mapping[int, int]],
) -> list[dict[str, Any]]:
    """What each generation's plan predicts of an iteration, and what was measured.

    `lines` are those of metrics, and `seen_s` is when each generation was there. `stages` tells the
    stage of each node that a generation has.
    """
    results = []
    for place, generation in enumerate(generations):
        number = generation["generation"]
        own = [line for line in lines if line["generation"] == number]
        settled = [line["seconds_per_iteration"] for line in own if not line["compilations"]]
        measured_s = statistics.median(settled) if len(settled) >= LEAST_ITERATIONS else None
        predicted_s = generation["predicted_seconds"]
        ratio = None if measured_s is None else measured_s / predicted_s
        result = {
            "generation": number,
            "cause": generation["cause"],
            "hosts": len(generation["members"]),
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "measured_each_s": [round(line["seconds_per_iteration"], 4) for line in own],
            "compilations": [line["compilations"] for line in own],
            "ratio": ratio,
            "is_as_predicted": None if ratio is None else abs(ratio - 1.0) <= WITHIN_SHARE,
        }
        if is_better(generation):
            since_change_s = seen_s[number] - seen_s[generations[place - 1]["generation"]]
            before = stages[generations[place - 1]["generation"]]
            moved = sum(before.get(node) != stage for node, stage in stages[number].items())
            result |= {
                "arrived_after_s": round(since_change_s, 3),
                "is_soon": since_change_s <= WITHIN_S,
                "nodes_moved": moved,
            }
        results.append(result)
    return results


def stages_of_nodes(plan: Plan, members: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The stage of each node of the members, by the numbers of the run's own plan."""
    kept = sorted(node for member in members for node in member["nodes"])
    return {kept[node]: stage for stage, nodes in enumerate(plan.stages) for node in nodes}


def failures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not as it should be."""
    found = [
        f"generation {result['generation']} takes {result['ratio']:.3f} times the predicted seconds"
        for result in results
        if result["is_as_predicted"] is False
    ]
    found += [
        f"the better plan of generation {result['generation']} was found after "
        f"{result['arrived_after_s']:.1f} s"
        for result in results
        if result.get("is_soon") is False
    ]
    if not any("arrived_after_s" in result for result in results):
        found.append("no better plan was found")
    return found


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for each generation."""
    heads = ("generation", "hosts", "plan", "predicted, s", "measured, s", "ratio", "iterations")
    heads = (*heads, "arrived after, s", "nodes moved")
    rows: list[tuple[str, ...]] = [heads]
    for result in results:
        rows.append(
            (
                str(result["generation"]),
                str(result["hosts"]),
                plan_of(result),
                f"{result['predicted_s']:.2f}",
                reporting.figure(result["measured_s"], ".2f"),
                reporting.figure(result["ratio"], ".3f"),
                str(len(result["measured_each_s"])),
                reporting.figure(result.get("arrived_after_s"), ".1f"),
                reporting.figure(result.get("nodes_moved"), "d"),
            )
        )
    return aligned(rows, left=(0, 1, 2))


def plan_of(result: Mapping[str, Any]) -> str:
    """Name the kind of plan by which a generation goes on."""
    if result["generation"] == 1:
        return "own"
    return "searched" if "arrived_after_s" in result else "quick"


def picture(results: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw the seconds of all iterations, and what the plan of each predicts."""
    figure, [[axes]] = drawing.panels(1, 3.6)
    begin, highest = 0, 0.0
    for result in results:
        seconds = result["measured_each_s"]
        end = begin + len(seconds)
        axes.stairs(seconds, range(begin, end + 1), color=BLUE)
        axes.hlines(result["predicted_s"], begin, end, color=VERMILION)
        if seconds:
            axes.axvline(begin, color="grey", linestyle="--", linewidth=0.8)
            # Of a quick plan, which goes on for an iteration or two, below that of the next.
            height = 0.93 if plan_of(result) == "quick" else 1.0
            told = f" {result['hosts']}, {plan_of(result)}"
            axes.text(begin, height, told, va="top", transform=axes.get_xaxis_transform())
        both = zip(seconds, result["compilations"], strict=True)
        highest = max(highest, result["predicted_s"], *(own for own, new in both if not new))
        begin = end
    # One that compiles takes many times as long, and is cut off.
    axes.set_ylim(0, 1.2 * highest)
    axes.set_title(f"{title}: seconds of an iteration, measured (blue) and predicted (red)")
    axes.set_xlabel("iteration")
    return figure


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Train, lose a region and get it back, and compare each generation with its plan."""
    iterations = arguments.iterations
    locations, rates = wan.shaped_rates(WORKLOAD, REGIONS, HOPS_S)
    struck = [host for host, location in enumerate(locations) if location == LOST]
    with ExitStack() as opened:
        folder = opened.enter_context(reporting.folder_for(arguments.keep, "regions"))
        network = opened.enter_context(ShapedNetwork(rates))
        config = wan.config_of(folder, WORKLOAD, locations, wan.AS_COMPUTED)
        hosts = launching.AllHosts(network, folder, WORKLOAD.hosts)
        case, profile = wan.profiled(hosts, config, rates)
        plan = wan.plan_by("joint", case, arguments.plan_budget_s)
        plan.save(folder / "plan.json")
        settings = {
            "run_dir": folder / "run",
            "plan": json.dumps({"file": str(folder / "plan.json"), "seed": arguments.seed}),
            "train.steps": ENDLESS,
            "checkpoint.every": ENDLESS,
            "replan.budget_s": arguments.budget_s,
            "cluster.heartbeat_timeout_s": 10,
        }
        overrides = (f"{key}={value}" for key, value in settings.items())
        words = ["--config", str(config), *set_words(*overrides)]
        run = Run(folder, network, words, arguments.limit_s)
        opened.callback(run.close)
        run.goes_on(WORKLOAD.hosts, 2 * iterations, arguments.patience_s)
        print(f"killing hosts {struck} in {LOST}", flush=True)
        run.kill(struck)
        run.goes_on(WORKLOAD.hosts - len(struck), iterations, arguments.patience_s)
        print(f"restarting hosts {struck}", flush=True)
        run.start_again(struck)
        run.goes_on(WORKLOAD.hosts, iterations, arguments.patience_s)
        generations, lines = run.generations(), read_lines(run.run_dir / METRICS)
        stages = {}
        for line in generations:
            path = run.run_dir / GENERATIONS / f"plan-{line['generation']}.json"
            own = load_plan(path) if path.exists() else plan
            stages[line["generation"]] = stages_of_nodes(own, line["members"])
    results = measured_generations(generations, lines, run.seen_s, stages)
    wrong = failures(results)
    report |= {
        "regions": list(REGIONS),
        "lost": LOST,
        "seed": arguments.seed,
        "budget_s": arguments.budget_s,
        "profile": profile,
        "generations": results,
        "failures": wrong,
    }
    if arguments.picture is not None:
        title = f"Twelve hosts lose three, in {LOST}, and get them back"
        drawing.write_svg(picture(results, title), arguments.picture)
    verdict = [f"WRONG: {failure}" for failure in wrong]
    verdict = verdict or [
        "all iterations within 10% of the prediction, and better plans within 15 s"
    ]
    return "\n".join([table(results), *verdict])


def main() -> int:
    """Parse the command line, measure, and print a table; returns the exit code."""
    numbers = {
        "seed": (0, None, "seed of the searches"),
        "iterations": (12, LEAST_ITERATIONS, "iterations by each plan, except repair plans"),
        "budget_s": (5.0, None, "replan.budget_s of the run"),
        "plan_budget_s": (10.0, None, "seconds of the search for the first plan"),
        "patience_s": (60.0, None, "seconds to wait for a better plan"),
        "limit_s": (600.0, None, "seconds to wait for anything else"),
    }
    paths = {
        "picture": "draw all iterations as an SVG to this file",
        "keep": "keep the files of the hosts in this folder",
    }
    return reporting.run("network.regions", __doc__, measure, numbers=numbers, paths=paths)


if __name__ == "__main__":
    sys.exit(main())
