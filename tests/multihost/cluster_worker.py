"""One host of a run that sums over all hosts again and again; started by test_cluster.py.

It sums by a collective where one JAX has the devices of all hosts, else by what hosts tell.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from skippipe_sched.errors import run_command

from skippipe_jax.cluster.agreement import barrier, gather
from skippipe_jax.cluster.joining import connect
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.cluster import AUTO, RUNTIMES, JoinConfig
from skippipe_jax.errors import PeerTimeout


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--host-id", type=int)
    parser.add_argument("--runtime", choices=RUNTIMES, default=AUTO)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long host 0 goes on")
    parser.add_argument("--linger-s", type=float, default=0.0, help="sleep before the end")
    parser.add_argument("--fail-at", type=int, help="the step after which this host raises")
    parser.add_argument("--late-at", type=int, help="the step after which a deadline has passed")
    parser.add_argument("--transfer-port", type=int)
    parser.add_argument("--clock-ahead-s", type=float, help="how wrong this host's clock is")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.clock_ahead_s is not None:
        right = time.time
        time.time = lambda: right() + args.clock_ahead_s
    cluster = ClusterConfig(
        runtime=args.runtime,
        heartbeat_timeout_s=args.heartbeat_timeout_s,
        connect_timeout_s=60.0,
        transfer_port=args.transfer_port,
    )
    config = Config(cluster=cluster, join=JoinConfig(places=0))
    with connect(config, args.coordinator, args.hosts, args.host_id) as membership:
        runtime = "one JAX" if membership.is_distributed else "own JAX"
        print(f"host {membership.index} of {membership.count}, {runtime}", flush=True)
        exchange(membership)
        client = jax.local_devices()[0].client
        requests = membership.transfer_addresses()
        arrays = [f"{membership.address}:0"]
        servers = [transfer.start_transfer_server(client, own, arrays) for own in requests.values()]
        print("transfer servers on", *(server.address() for server in servers))
        began = time.monotonic()
        print(f"clock offset {membership.clock_offset_s()}, {time.monotonic() - began} s")
        sum_repeatedly(membership, args.seconds, args.fail_at, args.late_at)
        time.sleep(args.linger_s)
    print("ended well", flush=True)
    return 0


def exchange(membership: Membership) -> None:
    """Every host tells every other its index, and replaces what it told."""
    membership.put(f"square/{membership.index}", "unknown")
    membership.put(f"square/{membership.index}", str(membership.index**2))
    barrier(membership, "told", 30.0)
    for host in range(membership.count):
        assert membership.get(f"square/{host}", 30.0, source=host) == str(host**2)


def sum_repeatedly(
    membership: Membership, seconds: float, fail_at: int | None, late_at: int | None
) -> None:
    """Add up what every host contributes, until host 0's contribution says that time is up."""
    total_of = by_collective() if membership.is_distributed else by_telling(membership)
    end = time.monotonic() + seconds
    for step in itertools.count():
        membership.resume_hint = lambda step=step: f"Resume from step {step}."
        is_over = membership.index == 0 and time.monotonic() > end
        if total_of(step, -1.0 if is_over else 1.0) < membership.count:
            return
        if step == 3:
            print("summing", flush=True)
        if step == fail_at:
            raise ValueError("the data ran out")
        if step == late_at:
            raise PeerTimeout("nothing came from node 7 for 300 s")


def by_telling(membership: Membership) -> Callable[[int, float], float]:
    """The sum of what all hosts give in a step, as they tell it."""

    def total_of(step: int, own: float) -> float:
        # No run tells as much, all of which a host that was stopped has to read when it wakes.
        time.sleep(0.02)
        return sum(gather(membership, f"{step}", lambda: own, 300.0).values())

    return total_of


def by_collective() -> Callable[[int, float], float]:
    """The sum of what all hosts give in a step, over the devices of all of them."""
    mesh = jax.make_mesh((jax.device_count(),), ("device",))
    sharding = NamedSharding(mesh, P("device"))
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=P("device"), out_specs=P()
        )
    )

    def total_of(step: int, own: float) -> float:
        parts = np.full(jax.local_device_count(), own / jax.local_device_count(), np.float32)
        return add(jax.make_array_from_process_local_data(sharding, parts)).item()

    return total_of


if __name__ == "__main__":
    sys.exit(run_command(main))
