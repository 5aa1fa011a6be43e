"""What does it cost to lose all hosts of a stage, under each policy of `recovery.lost_stage`?

    python -m experiments.benchmarks.churn.lost_stages --json FILE --picture FILE

The quickstart's model is trained in 4 stages of a block each by 6 real processes, a node each:
two serve stage 0, one stage 1, two stage 2, and one stage 3. After step --at both hosts of stage 2
are killed at once, and the others go on as the policy says. For each policy it tells how many
steps old the state is that stage 2 goes on with, the loss of the step before and after, how many
steps it takes until the loss is again as low as before, and the loss in the end, beside a run of
one process that nothing happens to. A loss "in the end", or "as low as before", is the mean over
--window steps, as single steps differ by their text. By how much the loss is above that of the
other run, step for step on the same text, is told as the mean over the --window steps after the
last one that was made before hosts died, and over the last ones. With skip the loss is that of the
stages that are left: hosts that would serve stage 2 again do not come back here.

A smaller and quicker one: --steps 30 --at 17 --window 5 --set model.width=64 --set
model.ffn_width=96 --set checkpoint.every=10 --set recovery.buddy_every=4
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import InputError
from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.churn.config import quickstart_in
from experiments.benchmarks.churn.records import last_line, read_lines
from experiments.benchmarks.harness import launching, reporting
from experiments.benchmarks.harness.launching import set_words
from experiments.paper import drawing
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.config import load_config
from skippipe_jax.config.cluster import LOST_STAGE, STOP
from skippipe_jax.local.hosts import free_port
from skippipe_jax.storage.run_dir import METRICS, RECOVERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = (2, 1, 2, 1)
HOSTS = sum(STAGES)
LOST_STAGE_NUMBER = 2
# Nodes are placed in order: those of stage 2 come after those of stages 0 and 1.
STRUCK = (3, 4)
UNDISTURBED = "undisturbed"
CONFIG = "config.yaml"
LOOK_S = 0.02


def write_config(folder: Path, steps: int, timeout_s: float, overrides: Sequence[str]) -> None:
    """Write the configuration of all runs: the quickstart, but for its plan."""
    config = quickstart_in(folder, STAGES, path_length=3)
    config |= {
        "model": config["model"] | {"stage_layers": [1] * len(STAGES)},
        "train": {"steps": steps},
        "cluster": {"heartbeat_timeout_s": timeout_s},
    }
    path = launching.write_config(folder / CONFIG, config)
    load_config(path, overrides)  # What is wrong with the overrides is said now.


def undisturbed(folder: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of a run of one process, to which nothing happens."""
    run_dir = folder / UNDISTURBED
    launching.run_alone(_command(folder, UNDISTURBED, words), folder / f"{UNDISTURBED}.txt")
    return read_lines(run_dir / METRICS)


def struck(
    folder: Path, policy: str, words: Sequence[str], at: int, patience_s: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and recoveries of a run that loses both hosts of a stage after a step.

    Raises:
        RuntimeError: if a host that was not struck ends otherwise than it should, or none does.
    """
    run_dir, address = folder / policy, f"127.0.0.1:{free_port()}"
    processes = []
    for host in range(HOSTS):
        command = _command(folder, policy, words)
        command += set_words(f"recovery.lost_stage={policy}")
        command += ["--coordinator", address, "--hosts", str(HOSTS), "--host-id", str(host)]
        output = folder / f"{policy}-host{host}.txt"
        processes.append(launching.started(command, output))
    until_s = time.monotonic() + patience_s
    expected = LOST_HOST_EXIT_CODE if policy == STOP else 0
    try:
        while (last_line(run_dir / METRICS) or {"step": 0})["step"] < at:
            if time.monotonic() > until_s or any(own.poll() is not None for own in processes):
                raise RuntimeError(f"{policy}: the run did not reach step {at}")
            time.sleep(LOOK_S)
        for host in STRUCK:
            processes[host].send_signal(signal.SIGKILL)
        for host in set(range(HOSTS)) - set(STRUCK):
            code = processes[host].wait(max(0.0, until_s - time.monotonic()))
            if code != expected:
                raise RuntimeError(f"{policy}: host {host} exited with code {code}, not {expected}")
    finally:
        launching.kill(processes)
    return read_lines(run_dir / METRICS), read_lines(run_dir / RECOVERIES)


def _command(folder: Path, policy: str, words: Sequence[str]) -> list[str]:
    command = ["-m", "skippipe_jax.train", "--config", str(folder / CONFIG), *words]
    return command + set_words(f"run_dir={folder / policy}")


def judged(
    lines: Sequence[Mapping[str, Any]],
    recoveries: Sequence[Mapping[str, Any]],
    window: int,
    others: Sequence[float] = (),
) -> dict[str, Any]:
    """What a policy has cost, by the metrics of its run and what it has written of recoveries.

    `others` are the losses of the run that nothing happens to.
    """
    losses = {line["step"]: line["loss"] for line in lines}
    result: dict[str, Any] = {"losses": list(losses.values())}
    if recoveries:
        [told] = recoveries
        keys = ("by", "step_before", "step", "steps_old", "loss_before", "loss_after")
        result |= {key: told[key] for key in keys}
        result["steps_until_as_low"] = steps_until(
            losses, told["step"], told["step_before"], window
        )
        first, last = told["step_before"] + 1, max(losses)
        result["above_after"] = above(losses, others, range(first, first + window))
        result["above_end"] = above(losses, others, range(last - window + 1, last + 1))
    else:
        result["by"] = None
    result["end_loss"] = round(statistics.fmean(list(losses.values())[-window:]), 5)
    return result


def above(losses: Mapping[int, float], others: Sequence[float], steps: range) -> float:
    """By how much losses are above others, in the mean over some steps, which count from 1."""
    return round(statistics.fmean(losses[step] - others[step - 1] for step in steps), 5)


def steps_until(losses: Mapping[int, float], step: int, before: int, window: int) -> int | None:
    """How many steps it takes from `step` on until the loss is as low as it was at step `before`.

    Both are means over a window. Steps that are run again count, and have the losses that they had.
    None if it never is.
    """
    level = statistics.fmean(losses[s] for s in range(before - window + 1, before + 1))
    for last in range(step + window, max(losses) + 1):
        if statistics.fmean(losses[s] for s in range(last - window + 1, last + 1)) <= level:
            return last - step
    return None


def table(report: Mapping[str, Any]) -> str:
    """A line for each policy."""
    heads = ("policy", "recovered by", "steps old", "loss before", "after", "as low after", "end")
    heads += ("above, after", "above, end")
    rows: list[tuple[str, ...]] = [heads]
    for policy, own in report["results"].items():
        until = own.get("steps_until_as_low")
        before, after = own.get("loss_before"), own.get("loss_after")
        rows.append(
            (
                policy,
                own["by"] or "-",
                reporting.figure(own.get("steps_old"), "d"),
                reporting.figure(before, ".4f"),
                reporting.figure(after, ".4f"),
                "-" if own["by"] is None else "never" if until is None else f"{until} steps",
                reporting.figure(own["end_loss"], ".4f"),
                reporting.figure(own.get("above_after"), "+.4f"),
                reporting.figure(own.get("above_end"), "+.4f"),
            )
        )
    return aligned(rows, left=(0, 1))


def picture(report: Mapping[str, Any]) -> Figure:
    """Draw the losses of all runs over their steps, each a running mean."""
    window, at, last = report["window"], report["at"], report["steps"]
    # From a little before the loss on: what comes before is alike in all.
    first = max(window, at - 2 * max(window, last - at) // 2)
    figure, [[axes]] = drawing.panels(1, 3.6)
    for policy, own in report["results"].items():
        curve = means(own["losses"], window)[first - window :]
        axes.plot(range(first, first + len(curve)), curve, label=policy)
    axes.axvline(at, color="grey", linestyle="--")
    axes.set_title(f"Loss, nats per token, mean over {window} steps")
    axes.set_xlabel(f"step; stage {LOST_STAGE_NUMBER} is lost at the dashed line")
    axes.legend()
    return figure


def means(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, over a window; none before it is full."""
    return [
        statistics.fmean(values[last - window : last]) for last in range(window, len(values) + 1)
    ]


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Train undisturbed, and by each policy.

    Raises:
        InputError: if the step after which hosts are killed is too near to an end.
    """
    steps, window, at = arguments.steps, arguments.window, arguments.at
    if not window <= at <= steps - window:
        problem = f"must be from {window} to {steps - window}: --window steps before and after"
        raise InputError("--at", at, problem, "Change --at, --window or --steps")
    words = set_words(*arguments.set)
    results: dict[str, Any] = {}
    report |= {"steps": steps, "at": at, "window": window, "results": results}
    with reporting.folder_for(arguments.keep, "lost_stages") as folder:
        write_config(folder, steps, arguments.heartbeat_timeout_s, arguments.set)
        print("undisturbed ...", flush=True)
        results[UNDISTURBED] = judged(undisturbed(folder, words), [], window)
        for policy in arguments.policies:
            print(f"{policy} ...", flush=True)
            told = struck(folder, policy, words, at, arguments.patience_s)
            results[policy] = judged(*told, window, results[UNDISTURBED]["losses"])
    if arguments.picture is not None:
        drawing.write_svg(picture(report), arguments.picture)
    return table(report)


def main() -> int:
    """Parse the command line, train and kill, print; returns the exit code."""
    numbers = {
        "steps": (200, 2, "steps of each run"),
        "at": (130, 1, "step after which hosts are killed"),
        "window": (10, 1, "steps of each mean"),
        "heartbeat_timeout_s": (10.0, None, "cluster.heartbeat_timeout_s"),
        "patience_s": (1800.0, None, "seconds after which a run counts as hung"),
    }
    policies = {"nargs": "+", "choices": LOST_STAGE, "default": [*LOST_STAGE]}
    paths = {
        "picture": "draw the losses as an SVG to this file",
        "keep": "keep the files of the runs in this folder",
    }
    return reporting.run(
        "churn.lost_stages",
        __doc__,
        measure,
        numbers=numbers,
        options={"--policies": policies | {"help": "policies (all)"}},
        paths=paths,
        overrides="override one key of the configuration; may be given often",
    )


if __name__ == "__main__":
    sys.exit(main())
