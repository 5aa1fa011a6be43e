"""Does a service over distant hosts give the tokens per second that are predicted?

    python -m experiments.benchmarks.serving.wan --json FILE    (needs root and iproute2)

Hosts are network namespaces of this machine, in regions of the table gcp12. Packets between them
are under way for the latency of that table; rates are as much below the table's as what a token
takes from host to host is smaller here than for Llama 3 8B. `skippipe serve --hosts` serves a model
of the quickstart's shapes, with drawn parameters, one stage on a host; a client at the first host
asks for completions, and all answers have to be those of one device.

In turns, the network first has neither latencies nor rates, and one sequence tells how long a token
takes without them, and each host how long its stage takes: from this, latencies and rates the
seconds of a token are predicted. Then, with them, one sequence is answered, and as many as the
service has slots for; and one by a second service on the same hosts that has one slot, as programs
have that pass one sequence from host to host at a time. Prompts do not count: seconds are those
from token to token while all sequences run. Ratios are medians of the turns.

The part `one_host` needs no network: `skippipe serve` on one host, over HTTP, with one slot and
with many, in turns with a `Generator` in this process, as `generate` has one. All tell the
probabilities of tokens, by which the client counts these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import operator
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from flax import nnx
from jaxtyping import Float
from skippipe_sched.figures.tables import aligned
from skippipe_sched.problem import links
from skippipe_sched.serving.case import ServingCase
from skippipe_sched.serving.simulate import simulate

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import ratio
from experiments.benchmarks.network.delays import Delays
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from experiments.benchmarks.network.wan import PAYLOAD_SHARE, SAME_LOCATION
from experiments.benchmarks.serving.clients import Answer, Asked, Clients, seconds_per_token
from experiments.benchmarks.serving.hosts import Service
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig, parse_config
from skippipe_jax.config.run import CheckpointConfig
from skippipe_jax.config.sampling import DEFAULT_SLOTS, Sampling
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.decoding import Generator
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.local.hosts import free_port
from skippipe_jax.models.llama import create_stage
from skippipe_jax.serving.choices import name_of
from skippipe_jax.storage.checkpoint import CheckpointItems
from skippipe_jax.storage.checkpointer import Checkpointer

WAN, ONE_HOST = PARTS = "wan", "one_host"
TOKEN_BYTES_8B = 4096 * 2
"""Bytes of a token of Llama 3 8B from host to host, in bfloat16."""
PROMPT_TOKENS = 16
PATIENCE_S = 300.0


def save_run(folder: Path, stages: int, layers: int) -> None:
    """Write a run with drawn parameters, as far as a service reads one."""
    sections = {
        "model": {"preset": "tiny", "layers": layers},
        "cluster": {"insecure": True},  # The hosts have the shaped network for themselves.
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    config = parse_config(sections).model
    cut = config.stage_partition(stages)
    alone = Membership(ClusterConfig(), 0, 1)
    with contextlib.closing(
        Checkpointer(folder, alone, stage_layers=cut, config=CheckpointConfig())
    ) as writer:
        states = {}
        for stage in range(stages):
            drawn = nnx.state(create_stage(config, stage, cut, jax.random.key(0)))
            states[stage] = {"parameters": nnx.to_pure_dict(drawn)}
        writer.save(1, CheckpointItems(states), {})


def requests_of(sequences: int, tokens: int) -> list[Asked]:
    """Draw so many prompts, each to be answered by a greedy stream of tokens."""
    drawn = np.random.default_rng(0).integers(97, 123, (sequences, PROMPT_TOKENS)).tolist()
    return [Asked(tuple(prompt), tokens, 0.0, 0, is_stream=True) for prompt in drawn]


class Times(NamedTuple):
    """The times that answers took.

    Attributes:
        token_s: seconds in which each sequence gets a token while all of them run.
        first_token_s: seconds until each has its first one, on average.
    """

    token_s: float
    first_token_s: float


def times_of(answers: Sequence[Answer], model: StagedModel) -> Times:
    """Return how long the answers took.

    Raises:
        RuntimeError: if an answer is not that of one device.
    """
    require_alike(model, answers)
    token_s = seconds_per_token(answers)
    # The first tokens may come together, at the end of a character.
    first = [(own.pieces[0][0] - own.sent_s, own.pieces[0][1]) for own in answers]
    return Times(token_s, statistics.mean(at_s - (count - 1) * token_s for at_s, count in first))


def drawn_alone(
    model: StagedModel, requests: Sequence[DecodeRequest], slots: int
) -> list[list[int]]:
    """Return the tokens that one device draws for each of some requests."""
    generator = Generator(model.decoder(slots, model.context))
    drawn: dict[int, list[int]] = {generator.submit(own): [] for own in requests}
    while generator.is_busy:
        for decoded in generator.step():
            assert decoded.drawn is not None
            drawn[decoded.request].append(decoded.drawn.token)
    return list(drawn.values())


def require_alike(model: StagedModel, answers: Sequence[Answer]) -> None:
    """Refuse answers that are not those of one device.

    Raises:
        RuntimeError: if one is not.
    """
    how = Sampling(temperature=0.0)
    asked = [DecodeRequest(own.asked.prompt, own.asked.new_tokens, how) for own in answers]
    for own, drawn in zip(answers, drawn_alone(model, asked, len(answers)), strict=True):
        expected = [name_of(token, model.tokenizer) for token in drawn]
        if own.names != expected:
            raise RuntimeError(f"the service returns {own.names}, but one device {expected}")


# Over a network.


def distant_links(
    hosts: int, token_bytes: int
) -> tuple[list[str], Float[np.ndarray, "hosts hosts"], Float[np.ndarray, "hosts hosts"]]:
    """Return regions of hosts, latencies [s], and rates of what TCP carries [bytes per second].

    A token takes `token_bytes` from host to host.
    """
    table = links.table("gcp12", SAME_LOCATION)
    names = list(dict.fromkeys(name for pair in table.links for name in pair))
    locations = [names[host % len(names)] for host in range(hosts)]
    latencies, bandwidths = table.matrices(locations)
    return locations, latencies, bandwidths * (token_bytes / TOKEN_BYTES_8B)


def measured_over_hosts(
    folder: Path, hosts: int, sequences: int, tokens: int, turns: int
) -> dict[str, Any]:
    """Serve over hosts, with and without their distance; return what was predicted and measured."""
    run = folder / "over_hosts"
    save_run(run, hosts, hosts)
    model = open_source(run).model()
    locations, latencies, rates = distant_links(hosts, 4 * model.config.width)
    asked = requests_of(sequences, tokens)
    found = []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(ShapedNetwork(np.full_like(rates, np.inf)))
        delays = stack.enter_context(Delays(network))
        services = [
            Service(folder, run, hosts, "--max-num-seqs", str(slots), network=network)
            for slots in (sequences, 1)
        ]
        for service in services:
            stack.enter_context(contextlib.closing(service))
            service.start_host(0)
        # The planner places stages by the links, which are measured when hosts connect. The two
        # services measure one after the other, as they share the links.
        _shape(network, delays, rates / PAYLOAD_SHARE, latencies)
        # Of the link to a host, None before it is measured.
        speed_of = operator.itemgetter("bytes_per_s")
        speeds = []
        for service in services:
            for host in range(1, hosts):
                service.start_host(host)
                wait(service, lambda own, count=host: len(own) > count, f"host {host} did not join")
            wait(service, lambda own: None not in map(speed_of, own[1:]), "a link is not measured")
            speeds = [*map(speed_of, service.status()[1:])]
        many, one = services

        def measured(service: Service, count: int) -> Times:
            clients = Clients("127.0.0.1", service.port, PATIENCE_S)
            return times_of(network.call(0, lambda: clients.ask(asked[:count])), model)

        for turn in range(turns + 1):
            _shape(network, delays, np.full_like(rates, np.inf), np.zeros_like(latencies))
            near_s = measured(many, 1).token_s
            status = many.status()
            if turn == 0:  # In a first turn hosts connect, and some things are compiled.
                measured(one, 1)
                continue
            _shape(network, delays, rates / PAYLOAD_SHARE, latencies)
            row = predicted(status, near_s, latencies, rates, sequences, model.config.width)
            row["far_s"], row["first_token_s"] = measured(many, 1)
            row["far_together_s"] = measured(many, sequences).token_s
            row["far_one_slot_s"] = measured(one, 1).token_s
            found.append(row)
            print(_turn_line(row, sequences), file=sys.stderr, flush=True)
    bandwidths = [speed / rate for speed, rate in zip(speeds, rates[0, 1:], strict=True)]
    return figures_of(locations, found, sequences) | {"bandwidths_to_shaped": bandwidths}


def wait(service: Service, holds: Callable[[list[dict[str, Any]]], bool], otherwise: str) -> None:
    """Wait until something holds of what the front says of the hosts."""
    asyncio.run(service.until(lambda: holds(service.status()), otherwise))


def _shape(
    network: ShapedNetwork,
    delays: Delays,
    rates: Float[np.ndarray, "hosts hosts"],
    latencies: Float[np.ndarray, "hosts hosts"],
) -> None:
    for source, target in itertools.permutations(range(len(rates)), 2):
        network.set_rate(source, target, rates[source, target])
    delays.set(latencies)


def route_of(status: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return for each stage the host that has it, where each has one."""
    return tuple(own["host"] for own in sorted(status, key=lambda own: own["stages"]))


def predicted(
    status: Sequence[Mapping[str, Any]],
    near_s: float,
    latencies: Float[np.ndarray, "hosts hosts"],
    rates: Float[np.ndarray, "hosts hosts"],
    sequences: int,
    width: int,
) -> dict[str, Any]:
    """Predict the seconds of a token [s] of one sequence, and of many at once, by the planner.

    What a token takes without a network, beyond the seconds that hosts tell of their stages, counts
    as the first host's.
    """
    hosts = len(rates)
    route = route_of(status)
    groups = min(hosts, sequences)
    slots = -(-sequences // groups)
    # A stage has one block. Hosts have come one after another, so their numbers are the network's.
    host_s = {own["host"]: own["seconds_per_block"] for own in status[1:]}
    step_s = np.array([near_s - sum(host_s.values()), *(host_s[host] for host in range(1, hosts))])
    case = ServingCase(
        step_s=np.tile(step_s[:, None], (1, hosts)),
        room_bytes=np.ones(hosts),
        stage_bytes=np.ones(hosts),
        latency_s=latencies,
        bandwidth=rates,
        activation_bytes=4.0 * slots * (width + 1),  # With a position of each.
        groups=groups,
        slots=slots,
    )
    found = simulate(case, [route] * groups)
    return {
        "near_s": near_s,
        "route": list(route),
        "step_s": step_s.tolist(),
        "hops_s": [float(case.hop_s[pair]) for pair in pairwise((*route, 0))],
        "predicted_s": found.seconds_per_token,
        # In a step of all groups each sequence gets a token, also where slots are empty.
        "predicted_together_s": groups * slots / found.tokens_per_s,
    }


def _turn_line(row: Mapping[str, Any], sequences: int) -> str:
    return (
        f"a token takes {row['near_s']:.4f} s without latency; with it {row['far_s']:.3f} s "
        f"({row['predicted_s']:.3f} predicted), {row['far_together_s']:.3f} s "
        f"({row['predicted_together_s']:.3f}) with {sequences} sequences, and "
        f"{row['far_one_slot_s']:.3f} s with one slot"
    )


def figures_of(
    locations: Sequence[str], turns: Sequence[Mapping[str, Any]], sequences: int
) -> dict[str, Any]:
    """Sum up turns: medians, and medians of ratios turn by turn."""

    def each(name: str) -> list[float]:
        return [own[name] for own in turns]

    return {
        "locations": list(locations),
        "sequences": sequences,
        "seconds_per_token": statistics.median(each("far_s")),
        "seconds_until_first_token": statistics.median(each("first_token_s")),
        "seconds_per_token_to_predicted": ratio(each("far_s"), each("predicted_s")),
        "tokens_per_second": {
            "1": 1 / statistics.median(each("far_s")),
            str(sequences): sequences / statistics.median(each("far_together_s")),
            "one slot": 1 / statistics.median(each("far_one_slot_s")),
        },
        # Of rates, so that more is better here.
        "tokens_per_second_to_predicted": ratio(
            each("predicted_together_s"), each("far_together_s")
        ),
        "times_as_many_as_one_slot": sequences
        * ratio(each("far_one_slot_s"), each("far_together_s")),
        "turns": list(turns),
    }


# On one host.


def measured_on_one_host(folder: Path, sequences: int, tokens: int, turns: int) -> dict[str, Any]:
    """Serve on one host, with one slot and with many, in turns with `generate`."""
    run = folder / "one_host"
    save_run(run, 4, 4)
    model = open_source(run).model()
    asked = requests_of(sequences, tokens)
    found = []
    with contextlib.ExitStack() as stack:
        ports = {slots: stack.enter_context(_served(run, slots)) for slots in (1, sequences)}

        def measured(slots: int, count: int) -> float:
            clients = Clients("127.0.0.1", ports[slots], PATIENCE_S)
            return times_of(clients.ask(asked[:count]), model).token_s

        for turn in range(turns + 1):
            row = {
                "generate_s": generated_s(model, asked[0]),
                "one_slot_s": measured(1, 1),
                "many_slots_s": measured(sequences, 1),
                "together_s": measured(sequences, sequences),
            }
            if turn > 0:  # The first compiles.
                found.append(row)
    each = {name: [own[name] for own in found] for name in found[0]}
    return {
        "sequences": sequences,
        "seconds_per_token": {name: statistics.median(own) for name, own in each.items()},
        "one_slot_to_generate": ratio(each["one_slot_s"], each["generate_s"]),
        "many_slots_to_generate": ratio(each["many_slots_s"], each["generate_s"]),
        "times_as_many_as_generate": sequences * ratio(each["generate_s"], each["together_s"]),
        "times_as_many_together": sequences * ratio(each["many_slots_s"], each["together_s"]),
        "times_as_many_as_one_slot": sequences * ratio(each["one_slot_s"], each["together_s"]),
        "turns": found,
    }


def generated_s(model: StagedModel, asked: Asked) -> float:
    """Return the seconds of a token that is drawn in this process, after the first one [s]."""
    generator = Generator(model.decoder(1, model.context))
    how = Sampling(temperature=0.0)
    generator.submit(DecodeRequest(asked.prompt, asked.new_tokens, how, likeliest=0))
    generator.step()
    began_s = time.perf_counter()
    while generator.is_busy:
        generator.step()
    return (time.perf_counter() - began_s) / (asked.new_tokens - 1)


@contextlib.contextmanager
def _served(run: Path, slots: int) -> Iterator[int]:
    """Serve on this host; yield the port."""
    port = free_port()
    command = [sys.executable, "-m", "skippipe_jax", "serve", "--run", str(run)]
    given = ["--max-num-seqs", str(slots), "--port", str(port)]
    with subprocess.Popen([*command, *given], stderr=subprocess.DEVNULL) as process:
        try:
            _await(port, process)
            yield port
        finally:
            process.terminate()


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a service takes connections; it answers them once it is ready.

    Raises:
        RuntimeError: if it ends instead.
    """
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise RuntimeError(f"the service exited with code {process.returncode}") from None
            time.sleep(0.1)
        else:
            return


def table(report: Mapping[str, Any]) -> str:
    """Write a line for each figure."""
    rows = [["", "measured", "to predicted"]]
    if WAN in report:
        own = report[WAN]
        count, rates, second = own["sequences"], own["tokens_per_second"], "tokens per second"
        first = f"seconds until the first token, {PROMPT_TOKENS} of prompt"
        times = own["times_as_many_as_one_slot"]
        of_hosts = {
            "seconds per token, one sequence": (
                f"{own['seconds_per_token']:.3f}",
                f"{own['seconds_per_token_to_predicted']:.3f}",
            ),
            first: (f"{own['seconds_until_first_token']:.3f}", "-"),
            f"{second}, one sequence": (f"{rates['1']:.2f}", "-"),
            f"{second}, {count} sequences": (
                f"{rates[str(count)]:.2f}",
                f"{own['tokens_per_second_to_predicted']:.3f}",
            ),
            f"{second}, a service with one slot": (f"{rates['one slot']:.2f}", "-"),
            f"{count} sequences, times as many as with one slot": (f"{times:.2f}", "-"),
        }
        rows += [[f"over hosts: {what}", *figures] for what, figures in of_hosts.items()]
    if ONE_HOST in report:
        own = report[ONE_HOST]
        count = own["sequences"]
        times = {
            "seconds per token, one slot, to generate": "one_slot_to_generate",
            f"seconds per token, one of {count} slots, to generate": "many_slots_to_generate",
            f"{count} sequences, times as many tokens as generate": "times_as_many_as_generate",
            f"{count} sequences, times as many tokens as one": "times_as_many_together",
            f"{count} sequences, times as many as with one slot": "times_as_many_as_one_slot",
        }
        rows += [[f"one host: {what}", f"{own[name]:.2f}", "-"] for what, name in times.items()]
    return aligned(rows, [0])


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Measure the parts that are asked for."""
    given = arguments.sequences, arguments.tokens, arguments.turns
    report["tokens"] = arguments.tokens
    with tempfile.TemporaryDirectory(prefix="serve-wan-") as name:
        if WAN in arguments.parts:
            report[WAN] = measured_over_hosts(Path(name), arguments.hosts, *given)
        if ONE_HOST in arguments.parts:
            report[ONE_HOST] = measured_on_one_host(Path(name), *given)
    return table(report)


def main() -> int:
    """Parse the command line, measure and report; returns the exit code."""
    numbers = {
        "hosts": (6, 2, "number of hosts, including the first"),
        "sequences": (DEFAULT_SLOTS, 1, "sequences"),
        "tokens": (32, 8, "tokens of an answer"),
        "turns": (3, 1, "counted turns"),
    }
    options = {"--parts": {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "(all)"}}
    return reporting.run("serving.wan", __doc__, measure, numbers=numbers, options=options)


if __name__ == "__main__":
    sys.exit(main())
