"""A model whose stages are on several hosts says what it says on one, whoever comes and goes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from skippipe_sched.errors import TemporaryError
from skippipe_sched.problem.plan import DATA_STAGE

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.keys import Keys, Secret
from skippipe_jax.connections.links import open_link
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.decoding import Generator, Step
from skippipe_jax.inference.model_source import ModelSource, open_source
from skippipe_jax.inference.scaling import Scaling
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.serving import stage_host
from skippipe_jax.serving.errors import Unavailable
from skippipe_jax.serving.hosts import LossRules, StageHosts
from skippipe_jax.serving.local_stages import LocalStages, Slots
from skippipe_jax.serving.routed import RoutedExecutor
from skippipe_jax.serving.routing import FAIL, WAIT
from skippipe_jax.serving.stage_host import PROTOCOL, STAGE_HOST, HostHello
from tests.commands.conftest import command as command  # a fixture
from tests.commands.examples import Command
from tests.harness.partial_models import save_run
from tests.serving.scripted_engine import PATIENCE_S, eventually
from tests.serving.stage_hosts import SILENT_S, Service, service

SECTIONS: dict[str, Any] = {
    "model": {
        "width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_width": 24, "context": 64,
    },
    "data": {"sequence_length": 32},
}  # fmt: skip
GREEDY = Sampling(temperature=0.0)
PROMPT = [256, *b"some words"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("hosts") / "run"
    save_run(folder, SECTIONS, 4)
    return open_source(folder)


@pytest.fixture(scope="module")
def model(source: ModelSource) -> StagedModel:
    return source.model()


def drawn_by(
    generator: Generator,
    requests: Sequence[DecodeRequest],
    after: Mapping[int, Callable[[], object]] = MappingProxyType({}),
) -> tuple[list[list[int]], list[tuple[int, ...] | None]]:
    """The tokens of requests and the stages they used; `after` has what happens after steps."""
    numbers = [generator.submit(request) for request in requests]
    tokens: dict[int, list[int]] = defaultdict(list)
    stages: dict[int, tuple[int, ...] | None] = {}
    for step in itertools.count():
        if not generator.is_busy:
            return [tokens[number] for number in numbers], [stages[number] for number in numbers]
        for own in generator.step():
            assert own.drawn is not None
            tokens[own.request].append(own.drawn.token)
            stages[own.request] = own.stages
        after.get(step, lambda: None)()
    raise AssertionError


def greedy(model: StagedModel, prompt: list[int], count: int, order: Sequence[int]) -> list[int]:
    return model.generate(prompt, count, order, GREEDY)


Continued = tuple[list[int], tuple[int, ...] | None]
"""Tokens that follow the prompt, and the stages that have run for all of them."""


def continued(
    own: Service, count: int, after: Mapping[int, Callable[[], object]] = MappingProxyType({})
) -> Continued:
    """How a service continues the prompt."""
    [tokens], [stages] = drawn_by(own.generator(), [DecodeRequest(PROMPT, count, GREEDY)], after)
    return tokens, stages


def alone(model: StagedModel, count: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> Continued:
    """How the model continues the prompt by these stages on one device."""
    return greedy(model, PROMPT, count, order), order


@pytest.mark.parametrize(
    ("count", "has_weights"),
    [
        pytest.param(1, True, marks=pytest.mark.nightly),
        (2, True),
        (3, False),
        pytest.param(5, True, marks=pytest.mark.nightly),
    ],
)
def test_sequences_are_those_of_one_device(
    count: int, has_weights: bool, source: ModelSource, model: StagedModel
):
    orders = [None, (0, 1, 3), (0,)]
    asked = [
        ([256, *text.encode()], order, Sampling(temperature, 0.9, seed))
        for seed, text in enumerate(("a", "four words of text", "x" * 40))
        for order in orders
        for temperature in (0.0, 0.8)
    ]
    expected = [model.generate(prompt, 15, order, how) for prompt, order, how in asked]
    requests = [DecodeRequest(prompt, 15, how, stages=order) for prompt, order, how in asked]
    with service(source, count, slots=Slots(2, 2, 64), has_weights=has_weights) as own:

        def decode(group: int) -> Any:
            return drawn_by(own.generator(group), requests[group::2])

        with ThreadPoolExecutor(2) as threads:
            found = [*threads.map(decode, range(2))]
    for group, (tokens, stages) in enumerate(found):
        ends = [own.index(257) if 257 in own else len(own) for own in tokens]
        assert [own[:end] for own, end in zip(tokens, ends, strict=True)] == expected[group::2]
        assert stages == [order or (0, 1, 2, 3) for _, order, _ in asked[group::2]]


def test_a_sequence_goes_on_over_another_replica(source: ModelSource, model: StagedModel):
    with service(source, 6) as own:
        requests = [DecodeRequest(PROMPT, 25, GREEDY), DecodeRequest(PROMPT[:4], 30, GREEDY)]
        kills = {3: lambda: own.in_use(2).kill(), 9: lambda: own.in_use(1).kill()}
        tokens, stages = drawn_by(own.generator(), requests, kills)
    assert tokens == [greedy(model, PROMPT, 25, range(4)), greedy(model, PROMPT[:4], 30, range(4))]
    assert stages == [(0, 1, 2, 3)] * 2


def scaling_by(model: StagedModel) -> Scaling:
    """Scales that differ from stage to stage, and with how many of them run."""
    return Scaling("share", model.cut, (1.0, 0.2, 0.5, 0.4))


@pytest.mark.parametrize("hosts", [0, 2])
def test_branches_are_scaled_by_how_many_stages_run(
    hosts: int, source: ModelSource, model: StagedModel
):
    scaling = scaling_by(model)
    orders = [(0, 1, 2, 3), (0, 2), (0, 1, 3), (0,), (0, 3)]
    requests = [DecodeRequest(PROMPT, 12, GREEDY, stages=order) for order in orders]
    if hosts == 0:
        tokens, _ = drawn_by(Generator(model.decoder(3, 64, scaling.table())), requests)
    else:
        slots = Slots(1, 3, 64)
        with service(source, hosts, slots=slots, scales=scaling.table()) as own:
            tokens, _ = drawn_by(own.generator(), requests)
    expected = [
        greedy(model.scaled(scaling.scales(len(order))), PROMPT, 12, order) for order in orders
    ]
    assert tokens == expected
    assert expected != [greedy(model, PROMPT, 12, order) for order in orders]


def test_without_a_lost_stage_the_others_are_scaled_anew(source: ModelSource, model: StagedModel):
    scaling = scaling_by(model)
    with service(source, 3, scales=scaling.table()) as own:
        tokens, stages = continued(own, 20, {4: lambda: own.lose(2)})
    assert stages == (0, 1, 3)
    assert tokens[:5] == greedy(model.scaled(scaling.scales(4)), PROMPT, 5, range(4))
    # All that has been said so far runs anew, and the sequence goes on by the scales of three.
    behind = greedy(model.scaled(scaling.scales(3)), PROMPT + tokens[:5], 15, (0, 1, 3))
    assert tokens[5:] == behind


def test_a_lost_stage_is_left_out_until_it_is_back(source: ModelSource, model: StagedModel):
    with service(source, 3) as own:
        tokens, stages = continued(own, 20, {4: lambda: own.lose(2), 9: own.restore})
        assert continued(own, 20) == alone(model, 20)
    expected = greedy(model, PROMPT, 5, range(4))
    expected += greedy(model, PROMPT + expected, 5, (0, 1, 3))
    expected += greedy(model, PROMPT + expected, 10, range(4))
    assert tokens == expected
    assert stages == (0, 1, 3)


def test_the_front_has_stages_too(source: ModelSource, model: StagedModel):
    with service(source, 2, rules=LossRules(most_stages=2)) as own:
        assert len(own.hosts.own_stages) == 2
        assert continued(own, 9) == alone(model, 9)


def test_those_that_stay_take_over_a_lost_stage(source: ModelSource, model: StagedModel):
    with service(source, 3, rules=LossRules(take_over_s=0.1, most_stages=1)) as own:
        own.most_stages = 2
        own.start(1)
        eventually(lambda: sum(len(own.holding(stage)) for stage in (1, 2, 3)) == 5)
        [lost] = [stage for stage in (1, 2, 3) if len(own.holding(stage)) == 1]
        own.lose(lost)
        own.await_stages(1, 2, 3)
        assert continued(own, 9) == alone(model, 9)


def test_the_data_stage_answers_alone(source: ModelSource, model: StagedModel):
    with service(source, 1) as own:
        [thread] = own.threads
        thread.kill()
        own.await_stages()
        assert continued(own, 9) == alone(model, 9, (0,))


def test_sequences_wait_for_a_stage(source: ModelSource, model: StagedModel):
    with service(source, 3, rules=LossRules(WAIT, most_stages=1)) as own:

        def lose_for_a_while() -> None:
            own.lose(3)
            threading.Thread(target=own.start, args=(1,)).start()

        assert continued(own, 9, {2: lose_for_a_while}) == alone(model, 9)
        own.lose(3)
        generator = own.generator()
        generator.submit(DecodeRequest(PROMPT, 1, GREEDY))
        waiting = threading.Thread(target=generator.step)
        waiting.start()
        generator.close()  # As the end of the service does.
        waiting.join()


def test_sequences_fail_without_a_stage(source: ModelSource, model: StagedModel):
    with service(source, 3, rules=LossRules(FAIL, most_stages=1)) as own:
        generator, request = own.generator(), DecodeRequest(PROMPT, 9, GREEDY)
        with pytest.raises(Unavailable, match=r"stages \[1\]"):
            drawn_by(generator, [request], {2: lambda: own.lose(1)})
        generator.clear()
        own.restore()
        assert drawn_by(generator, [request])[0] == [greedy(model, PROMPT, 9, range(4))]


@pytest.mark.parametrize(
    "cut",
    [
        lambda own: own.holding(2)[0].part_from(own.threads),  # The front passes on to it.
        lambda own: own.holding(1)[0].forget_others(),  # It is told of one that it does not know.
    ],
)
def test_sequences_go_on_where_hosts_do_not_reach_each_other(
    cut: Callable[[Service], None], source: ModelSource, model: StagedModel
):
    with service(source, 3) as own:
        assert continued(own, 12, {3: lambda: cut(own)}) == alone(model, 12)


def test_the_service_ends_after_the_connections_of_its_hosts(source: ModelSource):
    hosts = StageHosts(source, Slots(1, 1, 32), LossRules(), Keys(), SILENT_S)
    address = parse_address("address", hosts.listen("127.0.0.1", 0))
    closing = threading.Thread(target=hosts.close)
    hello = msgspec.to_builtins(HostHello("a host", "127.0.0.1:1", 1e9, None, None))

    async def hold_nothing() -> None:
        link = await open_link(address)
        link.send(STAGE_HOST, PROTOCOL, hello)
        await link.receive()
        closing.start()
        while (said := await link.receive()) is not None and said[0] != "end":
            pass
        assert said is not None
        # What it may still send must not meet a closed connection: it would lose the word.
        closing.join(0.1)
        assert closing.is_alive()
        link.writer.close()

    asyncio.run(hold_nothing())
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_host_has_one_connection_to_another(source: ModelSource):
    with service(source, 3) as own:
        [first], [second] = own.holding(1), own.holding(2)
        eventually(lambda: first.neighbours == 2)
        [number] = [
            host["host"]
            for host in own.hosts.status()
            if host.get("address") == second.host.address
        ]
        assert len(first.connect_twice(number)) == 1


def test_connections_with_hosts_that_are_gone_are_forgotten(source: ModelSource):
    with service(source, 4) as own:
        [[lost, _]] = [two for stage in (1, 2, 3) if len(two := own.holding(stage)) == 2]
        lost.kill()
        left = [thread for thread in own.threads if thread is not lost]
        eventually(lambda: all(thread.neighbours == 2 for thread in left))
        # What hosts have said of the lost one has come before what they make of steps.
        continued(own, 2)
        assert own.hosts._avoided == {}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_whose_host_dies_while_the_service_ends_is_not_waited_for(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
):
    has_come, may_go_on = threading.Event(), threading.Event()
    run = LocalStages.run

    def run_late(*given: Any) -> Any:
        has_come.set()
        may_go_on.wait()
        return run(*given)

    with service(source, 3) as own:
        generator, drawn = own.generator(), []
        generator.submit(DecodeRequest(PROMPT[:1], 1, GREEDY))
        [thread] = own.holding(1)
        monkeypatch.setattr(LocalStages, "run", run_late)
        decoding = threading.Thread(target=lambda: drawn.extend(generator.step()))
        decoding.start()
        assert has_come.wait(PATIENCE_S)
        generator.close()  # As the end of the service does, which then waits for the step.
        thread.kill()
        may_go_on.set()
        decoding.join(PATIENCE_S)
        assert not decoding.is_alive()
    for computing in threading.enumerate():
        if computing.name == "skippipe-stages":
            computing.join(PATIENCE_S)
    assert [one.stages for one in drawn] == [(0, 2, 3)]


def test_hosts_have_the_secret(source: ModelSource, model: StagedModel):
    with service(source, 2, keys=Keys(Secret("cluster.secret", "file", "a" * 32))) as own:
        assert continued(own, 9) == alone(model, 9)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.0), ("bfloat16", 0.03), ("int8", 0.05)])
def test_activations_travel_in_fewer_bytes(
    dtype: str, most: float, source: ModelSource, model: StagedModel
):
    tokens = [*PROMPT, *b" and more of them"]
    step = Step(np.array([tokens], np.int32), np.arange(len(tokens), dtype=np.int32)[None], 0)
    expected = np.asarray(model.decoder(2, 64).run(step))
    with service(source, 2, slots=Slots(1, 2, 64, dtype)) as own:
        executor = own.generator().decoder
        assert isinstance(executor, RoutedExecutor)
        found = np.asarray(executor.run(step))
    difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert (difference > 0) == (most > 0)
    assert difference <= most


def test_who_is_no_host_is_told_of_the_service(source: ModelSource, command: Command):
    with service(source, 1) as own:
        found = command("status", own.address)
        assert found.code == 2
        assert "is the address of a service" in found.err
        assert "skippipe serve --coordinator" in found.err
        own.await_stages(1, 2, 3)


def test_join_adds_a_host_to_a_service(source: ModelSource):
    joining = [sys.executable, "-m", "skippipe_jax", "join"]
    with service(source, 1) as own:
        process = subprocess.Popen([*joining, own.address])
        eventually(lambda: len(own.hosts.status()) == 3)
        eventually(lambda: own.hosts.status()[2]["stages"] == [1, 2, 3])
    assert process.wait(PATIENCE_S) == 0


def test_a_host_whose_device_hangs_leaves(
    source: ModelSource, model: StagedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stage_host, "MOST_SILENCES", 0.5)
    run, is_over, hanging = LocalStages.run, threading.Event(), list[LocalStages]()

    def run_or_hang(held: LocalStages, *given: Any) -> np.ndarray:
        if held in hanging:
            is_over.wait()
        return run(held, *given)

    monkeypatch.setattr(LocalStages, "run", run_or_hang)
    with service(source, 3) as own:
        [thread] = own.holding(2)

        def hang() -> None:
            session = thread.host._session
            assert session is not None
            hanging.append(session._held)

        tokens, stages = continued(own, 9, {3: hang})
        thread.join()
        error, thread.error = thread.error, None
        is_over.set()
    assert isinstance(error, TemporaryError)
    assert "took over 1.5 s" in str(error)
    assert stages == (0, 1, 3)
    assert tokens[:4] == greedy(model, PROMPT, 4, range(4))
    assert tokens[4:] == greedy(model, PROMPT + tokens[:4], 5, (0, 1, 3))


def test_hosts_that_do_not_come_are_told_of(source: ModelSource):
    hosts = StageHosts(source, Slots(1, 1, 32), LossRules(), Keys(), 3.0)
    hosts.listen("127.0.0.1", 0)
    try:
        with pytest.raises(TemporaryError, match="0 of 2 other hosts connected"):
            hosts.gather(2, 0.1)
    finally:
        hosts.close()


def test_hosts_that_load_for_too_long_are_not_reported_as_missing(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
):
    with service(source, 1) as own:
        monkeypatch.setattr(StageHosts, "_is_ready", lambda *_: False)
        with pytest.raises(TemporaryError, match="0 of 1 other hosts loaded their stages within"):
            own.hosts.gather(1, 0.1)


@pytest.fixture
def served(source: ModelSource, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A service of three hosts, each a process, and its address."""
    folder = tmp_path / "run"
    save_run(folder, SECTIONS, 4)
    command = [sys.executable, "-m", "skippipe_jax", "serve", "--run", str(folder), "--hosts", "4"]
    process = subprocess.Popen(
        [
            *(*command, "--port", "0", "--max-num-seqs", "2", "--max-stages", "1"),
            *("--set", "cluster.heartbeat_timeout_s=5"),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if line.startswith("serving "))
        yield line.split()[-1], process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.nightly
def test_hosts_are_processes_that_are_started_again(
    served: tuple[str, subprocess.Popen[str]], model: StagedModel, command: Command
):
    url, process = served

    def answer() -> tuple[list[int], list[int]]:
        body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0.0, "logprobs": 0}
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answered:
            [choice] = json.load(answered)["choices"]
        numbers = {chr(own) if own < 128 else f"token_id:{own}": own for own in range(259)}
        tokens = [numbers[name] for name in choice["logprobs"]["tokens"]]
        return tokens, choice["skippipe"]["stages"]

    assert answer() == (greedy(model, PROMPT, 9, range(4)), [0, 1, 2, 3])
    others = psutil.Process(process.pid).children()
    assert len(others) == 3
    others[0].kill()
    eventually(lambda: "no host holds stages" in command("status", url).out)
    tokens, stages = answer()
    assert tokens == greedy(model, PROMPT, 9, stages)
    assert len(stages) < 4
    eventually(lambda: "no host holds stages" not in command("status", url).out)
    assert answer() == (greedy(model, PROMPT, 9, range(4)), [0, 1, 2, 3])
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    psutil.wait_procs(others, PATIENCE_S)
    assert not any(other.is_running() for other in others)


def span_of(tokens: list[int], slot: int, start: int) -> Step:
    positions = start + np.arange(len(tokens), dtype=np.int32)
    return Step(np.array([tokens], np.int32), positions[None], slot)


def last_of(tokens: list[int], slots: int, length: int) -> Step:
    """The step in which the last of these, in slot 0, gives the logits of what comes next."""
    given = np.zeros((slots, 1), np.int32), np.full((slots, 1), length, np.int32)
    given[0][0], given[1][0] = tokens[-1], len(tokens) - 1
    return Step(*given)


@pytest.mark.parametrize("is_lost", [False, True])
def test_spans_of_a_prompt_are_sent_without_waiting(
    is_lost: bool, source: ModelSource, model: StagedModel, monkeypatch: pytest.MonkeyPatch
):
    prompt = [256, *b"a prompt of more tokens than go through the stages at once, by far"[:49]]
    may_go_on = threading.Event()
    run = LocalStages.run

    def waiting(*given: Any) -> np.ndarray:
        may_go_on.wait()
        return run(*given)

    with service(source, 6) as own:
        executor = RoutedExecutor(source.model([DATA_STAGE]), own.hosts, 0)
        monkeypatch.setattr(LocalStages, "run", waiting)
        executor.begin(0, None)
        for start in range(0, 48, 16):
            executor.prefill(span_of(prompt[start : start + 16], 0, start))
        if is_lost:
            own.in_use(2).kill()
            eventually(lambda: len(own.holding(2)) == 1)
        may_go_on.set()
        executor.prefill(span_of(prompt[48:49], 0, 48))
        slots, length = executor.slots, executor.length
        logits = np.asarray(executor.next_logits(last_of(prompt, slots, length)))[0]
    alone = model.decoder(slots, length)
    alone.begin(0, None)
    alone.prefill(span_of(prompt[:-1], 0, 0))
    expected = np.asarray(alone.next_logits(last_of(prompt, slots, length)))[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_more_spans_than_may_be_ahead_wait(source: ModelSource, model: StagedModel):
    prompt = [256, *b"x" * 59]
    with service(source, 3) as own:
        executor = RoutedExecutor(source.model([DATA_STAGE]), own.hosts, 0)
        executor.begin(0, None)
        for start in range(len(prompt) - 1):
            executor.prefill(span_of(prompt[start : start + 1], 0, start))
        slots, length = executor.slots, executor.length
        logits = np.asarray(executor.next_logits(last_of(prompt, slots, length)))[0]
    assert [int(logits.argmax())] == greedy(model, prompt, 1, range(4))
