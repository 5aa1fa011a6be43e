"""What hosts tell each other before the first step: over slow links each exchange takes a while."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import hear
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config, load_config
from skippipe_jax.config.resume import settings
from skippipe_jax.inference.run import Run
from skippipe_jax.storage.checkpoint import step_folder
from skippipe_jax.training import setup
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.trainer import Trainer
from tests.harness.thread_cluster import Host, Lost, Network, train
from tests.training.test_rounds import configured

PATIENCE_S = 60.0
# Host 0 tells of the run, all report, and all say that they are ready.
EXCHANGES = ["run", "report", "ready"]


class Begins(Callback):
    """Notes what a host has told when the first step comes next, and ends it."""

    def __init__(self, host: Host):
        self.host, self.told = host, list[str]()

    def on_train_begin(self, run: RunView) -> None:
        told = (key.rpartition("/")[0] for key in self.host.membership.puts)
        self.told = [name.removeprefix("1:") for name in told if "clock" not in name]
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


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_run_reads_on_where_it_was_although_the_newest_checkpoint_is_damaged(
    is_copied: bool, tmp_path: Path
):
    """It is fetched from the copy again, or the one before it is gone on from."""
    path = configured(tmp_path)
    over = ["train.steps=4", "checkpoint.every=2", "trace=never"]
    if is_copied:
        over.append(f"checkpoint.copy_to=file://{tmp_path}/copy")
    Trainer(load_config(path, over)).run()
    run_dir = tmp_path / "run"
    step_folder(run_dir, 4).joinpath("data.json").write_text("")
    over[0] = "train.steps=6"
    Trainer(load_config(path, over), resume=True).run()
    whole = tmp_path / "whole"
    Trainer(load_config(path, ["train.steps=6", "trace=never", f"run_dir={whole}"])).run()
    found, expected = ([line["loss"] for line in Run(one).metrics] for one in (run_dir, whole))
    assert found == pytest.approx(expected, rel=1e-6)
