"""Links between hosts that are cut, for good or for a while, or that are as good as cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.benchmarks.network.shaped_network import ShapedNetwork
from skippipe_jax import Run
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.storage.checkpoint import latest_step
from tests.harness.processes import Processes, started_processes
from tests.harness.training_runs import settings, virtual_devices, write_config
from tests.multihost.test_training_hosts import CRASHES
from tests.network.test_shaped_network import needs_root
from tests.sched.examples import plan_of

pytestmark = needs_root

HOSTS = 3
HOST_OF_NODE = [0, 1, 2, 1, 2]
# Microbatches 1, 2, 4 and 5 cross the links between hosts 1 and 2, as the rings do.
PATHS = [[0, 1, 3], [0, 1, 4], [0, 2, 3], [0, 2, 4], [0, 1, 4], [0, 2, 3]]
# With room for all, so that node 0 waits for none of them to come back before it sends the next.
# Every path visits all stages, those of a plan that is found for fewer hosts as well.
PLAN = plan_of([[0], [1, 2], [3, 4]], PATHS, memory=len(PATHS), path_length=3)
STEPS, EVERY = 6, 2
RATE_BYTES_PER_S = 2e6
PORT = 61440
PATIENCE_S = 120.0
HEARTBEAT_TIMEOUT_S = 5.0
# So long that whoever is not cut off finds out before who is.
LONGER_DEADLINE_S = 20.0
REJOIN_S = 5.0
# What the end of a process takes once it is known that it has to end.
SLACK_S = 30.0


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    with ShapedNetwork(np.full((HOSTS, HOSTS), RATE_BYTES_PER_S)) as network:
        yield network


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose iterations take about a second, nearly all of it on the links."""
    folder = tmp_path_factory.mktemp("config")
    PLAN.save(folder / "plan.json")
    return write_config(
        folder,
        model={"width": 64, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_width": 128},
        data={
            "source": "text",
            "path": str(folder / "text"),
            "sequence_length": 64,
            "microbatch_size": 8,
        },
        plan={"file": str(folder / "plan.json")},
        train={"steps": STEPS},
        checkpoint={"every": EVERY, "keep": 2},
        network={"averaging": "ring"},
        cluster={"host_of_node": HOST_OF_NODE, "connect_timeout_s": 60, "insecure": True},
    )


def start(
    processes: Processes,
    network: ShapedNetwork,
    config: Path,
    run_dir: Path,
    **changes: Any,
) -> None:
    """Start training on all hosts."""
    command = ("-m", "skippipe_jax.train", "--config", config)
    processes.start_hosts(
        HOSTS,
        *(*command, *settings(run_dir=run_dir, **changes)),
        coordinator=f"{network.address(0)}:{PORT}",
        namespaces=[*map(network.namespace, range(HOSTS))],
        **virtual_devices(1),
    )


def losses(run_dir: Path) -> list[float]:
    """The loss of every step of a whole run."""
    lines = Run(run_dir).metrics
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def uncut(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("uncut")
    rates = np.full((HOSTS, HOSTS), RATE_BYTES_PER_S)
    with ShapedNetwork(rates) as network, started_processes(folder) as processes:
        start(processes, network, config, folder / "run")
        assert processes.exit_codes(PATIENCE_S) == [0] * HOSTS, processes.outputs()
    return losses(folder / "run")


@pytest.mark.nightly
def test_a_host_cut_off_for_good_is_gone_on_without(
    network: ShapedNetwork, config: Path, uncut: list[float], tmp_path: Path
):
    run_dir = tmp_path / "run"
    timeouts = {"cluster__heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}
    timeouts |= {"network__deadline_s": LONGER_DEADLINE_S, "cluster__rejoin_s": REJOIN_S}
    with started_processes(tmp_path / "hosts") as processes:
        # Those that go on do so on the same ports.
        start(processes, network, config, run_dir, cluster__transfer_port=20000, **timeouts)
        processes.wait_until(lambda: (latest_step(run_dir) or 0) >= EVERY, PATIENCE_S)
        network.set_link(2, up=False)
        codes = processes.exit_codes(LONGER_DEADLINE_S + REJOIN_S + SLACK_S)
        assert codes == [0, 0, LOST_HOST_EXIT_CODE], processes.outputs()
        assert "host 2 failed; 2 of 3 hosts continue from step" in processes.output(0)
        # A minority goes on with nothing, and waits for the others.
        told = f"no majority of hosts within cluster.rejoin_s = {REJOIN_S:g} s"
        assert told in processes.output(2), processes.output(2)
        assert f"exits with code {LOST_HOST_EXIT_CODE}. " in processes.output(2)
        assert not CRASHES.search(processes.outputs()), processes.outputs()
    assert losses(run_dir) == pytest.approx(uncut, rel=2e-5)
