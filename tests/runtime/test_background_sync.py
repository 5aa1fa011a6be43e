"""What goes on behind the iterations of replicas that are apart."""

from __future__ import annotations

import threading
import time

from skippipe_jax.config import AveragingConfig, Config, DataConfig, NetworkConfig, TrainConfig
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.state import FragmentInTransit
from tests.harness.one_host import open_alone
from tests.runtime.test_oracle import BATCH, TIME
from tests.runtime.test_outer_oracle import model_of
from tests.sched.examples import plan_of


def test_an_emulated_averaging_takes_what_the_iteration_drew_that_sent_it():
    plan = plan_of([[0, 1]], [[0], [1]], stage_bytes=1e8)
    averaging = AveragingConfig(mode="outer", every=4, fragments=1, delay=3, dtype="float32")
    network = NetworkConfig(mode="emulate", jitter=1.0)
    config = Config(
        model=model_of((1,)),
        averaging=averaging,
        data=DataConfig(microbatch_size=BATCH, sequence_length=TIME),
        network=network,
        train=TrainConfig(8),
    )
    runtime = open_alone(config, plan, devices=2)
    behind, emulation = runtime._background, Emulation(plan, network, seed=0)
    assert behind is not None
    seconds = []
    for iteration in range(50):
        emulation.begin(iteration)
        seconds.append(emulation.averaging_end_s(0, 0.0))
    longest, shortest = (seconds.index(own) for own in (max(seconds), min(seconds)))
    assert seconds[longest] > 4 * seconds[shortest]
    emulation.begin(longest)
    goes_on = threading.Event()

    def wait(_: float) -> None:
        assert goes_on.wait(30.0)

    behind.at(0.0, wait)
    assert runtime._outer_steps is not None
    for replica in runtime.states:
        own = runtime._outer_steps.send(replica, averaging.every)
        assert isinstance(own, FragmentInTransit)
        behind.send(replica, averaging.every, own, emulation)
    emulation.begin(shortest)
    goes_on.set()
    done, until_s = [], time.monotonic() + 30.0
    while len(done) < 2 and time.monotonic() < until_s:
        done += behind.take_averagings()
    runtime.close()
    # What has come before a replica began counts from then.
    assert [own.end_s - own.start_s > seconds[longest] / 2 for own in done] == [True, True]
