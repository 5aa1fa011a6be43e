"""How many messages hosts need, to begin and to go on without one of them, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import load_plan

from skippipe_jax import Run
from skippipe_jax.cluster.agreement import hear
from skippipe_jax.cluster.membership import NO_GENERATION, Membership
from skippipe_jax.config import Config, DataConfig, load_config
from skippipe_jax.config.resume import settings
from skippipe_jax.consensus.decisions import advance, first_state
from skippipe_jax.consensus.generations import (
    ConsensusRules,
    Enter,
    Generation,
    Presence,
    Received,
    Send,
    Tick,
)
from skippipe_jax.storage.checkpoint import step_folder
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training import setup
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.report import GenerationReport, plan_session
from skippipe_jax.training.trainer import Trainer
from tests.harness.thread_cluster import Host, Lost, Network, train
from tests.harness.training_runs import SMALL_CASE, write_config

PATIENCE_S = 60.0
STEPS = 6
# Host 0 has stage 0, and hosts 1 and 2 have a replica of stage 1 each.
CASE = SMALL_CASE | {"locations": ["here"], "links": []}
# Ask, promise, ask, accepted, decided; then a report, and the word that all are ready.
DECIDING, OPENING = 5, 2
MOST_ROUND_TRIPS = 4


def configured(folder: Path) -> Path:
    return write_config(
        folder,
        plan={"case": CASE, "method": "balanced"},
        train={"steps": STEPS},
        validation={"every": STEPS, "sequences": 4},
        trace="every 2",
        replan={"budget_s": 0},
        run_dir=str(folder / "run"),
    )


def lost_after(host: Host, step: int, network: Network) -> None:
    """The host is lost after a step."""

    def is_lost(trainer: Trainer, done: int) -> None:
        if done == step:
            network.lose(host.membership.index)
            raise Lost

    host.after_step = is_lost


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(3)
    yield network
    network.close()


def test_a_run_goes_on_without_a_lost_host_in_few_round_trips(network: Network, tmp_path: Path):
    hosts = [Host(configured(tmp_path), index, network, []) for index in range(3)]
    depths: dict[int, int] = {}

    def counts(trainer: Trainer, step: int) -> None:
        own = hosts[trainer.membership.index].membership
        if trainer.group.count == 2:
            depths.setdefault(own.index, own.depth)

    lost_after(hosts[2], 2, network)
    for host in hosts[:2]:
        host.after_step = counts
    train(hosts, PATIENCE_S)
    assert [host.trainer.step for host in hosts[:2]] == [STEPS, STEPS]
    assert {*depths.values()} == {OPENING}
    assert DECIDING + OPENING <= 2 * MOST_ROUND_TRIPS


def test_hosts_decide_on_the_next_generation_in_few_messages():
    first = Generation(1, (0, 1, 2), (7, 7, 7), 0, 4, placement=((0,), (1, 2)))
    rules = ConsensusRules(
        host_of=(0, 1, 2), stages=2, placed=lambda placement, *_: placement, add_up=dict
    )
    states = {host: first_state(host, rules, first, 0) for host in (0, 1, 2)}
    for host in (0, 1):
        states[host], _ = advance(states[host], Presence(2, is_there=False))
    states[0], effects = advance(states[0], Tick())
    depth, under_way = 0, [(0, effect) for effect in effects]
    entered: dict[int, int] = {}
    while under_way:
        depth += 1
        arriving, under_way = under_way, []
        for source, effect in arriving:
            if isinstance(effect, Send) and effect.target != 2:
                target = effect.target
                states[target], more = advance(states[target], Received(source, effect.message))
                under_way += [(target, one) for one in more]
                if any(isinstance(one, Enter) for one in more):
                    entered[target] = depth
    assert max(entered.values()) == DECIDING
    assert entered.keys() == {0, 1}


@pytest.mark.parametrize(
    "lacking", ["another text", pytest.param("no text", marks=pytest.mark.nightly)]
)
def test_a_host_without_the_text_does_not_take_over_the_data_stage(
    network: Network,
    tmp_path: Path,
    lacking: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """Host 0 is lost, which alone reads. Host 1 is to read next, and has not the same text."""
    config = configured(tmp_path)
    other = tmp_path / "other"
    if lacking == "another text":
        other.write_bytes((tmp_path / "text").read_bytes().swapcase())
    hosts = [Host(config, index, network, []) for index in range(3)]

    def at_the_same_path(config: Config) -> DataConfig:
        return (
            replace(config.data, path=str(other)) if current_thread() is hosts[1] else config.data
        )

    monkeypatch.setattr(setup, "with_run_tokenizer", at_the_same_path)
    lost_after(hosts[0], 2, network)
    train(hosts, PATIENCE_S)
    lines = [json.loads(line) for line in (tmp_path / "run/membership.jsonl").open()]
    assert [line["cause"] for line in lines] == ["", "host 1 lacks the training text"]
    assert [own["nodes"] for own in lines[-1]["members"]] == [[1], [2]]
    [recovery] = RunDir(tmp_path / "run").recoveries()
    assert (recovery.stages, recovery.by, recovery.step) == ([0], "rewind", 0)
    # The first generation without host 0 makes no step: what it knew is told in the next.
    assert recovery.step_before >= 2
    assert recovery.loss_before is not None
    plan = load_plan(tmp_path / "run/generations/plan-3.json")
    assert plan.stages == ((1,), (0,)), "host 2 reads"
    steps = [line["step"] for line in Run(tmp_path / "run").metrics]
    assert steps == list(range(1, STEPS + 1))
    told = capfd.readouterr().err
    assert "its text differs from the training text of the run" in told
    assert ("this host cannot read the training text" in told) == (lacking == "no text")


def test_who_reads_another_text_than_the_run_does_counts_as_without():
    run = GenerationReport(run_fingerprint="run")
    other: Any = {"serves_data": True}
    reports = [run, GenerationReport(data_fingerprint="run", **other), GenerationReport(**other)]
    reports += [GenerationReport(data_fingerprint="another", **other)]
    agreed = plan_session(NO_GENERATION, reports)
    assert (agreed.data_fingerprint, agreed.without_text) == ("run", [2, 3])


# What hosts tell each other before the first step: over slow links each exchange takes a while.


# Host 0 tells of the run, all report, and all say that they are ready.
EXCHANGES = ["run", "report", "ready"]


class Begins(Callback):
    """Notes what a host has told when the first step comes next, and ends it."""

    def __init__(self, host: Host):
        self.host, self.told = host, list[str]()

    def on_train_begin(self, run: RunView) -> None:
        told = (key.rpartition("/")[0] for key in self.host.membership.puts)
        self.told = [name for name in told if "clock" not in name]
        raise Lost


@pytest.mark.parametrize("count", [1, 3])
def test_hosts_tell_each_other_three_times_before_the_first_step(count: int, tmp_path: Path):
    config = configured(tmp_path)
    for resume in (False, True):
        network = Network(count)
        hosts = [Host(config, index, network, [], resume=resume) for index in range(count)]
        begin = [Begins(host) for host in hosts]
        for host, callback in zip(hosts, begin, strict=True):
            host.trainer.callbacks.given += (callback,)
        train(hosts, PATIENCE_S)
        network.close()
        expected = [EXCHANGES, *[EXCHANGES[1:]] * (count - 1)]
        assert [callback.told for callback in begin] == expected
        if not resume:  # There is a checkpoint then.
            network = Network(count)
            over = ["train.steps=2", "checkpoint.every=1"]
            train([Host(config, n, network, over, resume=True) for n in range(count)], PATIENCE_S)
            network.close()


@pytest.mark.parametrize("plan", [(), ("plan={measure: true}",)])
def test_a_host_with_another_configuration_names_the_key_and_both_values(
    plan: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before anything is measured."""

    def measure(_: Config, host: Membership, *__: object) -> None:
        assert host.index == 0, "host 1 has refused"
        hear(host, "measured", [1], PATIENCE_S)

    monkeypatch.setattr(setup, "_measure_cluster", measure)
    config, network = configured(tmp_path), Network(2)
    rates = "optimizer.learning_rate=0.25", "optimizer.learning_rate=0.125"
    hosts = [Host(config, index, network, [own, *plan]) for index, own in enumerate(rates)]
    expected = "optimizer.learning_rate = '0.125': host 1 has this, and host 0 has '0.25'. Start"
    with pytest.raises(InputError, match=re.escape(expected)):
        train(hosts, PATIENCE_S)
    network.close()


def test_a_host_that_does_not_share_the_folder_learns_of_it_before_anything_is_measured(
    tmp_path: Path,
):
    config = load_config(configured(tmp_path))
    network = Network(2)
    other = Host(configured(tmp_path), 1, network, []).membership
    with pytest.raises(InputError, match=r"run_dir = .*host 1 does not find.*skippipe join"):
        setup.require_same_start(config, other, settings(config))
    Path(config.run_dir).mkdir()
    setup.require_same_start(config, other, settings(config))
    network.close()


def test_a_run_reads_on_where_it_was_although_the_newest_checkpoint_is_damaged(tmp_path: Path):
    """It is fetched from the copy again, or the one before it is gone on from."""
    path = configured(tmp_path)

    def losses(name: str, steps: int, *more: str, resume: bool = False) -> list[float]:
        run_dir = tmp_path / name
        over = [f"run_dir={run_dir}", f"train.steps={steps}", "checkpoint.every=2", "trace=never"]
        Trainer(load_config(path, [*over, *more]), resume=resume).run()
        return [line["loss"] for line in Run(run_dir).metrics]

    expected = losses("whole", 6)
    for name, more in (("copied", [f"checkpoint.copy_to=file://{tmp_path}/copy"]), ("alone", [])):
        losses(name, 4, *more)
        step_folder(tmp_path / name, 4).joinpath("data.json").write_text("")
        assert losses(name, 6, *more, resume=True) == pytest.approx(expected, rel=1e-6)
