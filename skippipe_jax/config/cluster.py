"""The sections `cluster`, `join`, `recovery` and `replan`: hosts of a run and their failures."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Annotated

from skippipe_sched.errors import InputError
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

from skippipe_jax.config.choices import AtLeastOne, Choice, NonNegative, Positive, Section, Whole

AUTO, INDEPENDENT, DISTRIBUTED = RUNTIMES = Choice(("auto", "independent", "distributed"))
LAST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class ClusterConfig(Section, name="cluster"):
    """Assignment of nodes to hosts, connections between hosts, and failure detection.

    Attributes:
        host_of_node: host that serves each node. null: nodes in order, evenly distributed.
        runtime: `independent`: every host runs its own JAX, and hosts exchange arrays through
            transfer servers. `distributed`: one JAX (`jax.distributed`) spans all hosts. `auto`:
            `distributed` under SLURM, on TPU pods and with `--distributed`, else `independent`.
        heartbeat_timeout_s: seconds of silence until a host counts as failed. In `independent`
            mode, hosts reconnect after a third of it.
        connect_timeout_s: seconds for all hosts to connect at startup; also the longest that a
            finished host waits for others.
        rejoin_s: in `independent` mode, seconds that hosts wait for a majority, or for readmission,
            before they exit with code 75.
        grace_s: in `independent` mode, seconds after SIGTERM to hand over state that only this host
            holds. A graceful leave takes up to two steps.
        bind_address: IP address on which this host listens. SKIPPIPE_BIND_ADDRESS in the
            environment of a host takes precedence. null: the address that connects it with host 0.
        transfer_port: base port p: of N hosts, host i listens on port p + iN + j for transfers to
            host j and, except host 0, on p + iN + i for messages. For an extra host k >= N
            (`join.places`), all use ports p + kk to p + kk + 2k. Arrays always use free ports.
            null: all ports are free ones.
        secret: file with the secret that all hosts share, from `skippipe keygen FILE`; it
            authenticates them and encrypts messages. In the environment, SKIPPIPE_SECRET_FILE, a
            path, takes precedence, and SKIPPIPE_SECRET, the secret itself, over both. null:
            loopback addresses only.
        insecure: without a secret, allow other than loopback addresses: anyone who can reach them
            can join the run.
        insecure_transfers: with a secret, allow public addresses. Transfers are not encrypted: set
            this only where a tunnel or a firewall protects these addresses.
    """

    host_of_node: tuple[int, ...] | None = None
    runtime: Annotated[str, RUNTIMES] = AUTO
    heartbeat_timeout_s: Positive = 30.0
    connect_timeout_s: Positive = 300.0
    rejoin_s: Positive = 600.0
    grace_s: Positive = 30.0
    bind_address: str | None = None
    transfer_port: Annotated[int, Whole(1, LAST_PORT)] | None = None
    secret: str | None = None
    insecure: bool = False
    insecure_transfers: bool = False

    def __post_init__(self) -> None:
        """Reject timeouts, runtimes, addresses and ports that are not valid."""
        super().__post_init__()
        if self.bind_address is not None:
            require_specific_address(self.bind_address, "cluster.bind_address")
        if self.secret is not None and self.insecure:
            problem = "cannot be combined with cluster.secret"
            raise self.error("insecure", problem, "Remove one of the two")

    def port(self, host: int, other: int, hosts: int) -> int:
        """Return the port on which a host listens for another; 0 for any free one.

        With `host == other` it is the port for messages of all hosts. `hosts` is the number of
        hosts at the start; the ports of extra hosts lie above all ports of those.

        Raises:
            InputError: if there are not enough ports for all hosts.
        """
        if self.transfer_port is None:
            return 0
        if self.transfer_port + hosts**2 - 1 > LAST_PORT:
            remedy = f"Write at most {LAST_PORT + 1 - hosts**2}"
            problem = f"is too high: {hosts} hosts need {hosts**2} ports from this one on"
            raise self.error("transfer_port", problem, remedy)
        highest = max(host, other)
        if highest < hosts:
            return self.transfer_port + host * hosts + other
        return self.transfer_port + highest**2 + (other if highest == host else highest + 1 + host)

    def with_ports(self, hosts: int, extra_hosts: int) -> int:
        """Return how many of `extra_hosts` have ports, in addition to the initial hosts."""
        if self.transfer_port is None:
            return extra_hosts
        most = math.isqrt(LAST_PORT + 1 - self.transfer_port)
        return max(0, min(extra_hosts, most - hosts))


def require_specific_address(address: str, field: str) -> None:
    """Reject an address that is not an IP address, or stands for every interface."""
    remedy = "Write an IP address of this host, such as 10.0.0.1"
    try:
        is_unspecified = ipaddress.ip_address(address).is_unspecified
    except ValueError as error:
        raise InputError(field, address, "is not an IP address", remedy) from error
    if is_unspecified:
        raise InputError(field, address, "is not an address that other hosts can reach", remedy)


MAX_EXTRA_HOSTS = 1 << 10


@dataclass(frozen=True)
class JoinConfig(Section, name="join"):
    """Admission of hosts to a run in `independent` mode.

    Attributes:
        places: maximum number of extra hosts; each serves a replica of a stage.
        horizon: seconds in which shorter steps must save more time than the transfer of the stage's
            state costs. Otherwise a host does not join, unless a single host serves the stage.
    """

    places: Annotated[int, Whole(0, MAX_EXTRA_HOSTS)] = 4
    horizon: NonNegative = 3600.0


REWIND, BUDDY, AVERAGE, SKIP, STOP = LOST_STAGE = Choice(
    ("rewind", "buddy", "average", "skip", "stop")
)


@dataclass(frozen=True)
class RecoveryConfig(Section, name="recovery"):
    """Recovery of a run in `independent` mode after hosts have failed.

    Attributes:
        lost_stage: policy for a stage without replica. `rewind`: all stages return to the last
            checkpoint. `buddy`: the stage continues from an older copy on another host. `average`:
            it becomes the mean of its neighbors, weighted by gradient norms. `skip`: paths bypass
            it until a host serves it again, from the last checkpoint. `stop`: the run ends. Only
            `rewind` is exact. It replaces `buddy` if the copy is lost too; `average` for the first
            stage, the last, and one whose number of blocks differs from its neighbors'; `skip` for
            the first stage, and before the first checkpoint. In `outer` mode only `rewind` and
            `stop` are allowed.
        buddy_every: with `buddy`, copy the states every N steps, spread over the next N.
    """

    lost_stage: Annotated[str, LOST_STAGE] = REWIND
    buddy_every: AtLeastOne = 10


@dataclass(frozen=True)
class ReplanConfig(Section, name="replan"):
    """Replanning of a run in `independent` mode after its hosts have changed.

    The run continues with a repair plan, while one host searches for a better one.

    Attributes:
        budget_s: time limit of a search in seconds, without compilation. 0: never search.
        gain: accept a plan only if it shortens the step by more than this fraction, and saves more
            time in the rest of the run than moving states takes.
        drift: also search, with measured computation times, if the median time of a few steps
            differs from the plan's by more than this fraction.
    """

    budget_s: NonNegative = DEFAULT_BUDGET_S
    gain: NonNegative = 0.03
    drift: Positive | None = None
