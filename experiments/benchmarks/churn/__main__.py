"""Does a run go on exactly as it should while its hosts are lost, one after another?

    python -m experiments.benchmarks.churn --hosts 6 --faults 30 --seed 0 --json churn.json

The quickstart's model is trained in 3 stages of 2 replicas by real processes. Faults that the seed
draws strike them: SIGKILL, SIGTERM, SIGSTOP for 5 seconds or for good, a link that is cut, a
partition of the network, and a connection that goes silent while new ones work (these three need
root and iproute2: hosts are network namespaces), connections that are reset, and a folder of the
run that fails for three seconds. Each is aimed at a phase of a step, a third of all at the leader.
With some of them a second host is killed: the newcomer while it joins, or one that it takes its
state from, or the leader. A host that was lost comes back by `join`, with a folder of its own, or
by --resume, as the seed draws; always by --resume where two others have joined or another is away,
as too few would be left that can read a checkpoint. The next fault strikes when all are there
again. In the end it is asserted that

    never all hosts ended, none ended by itself, nothing hung, and no output has a traceback
    replicas of a stage were the same, bit by bit, whenever a step counted
    every step that counted had read its own microbatches, each once
    every step has the loss and the gradient of a run of one process that nothing happened to

It prints how long the run took to make a step again, from when a loss was noticed. A smaller and
quicker one: --hosts 3 --faults 4 --kinds kill stop --set model.width=64 --set model.ffn_width=96

With --outer the replicas of a stage go apart (`averaging.mode: outer`): some faults come while what
has been sent is on its way. Then it is asserted that replicas apply the same, bit by bit, that no
microbatch is read for two steps that count, and that the run learns.

How much does a run get done under churn?

    python -m experiments.benchmarks.churn --faults 100 --every-s 60 --heartbeat-timeout-s 3 \\
        --restart --json churn_hundred_faults.json --picture churn_hundred_faults.svg

Faults come at moments that the seed draws, one a minute on average; one that would come before all
are there again waits. Links are so slow, and the model is so small, that the network takes most of
an iteration and one machine serves all hosts. The last host is never struck. After each fault its
open descriptors, threads and resident memory are noted, which must not grow. Goodput is how many
microbatches count in an hour, over that of the same processes before the first fault.

With --restart the same faults strike a second run at the same moments, beside the first and with
the same priority: one that all hosts restart from its last checkpoint as soon as one is lost.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from experiments.benchmarks.churn import records
from experiments.benchmarks.churn.config import (
    OUTER,
    PER_STEP,
    SLOW,
    STAGES,
    Undisturbed,
    write_config,
)
from experiments.benchmarks.churn.faults import (
    KINDS,
    OF_THE_NETWORK,
    Fault,
    draw,
    moments,
)
from experiments.benchmarks.churn.hosts import Ended, Hosts
from experiments.benchmarks.churn.report import picture, summary, told
from experiments.benchmarks.churn.restart import Restarted
from experiments.benchmarks.churn.strike import Strike
from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import ENVIRONMENT
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from experiments.paper import drawing
from skippipe_jax.storage.run_dir import METRICS

SLOW_LINK_BYTES_PER_S = 6e5
CALM_S = 60.0
MORE_STEPS = 1.2
"""As many times the steps that the run would make undisturbed are made beside it in one process."""


class Struck:
    """A run while faults strike it, and what is found out about it.

    Attributes:
        results: of each fault.
        open_in_spared: what the host that is never struck had open after each.
        found: what else is told of the run.
        undisturbed: the same steps and more in one process, if they are made meanwhile.
    """

    def __init__(self, hosts: Hosts, faults: list[Fault], arguments: argparse.Namespace):
        """Strike nothing yet."""
        self._hosts, self._faults, self._arguments = hosts, faults, arguments
        self.results: list[dict[str, Any]] = []
        self.open_in_spared: list[dict[str, int]] = []
        self.found: dict[str, Any] = {}
        self.undisturbed: Undisturbed | None = None

    def happen(self) -> None:
        """Let all faults happen, and the run end.

        Raises:
            Ended: if it cannot go on.
        """
        hosts, every_s = self._hosts, self._arguments.every_s
        hosts.wait("all hosts have started", lambda: hosts.are_all_in(0.0))
        print(f"{hosts.count} hosts train; {len(self._faults)} faults", flush=True)
        if every_s is None:
            for fault in self._faults:
                self._strike(fault)
        else:
            self._strike_at_moments(every_s)
        hosts.end()

    def _strike_at_moments(self, every_s: float) -> None:
        hosts, count = self._hosts, len(self._faults)
        # What is compiled after the first steps is over by then.
        hosts.rest(time.time() + self._arguments.calm_s / 4)
        calm = self._now()
        hosts.rest(calm[0] + self._arguments.calm_s)
        first = self._now()
        steps = first[1] + int(
            MORE_STEPS * count * every_s / (first[0] - calm[0]) * (first[1] - calm[1])
        )
        self.undisturbed = Undisturbed(hosts.folder, hosts.config, steps, beside=True)
        try:
            for fault, at_s in zip(
                self._faults, moments(self._arguments.seed, count, every_s), strict=True
            ):
                hosts.rest(first[0] + at_s)
                self._strike(fault)
                self.results[-1]["drawn_at_s"] = round(at_s, 1)
                self.results[-1]["over_at_s"] = round(time.time() - first[0], 1)
                self.open_in_spared.append(records.open_in(hosts.process(hosts.count - 1)))
                progress = {"faults": self.results, "spared": self.open_in_spared}
                reporting.write(progress, hosts.folder / "progress.json")
            hosts.rest(first[0] + count * every_s)
        finally:
            self.found |= records.goodput(calm, first, self._now(), PER_STEP)

    def _strike(self, fault: Fault) -> None:
        timeout_s = self._arguments.heartbeat_timeout_s
        self.results.append(Strike(self._hosts, fault, timeout_s).happen())
        print(told(self.results[-1], len(self._faults)), flush=True)

    def _now(self) -> tuple[float, int]:
        self._hosts.look()
        return time.time(), records.step_at(self._hosts.notes, time.time())


def judged(
    hosts: Hosts, config: Path, undisturbed: Undisturbed | None, *, is_outer: bool
) -> list[str]:
    """All that is not as it must be of what the run has left."""
    run_dir = hosts.folder / "run"
    lines = records.read_lines(run_dir / METRICS)
    found = [*hosts.tracebacks(), *records.differing_replicas(hosts.notes)]
    if is_outer:
        found += records.wrongly_read_apart(hosts.notes, PER_STEP)
        return found + records.badly_trained(lines) if lines else found
    found += records.wrongly_read(hosts.notes, PER_STEP)
    if not lines:
        return found
    if undisturbed is None or undisturbed.steps < len(lines):
        print(f"training the same {len(lines)} steps in one process ...", flush=True)
        if undisturbed is not None:
            undisturbed.kill()
            shutil.rmtree(undisturbed.run_dir)
        undisturbed = Undisturbed(hosts.folder, config, len(lines))
    return found + records.otherwise_trained(lines, undisturbed.metrics())


def described_machine() -> dict[str, Any]:
    """Describe the machine in a process of its own: this one has no use for JAX."""
    told = "import json; from experiments.benchmarks.harness.reporting import describe_machine"
    return reporting.found_by("-c", f"{told}; print(json.dumps(describe_machine()))", **ENVIRONMENT)


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Train and strike, and judge what the run has left."""
    faults, rate = _checked(arguments)
    hosts, count, timeout_s = arguments.hosts, arguments.faults, arguments.heartbeat_timeout_s
    report["machine"] = described_machine()
    beside: Future[dict[str, Any]] | None = None
    restarted: Restarted | None = None
    with ExitStack() as opened:
        folder = opened.enter_context(reporting.folder_for(arguments.keep, "churn"))
        slow = [] if arguments.every_s is None else SLOW
        apart = OUTER if arguments.outer else []
        config = write_config(folder, hosts, timeout_s, [*slow, *apart, *arguments.set])

        def network() -> ShapedNetwork | None:
            if rate is None:
                return None
            return opened.enter_context(ShapedNetwork(np.full((hosts, hosts), rate)))

        if arguments.restart:
            given = folder, config, hosts, timeout_s, network()
            restarted = Restarted(*given, arguments.calm_s)
            opened.callback(restarted.kill)
            drawn = moments(arguments.seed, count, arguments.every_s or 0.0)
            pool = opened.enter_context(ThreadPoolExecutor(1))
            opened.callback(restarted.give_up)
            length_s = count * arguments.every_s
            beside = pool.submit(restarted.happen, faults, drawn, length_s)
        running = Hosts(folder, config, hosts, arguments.patience_s, network())
        opened.callback(running.kill)
        struck = Struck(running, faults, arguments)
        try:
            struck.happen()
        except Ended as how:
            running.failures.append(str(how))
            running.kill()
        if struck.undisturbed is not None:
            opened.callback(struck.undisturbed.kill)
        running.look()
        failures = [
            *running.failures,
            *judged(running, config, struck.undisturbed, is_outer=arguments.outer),
        ]
        if beside is not None:
            if running.failures and restarted is not None:
                restarted.give_up()
            if (error := beside.exception()) is None:
                report["restarted"] = beside.result()
            else:
                failures.append(f"the restarted run failed: {error!r}")
    results = struck.results
    recovered = sorted(r["recovered_s"] for r in results if r["recovered_s"] is not None)
    report |= {
        "hosts": hosts,
        "seed": arguments.seed,
        "heartbeat_timeout_s": timeout_s,
        "steps": records.step_at(running.notes, np.inf),
        "faults": results,
        "recovered_s": {
            "median": round(statistics.median(recovered), 3) if recovered else None,
            "percentile_95": records.percentile(recovered, 0.95),
        },
        "failures": failures,
    }
    if arguments.every_s is not None:
        series = struck.open_in_spared
        report |= {"every_s": arguments.every_s, "link_bytes_per_s": rate} | struck.found
        report["spared"] = {"host": hosts - 1, "after_each_fault": series}
        failures += records.grown(series)
        if arguments.require_goodput:
            failures += records.too_little(report)
        if arguments.picture is not None:
            drawing.write_svg(picture(report), arguments.picture)
    return summary(report)


def _checked(arguments: argparse.Namespace) -> tuple[list[Fault], float | None]:
    """The faults, and the rate of links in a shaped network, None if there is none.

    Raises:
        InputError: if the arguments make no sense.
    """
    hosts = fields.integer(arguments.hosts, "--hosts", 3, sum(STAGES))
    for option in ("every_s", "link_bytes_per_s"):
        value = getattr(arguments, option)
        if value is not None:
            fields.number(value, f"--{option.replace('_', '-')}", 0.0, above=True)
    is_paced = arguments.every_s is not None
    if arguments.outer and is_paced:
        remedy = "Remove one of the two options"
        raise InputError("--outer", True, "cannot be combined with --every-s", remedy)
    if arguments.restart and not is_paced:
        raise InputError("--restart", True, "requires --every-s", "Add --every-s")
    rate = arguments.link_bytes_per_s or (SLOW_LINK_BYTES_PER_S if is_paced else None)
    if rate is None and OF_THE_NETWORK & set(arguments.kinds):
        rate = np.inf
    if rate is not None and os.geteuid() != 0:
        remedy = "Run this as root, or choose other kinds: --kinds kill stop hang"
        raise InputError("--kinds", arguments.kinds, "only root can cut links", remedy)
    spared = hosts - 1 if is_paced else None
    return draw(arguments.seed, hosts, arguments.faults, arguments.kinds, spared), rate


def main() -> int:
    """Parse the command line, train and strike, print; returns the exit code."""
    numbers = {
        "hosts": (6, 3, "from 3 to 6"),
        "faults": (30, 1, "number of faults"),
        "seed": (0, None, "seed of the faults"),
        "calm_s": (CALM_S, 0.0, "seconds before the first fault"),
        "heartbeat_timeout_s": (
            4.0,
            0.0,
            "cluster.heartbeat_timeout_s; increase it on a busy machine",
        ),
        "patience_s": (180.0, 0.0, "seconds without progress after which the run counts as hung"),
    }
    told = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    kinds = {"nargs": "+", "choices": KINDS, "default": [*KINDS]}
    flag = {"action": "store_true"}
    options = {
        "--kinds": kinds | {"help": f"kinds of faults (all). {told}"},
        "--every-s": {
            "type": float,
            "metavar": "SECONDS",
            "help": "mean time between faults; by default, each occurs as soon as all hosts are "
            "back",
        },
        "--link-bytes-per-s": {
            "type": float,
            "metavar": "RATE",
            "help": f"rate of each link between two hosts ({SLOW_LINK_BYTES_PER_S:g} with "
            "--every-s, else unlimited)",
        },
        "--outer": flag | {"help": "averaging.mode: outer; not with --every-s"},
        "--restart": flag | {"help": "also measure a run that is restarted after each fault"},
        "--require-goodput": flag
        | {
            "help": f"fail if the goodput is below {records.LEAST_GOODPUT:g}, or less than "
            f"{records.LEAST_RATIO:g} times that of --restart"
        },
    }
    paths = {
        "picture": "draw the results of --every-s as an SVG to this file",
        "keep": "keep the files of the hosts in this folder",
    }
    return reporting.run(
        "churn",
        __doc__,
        measure,
        numbers=numbers,
        options=options,
        paths=paths,
        overrides="override one key of the configuration; may be given often",
        takes_device=False,
    )


if __name__ == "__main__":
    sys.exit(main())
