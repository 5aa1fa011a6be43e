"""Measure what clients see when hosts of a service die, up to half of all, and come back.

    python -m experiments.benchmarks.serving.churn --run runs/quickstart --json FILE

`skippipe serve` runs over --hosts processes: the front with the data stage, and hosts that hold the
other stages. Every second of them has no weights and gets them from the front. --requests clients
ask at random times: some answers are streamed, some clients close their connection in the middle,
some ask for fewer stages. In a second phase all hosts of the stage with the fewest are killed by
SIGKILL, one after another, each in the middle of a stream; in a third those of another stage; in a
fourth all are started again; in the first and the fifth nothing happens. After a phase held-out
perplexity is computed through the service, as `evaluate --url` does, and along the same stages
without a service. Greedy answers whose stages are those asked for, of all phases, are compared with
those of one device. With --control perplexities of another run along the same stages stand beside,
without a service. --small first trains a tiny model for a few steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from skippipe_sched.errors import InputError
from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.churn.records import (
    MEMORY_MORE_BYTES,
    MEMORY_SHARE,
    MORE_OPEN,
    open_in,
)
from experiments.benchmarks.harness import launching, reporting
from experiments.benchmarks.harness.launching import QUICKSTART, set_words
from experiments.benchmarks.serving.clients import (
    CANCELLED,
    FAILED,
    Answer,
    Clients,
    Requests,
    longest_pause_s,
    pauses_at,
)
from experiments.benchmarks.serving.hosts import Service
from experiments.benchmarks.serving.wan import drawn_alone
from experiments.paper import drawing
from experiments.paper.drawing import BLUE, GREEN, ORANGE, VERMILION
from skippipe_jax.config import DataConfig
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.batches import load_corpora
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.evaluation import evaluate, losses_by_order
from skippipe_jax.inference.model_source import load_model, open_source
from skippipe_jax.inference.partial import StageOrder, full, kept
from skippipe_jax.inference.remote_model import RemoteModel, with_large_batches
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.serving.choices import name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL, FIRST_LOST, SECOND_LOST, BACK, AGAIN = PHASES = (
    "all stages",
    "a stage is lost",
    "another is lost",
    "hosts come back",
    "all stages again",
)
SMALL = (
    "model.width=32", "model.heads=4", "model.ffn_width=48", "model.context=64",
    "data.sequence_length=64", "train.steps=4", "checkpoint.every=4",
)  # fmt: skip
MOST_APART = 0.01
"""By which share the perplexity of the service may differ from that without one."""
ROUNDING = 1e-4
"""Two logits nearer to each other than this may come out either way."""
MORE_THREADS = 16
"""Threads that the front may gain: the pools of event loops and of TensorStore fill up slowly."""
SLOTS = 8
HERE = "127.0.0.1"


class Struck:
    """A service that is struck while clients ask, and what is known of it so far.

    Attributes:
        faults: the hosts that were killed, and when.
        back: those that serve again, and since when.
        front: what the front has open after each phase.
    """

    def __init__(self, service: Service, clients: Clients, requests: Requests, pause_s: float):
        """Let requests come `pause_s` apart on average."""
        self.service, self.clients, self._requests = service, clients, requests
        self._pause_s = pause_s
        self.faults: list[dict[str, Any]] = []
        self.back: list[dict[str, Any]] = []
        self.front: dict[str, dict[str, int]] = {}
        self._spans: list[tuple[float, float]] = []

    def calm(self, phase: str, count: int) -> None:
        """Send requests while nothing happens, and wait for the answers."""
        self._while_asking(phase, count, self._nothing)

    def strike(self, phase: str, count: int, stage: int) -> None:
        """Kill all hosts of a stage one after another, each in the middle of a stream."""
        victims = [host for host, own in self.service.holding().items() if stage in own]

        async def strikes() -> None:
            for host in victims:
                answer, task = self.clients.send(self._requests.long_stream(), phase)
                await answer.has_begun.wait()
                stages = self.service.holding()[host]
                at_s = self.service.kill(host)
                missed_s = await self._until(host, is_there=False)
                told = {"host": host, "stages": stages, "at_s": at_s}
                self.faults.append(told | {"missed_s": round(missed_s - at_s, 4)})
                await task

        self._while_asking(phase, count - len(victims), strikes)

    def start_again(self, phase: str, count: int) -> None:
        """Start the hosts that were killed, and send requests until they serve, and so many."""

        async def come_back(host: int) -> None:
            self.service.start_host(host, has_weights=host % 2 == 0)
            at_s = await self._until(host, is_there=True)
            self.back.append({"host": host, "stages": self.service.holding()[host], "at_s": at_s})

        async def starts() -> None:
            await asyncio.gather(*(come_back(fault["host"]) for fault in self.faults))

        self._while_asking(phase, count, starts)

    def shown_s(self, at_s: float) -> float:
        """Return a moment in seconds since the first request, without those between phases."""
        return sum(min(max(at_s, first), last) - first for first, last in self._spans)

    async def _nothing(self) -> None:
        pass

    async def _until(self, host: int, *, is_there: bool) -> float:
        told = f"host {host} is not back" if is_there else f"host {host} is not declared failed"
        holding = self.service.holding
        return await self.service.until(lambda: (host in holding()) == is_there, told)

    def _while_asking(
        self, phase: str, count: int, happens: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Send at least so many requests, and more until `happens` is over; wait for all."""

        async def send() -> None:
            happening = asyncio.create_task(happens())
            tasks: list[asyncio.Task[None]] = []
            while len(tasks) < count or not happening.done():
                await asyncio.sleep(self._requests.pause_s(self._pause_s))
                tasks.append(self.clients.send(self._requests.drawn(), phase)[1])
            await asyncio.gather(happening, *tasks)

        began_s = time.monotonic()
        asyncio.run(send())
        self._spans.append((began_s, time.monotonic()))
        self.front[phase] = open_in(self.service.front)


class Levels:
    """Held-out perplexity with the stages that are left, through a service and without one."""

    def __init__(
        self, model: StagedModel, control: StagedModel | None, data: DataConfig, sequences: int
    ):
        """Evaluate so many held-out sequences."""
        self._models = {"without_service": model} | (
            {} if control is None else {"control": control}
        )
        self._data, self._sequences = with_large_batches(data), sequences
        self._known: dict[tuple[str, StageOrder], float] = {}
        self.found: list[dict[str, Any]] = []

    def measure(self, phase: str, url: str) -> None:
        """Evaluate through the service at an address, and along the same stages without it."""
        served = RemoteModel(url, self._data)
        own = evaluate(served, None, self._data, self._sequences, ()).perplexity
        [stages] = {used for _, used in served.used}
        level = {"after": phase, "stages": stages, "perplexity": own}
        level["apart"] = abs(own / self._alone("without_service", stages) - 1)
        # All subsets of as many stages: which of them are lost is chance.
        share = len(stages) / served.stages
        ways = [way.stages for way in kept(served.stages, share, sys.maxsize, 0).variants]
        for name in self._models:
            level[name] = self._alone(name, stages)
            level[f"{name}_mean_of_subsets"] = fmean(self._alone(name, way) for way in ways)
        self.found.append(level)

    def _alone(self, name: str, stages: StageOrder) -> float:
        if (name, stages) not in self._known:
            given = self._models[name], [stages], self._data, self._sequences
            self._known[name, stages] = math.exp(losses_by_order(*given)[0][stages])
        return self._known[name, stages]


def compared(model: StagedModel, answers: Sequence[Answer]) -> dict[str, Any]:
    """Compare greedy answers with those of one device along the stages that were asked for.

    Those are left out during which stages came or went, for the service says that it did not use
    all that was asked for.
    """
    own = [
        answer
        for answer in answers
        if answer.asked.temperature == 0
        and answer.stages == (answer.asked.keep or full(model.stages))
    ]
    how = Sampling(temperature=0.0)
    asked = [
        DecodeRequest(answer.asked.prompt, answer.asked.new_tokens, how, stages=answer.stages)
        for answer in own
    ]
    counts, different = Counter[str](), []
    for answer, drawn in zip(own, drawn_alone(model, asked, SLOTS), strict=True):
        expected = [name_of(token, model.tokenizer) for token in drawn]
        if answer.names == expected:
            counts["equal"] += 1
        elif _is_near(model, answer, expected, drawn):
            counts["within_rounding"] += 1
        else:
            different.append({"phase": answer.phase, "got": answer.names, "expected": expected})
    phases = Counter(answer.phase for answer in own)
    return {"compared": len(own), **counts, "of_phases": dict(phases), "different": different}


def _is_near(
    model: StagedModel, answer: Answer, expected: Sequence[str], drawn: Sequence[int]
) -> bool:
    """Tell whether the best two logits are as good as equal where an answer first differs."""
    both = zip(answer.names, expected, strict=False)
    place = next((place for place, (one, other) in enumerate(both) if one != other), None)
    if place is None:
        return False
    tokens = np.array([[*answer.asked.prompt, *drawn[:place]]], np.int32)
    best = np.sort(np.asarray(model.logits(tokens, answer.stages))[0, -1])[-2:]
    return float(best[1] - best[0]) < ROUNDING


def counted(answers: Sequence[Answer]) -> dict[str, int]:
    """Count requests by what became of them, and of which kinds they were."""
    kinds = {
        "streamed": sum(answer.asked.is_stream for answer in answers),
        "greedy": sum(answer.asked.temperature == 0 for answer in answers),
        "fewer_stages": sum(answer.asked.keep is not None for answer in answers),
        "tokens": sum(len(answer.names) for answer in answers),
        "refused_and_sent_again": sum(answer.busy for answer in answers),
    }
    outcomes = Counter(answer.outcome for answer in answers)
    return {"sent": len(answers), **outcomes, **kinds}


def wrong_in(report: Mapping[str, Any], answers: Sequence[Answer]) -> list[str]:
    """Return what is not as it must be, a sentence each."""
    found = [f"a request failed: {own.why}" for own in answers if own.outcome == FAILED]
    cut_short = [
        own for own in answers
        if own.outcome != CANCELLED and len(own.names) != own.asked.new_tokens
    ]  # fmt: skip
    found += [f"received {len(own.names)} of {own.asked.new_tokens} tokens" for own in cut_short]
    found += [f"different greedy answer: {own}" for own in report["greedy"]["different"]]
    for level in report["levels"]:
        if level["apart"] > MOST_APART:
            found.append(f"perplexity {level['perplexity']}, not {level['without_service']}")
    before, after = report["front"][ALL], report["front"][AGAIN]
    most = {
        "descriptors": before["descriptors"] + MORE_OPEN,
        "threads": before["threads"] + MORE_THREADS,
        "resident_bytes": int(MEMORY_SHARE * before["resident_bytes"] + MEMORY_MORE_BYTES),
    }
    for key, value in most.items():
        if after[key] > value:
            found.append(f"{key} of the front have grown to {after[key]}, above {value}")
    return found


def tokens_each_second(struck: Struck) -> list[int]:
    """Count the tokens that clients got in each second, those of evaluation left out."""
    counts = Counter[int]()
    for answer in struck.clients.answers:
        for at_s, tokens in answer.pieces:
            counts[int(struck.shown_s(at_s))] += tokens
    return [counts[second] for second in range(max(counts, default=-1) + 1)]


def table(report: Mapping[str, Any]) -> str:
    """Write the report for a reader: perplexities, hosts that go and come, what the front has."""
    levels = report["levels"]
    kinds = ["perplexity", "without_service", *(["control"] if "control" in levels[0] else [])]
    rows = [["after", "stages"]]
    for kind in kinds:
        rows[0] += [kind.replace("_", " "), "of full"]
    for level in levels:
        rows.append([level["after"], " ".join(map(str, level["stages"]))])
        for kind in kinds:
            rows[-1] += [f"{level[kind]:.3f}", f"{level[kind] / levels[0][kind]:.3f}"]
    columns = {
        "detected, s": "missed_s",
        "next token, s": "next_token_s",
        "all continue, s": "all_go_on_s",
        "longest pause, s": "longest_pause_s",
    }
    events = [["host", "", "stages", "streams", *columns]]
    for what, key in (("killed", "faults"), ("back", "back")):
        for one in report[key]:
            row = [str(one["host"]), what, " ".join(map(str, one["stages"])), str(one["streams"])]
            events.append(row + [reporting.figure(one.get(own), ".2f") for own in columns.values()])
    front = [["front, after", *report["front"][ALL]]]
    front += [[when, *map(str, own.values())] for when, own in report["front"].items()]
    requests, greedy = report["requests"], report["greedy"]
    told = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in requests.items())
    return "\n".join(
        [
            aligned(rows, (0, 1)),
            aligned(events, (0, 1, 2)),
            f"longest pause without faults: {report['calm_longest_pause_s']:.2f} s",
            f"requests: {told}",
            f"greedy answers: {greedy['compared']} compared, {greedy.get('equal', 0)} equal to one "
            f"device's, {greedy.get('within_rounding', 0)} within rounding",
            aligned(front),
            *(f"WRONG: {own}" for own in report["failures"]),
        ]
    )


def picture(report: Mapping[str, Any]) -> Figure:
    """Draw tokens per second beside the hosts that come and go, and perplexities."""
    figure, [[tokens], [perplexities]] = drawing.panels(1, 2.6, 2.6)
    requests, levels = report["requests"], report["levels"]
    tokens.stairs(report["tokens_each_second"], color=BLUE)
    for key, color in (("faults", VERMILION), ("back", GREEN)):
        for own in report[key]:
            tokens.axvline(own["at_s"], color=color, linestyle="--", linewidth=1.0)
    tokens.set_title(
        f"{len(report['faults'])} of {report['hosts']} hosts killed (red), and back (green); "
        f"{requests['sent']} requests, {requests.get('failed', 0)} failed"
    )
    tokens.set_ylabel("tokens per second")
    tokens.set_xlabel("seconds, without those of evaluation")
    kinds = {"perplexity": ("the service", BLUE), "control": ("the control", ORANGE)}
    kinds = {key: own for key, own in kinds.items() if key in levels[0]}
    for number, (key, (label, color)) in enumerate(kinds.items()):
        values = [level[key] for level in levels]
        aside = 0.36 * (number - (len(kinds) - 1) / 2)
        places = [place + aside for place in range(len(levels))]
        bars = perplexities.bar(places, values, 0.34, color=color, label=label)
        perplexities.bar_label(bars, [f"{value / values[0] - 1:+.0%}" for value in values])
    names = [f"stages {' '.join(map(str, level['stages']))}" for level in levels]
    perplexities.set_xticks(range(len(levels)), names)
    perplexities.set_title("Held-out perplexity; above the bars: beside all stages")
    perplexities.margins(y=0.15)
    perplexities.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def struck_service(struck: Struck, levels: Levels, stages: int, per_phase: int) -> None:
    """Let all phases pass."""
    service = struck.service
    url = f"http://{HERE}:{service.port}/v1"
    struck.calm(ALL, per_phase)
    levels.measure(ALL, url)
    holders = Counter(stage for held in service.holding().values() for stage in held)
    first, second = sorted(range(1, stages), key=lambda stage: (holders[stage], stage))[:2]
    struck.strike(FIRST_LOST, per_phase, first)
    levels.measure(FIRST_LOST, url)
    struck.strike(SECOND_LOST, per_phase, second)
    levels.measure(SECOND_LOST, url)
    struck.start_again(BACK, per_phase)
    struck.calm(AGAIN, per_phase)
    levels.measure(AGAIN, url)


def started(folder: Path, run: Path, hosts: int, silent_s: float, patience_s: float) -> Service:
    """Start a service, every other host of which has no weights, and wait until it serves.

    A host counts as lost after `silent_s` without a word.
    """
    timeout = "--set", f"cluster.heartbeat_timeout_s={silent_s}"
    service = Service(folder, run, hosts, *timeout, patience_s=patience_s)
    for host in range(hosts):
        service.start_host(host, has_weights=host % 2 == 0)
    asyncio.run(service.until(service.is_serving, "the service has not started"))
    return service


def small_run(folder: Path) -> Path:
    """Train the quickstart's plan with a tiny model for a few steps, and return its run folder."""
    words = ["-m", "skippipe_jax.train", "--config", str(QUICKSTART), *set_words(*SMALL)]
    words += set_words(f"run_dir={folder / 'run'}", f"compilation_cache={folder / 'compiled'}")
    launching.run_alone(words, folder / "training.txt")
    return folder / "run"


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Serve, strike, and compare.

    Raises:
        InputError: if there is no run to serve, or one of too few stages.
    """
    hosts = arguments.hosts
    if arguments.small == (arguments.run is not None):
        problem = "either this or --small is needed"
        raise InputError("--run", arguments.run, problem, "Choose one of the two")
    with reporting.folder_for(arguments.keep, "serve_churn") as folder:
        run = small_run(folder) if arguments.small else arguments.run.resolve()
        source = open_source(run)
        model, data = source.model(), source.config.data
        if model.stages < 3:
            problem = f"has {model.stages} stages, but two stages without the front's are lost"
            raise InputError("--run", str(run), problem, "Choose a run of three or more stages")
        control = None if arguments.control is None else load_model(arguments.control)
        text = load_corpora(data)[0].held_out.tokens
        drawn = Requests(text, model.tokenizer.begin, model.stages, model.context, arguments.seed)
        levels = Levels(model, control, data, arguments.sequences)
        with contextlib.closing(
            started(folder, run, hosts, arguments.heartbeat_timeout_s, arguments.patience_s)
        ) as service:
            clients = Clients(HERE, service.port, arguments.patience_s)
            struck = Struck(service, clients, drawn, arguments.pause_s)
            report |= {"step": source.step, "hosts": hosts, "stages": model.stages}
            report["held"] = {str(host): own for host, own in sorted(service.holding().items())}
            struck_service(struck, levels, model.stages, -(-arguments.requests // len(PHASES)))
            service.end()
        report |= {"levels": levels.found, "front": struck.front} | _told(struck, model)
        report["failures"] = wrong_in(report, clients.answers)
    if arguments.picture is not None:
        drawing.write_svg(picture(report), arguments.picture)
    return table(report)


def _told(struck: Struck, model: StagedModel) -> dict[str, Any]:
    """Return what the answers of all clients say."""
    answers = struck.clients.answers

    def seen(event: dict[str, Any]) -> dict[str, Any]:
        shown = {"at_s": round(struck.shown_s(event["at_s"]), 3)}
        return event | pauses_at(answers, event["at_s"]) | shown

    return {
        "requests": counted(answers),
        "greedy": compared(model, answers),
        "faults": [seen(fault) for fault in struck.faults],
        "back": [seen(own) for own in struck.back],
        "calm_longest_pause_s": longest_pause_s(
            [answer for answer in answers if answer.phase in (ALL, AGAIN)]
        ),
        "tokens_each_second": tokens_each_second(struck),
    }


def main() -> int:
    """Parse the command line, serve and kill, print; returns the exit code."""
    numbers = {
        "hosts": (9, 2, "number of hosts, including the front"),
        "requests": (200, 1, "minimum number of requests in all phases"),
        "pause_s": (0.25, 0.0, "mean seconds between two requests"),
        "sequences": (64, 1, "sequences to evaluate"),
        "seed": (0, None, "seed of the requests"),
        "heartbeat_timeout_s": (5.0, None, "cluster.heartbeat_timeout_s"),
        "patience_s": (300.0, None, "seconds after which an answer counts as failed"),
    }
    small = {"action": "store_true", "help": "train a tiny run of a few steps"}
    paths = {
        "run": "folder of the run to serve",
        "control": "run of the same stages, trained with full paths",
        "picture": "draw the results as an SVG to this file",
        "keep": "keep the output of the hosts in this folder",
    }
    return reporting.run(
        "serving.churn", __doc__, measure, numbers=numbers, options={"--small": small}, paths=paths
    )


if __name__ == "__main__":
    sys.exit(main())
