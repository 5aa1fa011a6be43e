"""How a host runs JAX: as its configuration says, else as where it was started asks."""

from __future__ import annotations

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.position import chosen_runtime, find_position, require_same_runtime
from skippipe_jax.config import ClusterConfig
from tests.harness.thread_hosts import on_hosts

SLURM = {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_NUM_TASKS": "2"}
ALONE_IN_SLURM = SLURM | {"SLURM_STEP_NUM_TASKS": "1"}
POD, ONE_TPU = {"TPU_WORKER_HOSTNAMES": "a,b"}, {"TPU_WORKER_HOSTNAMES": "a"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts the tests."""
    for name in (*SLURM, *POD, "SLURM_NTASKS", "TPU_PROCESS_ADDRESSES"):
        monkeypatch.delenv(name, raising=False)


def test_variables_of_a_cluster_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch):
    variables = {"SLURM_JOB_ID": "seven", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    for name, value in (SLURM | variables | {"SLURM_LOCALID": "0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"could not detect the cluster: .*'seven'. Set --coord"):
        find_position(ClusterConfig(), None, None, None, distributed=False)


@pytest.mark.parametrize(
    ("environment", "distributed", "chosen"),
    [
        ({}, False, "independent"),
        (ALONE_IN_SLURM, False, "independent"),
        (ONE_TPU, False, "independent"),
        ({}, True, "distributed"),
        (SLURM, False, "distributed"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "two"}, False, "distributed"),  # JAX refuses it then.
        (POD, False, "distributed"),
    ],
)
def test_the_runtime_is_as_configured_or_suits_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], distributed: bool, chosen: str
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert chosen_runtime(ClusterConfig(), distributed) == chosen
    for runtime in ("independent", "distributed"):
        assert chosen_runtime(ClusterConfig(runtime=runtime), distributed) == runtime


def test_no_other_runtime_is_taken():
    with pytest.raises(InputError, match=r"cluster\.runtime = 'both'"):
        ClusterConfig(runtime="both")


def test_hosts_that_would_run_jax_in_unlike_ways_are_refused():
    runtimes = ("distributed", "independent")
    config = ClusterConfig(connect_timeout_s=30.0)
    first, refused = on_hosts(
        2, lambda host: require_same_runtime(host, config, runtimes[host.index])
    )
    assert first is None
    assert "selects independent on host 1, and not on host 0" in str(refused)
