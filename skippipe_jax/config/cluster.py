"""The sections `cluster`, `join`, `recovery` and `replan`: the hosts of a run, and their loss."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Annotated

from skippipe_sched.errors import InputError
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

from skippipe_jax.config.choices import Choice, Count, NonNegative, Positive, Section, Whole

AUTO, INDEPENDENT, DISTRIBUTED = RUNTIMES = Choice(("auto", "independent", "distributed"))
LAST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class ClusterConfig(Section, name="cluster"):
    """Which host serves which node, and when hosts give each other up.

    Attributes:
        host_of_node: the host that serves each node; by default the plan's nodes in order, evenly
            over the hosts.
        runtime: `independent`: every host has a JAX of its own, with its own devices only, and what
            hosts exchange goes by transfer servers. `distributed`: one JAX (`jax.distributed`) has
            the devices of all hosts, so that its collectives can sum over them. `auto` is
            `distributed` under SLURM, on TPU pods and with `--distributed`, else `independent`.
        heartbeat_timeout_s: seconds of silence after which a host is lost. After a third of them
            independent hosts connect anew.
        connect_timeout_s: seconds in which all hosts must have found each other; also the longest
            that a host which has finished waits for the others to finish.
        rejoin_s: seconds that independent hosts which are too few to go on without the others, or
            one that asks to be taken in again, wait for them before they end with exit code 75.
        grace_s: seconds that an independent host which is told to leave (SIGTERM) has for handing
            on what only it holds; then it goes in any case. It takes up to two iterations.
        bind_address: the IP address of this host on which everything of the run listens: for the
            messages of the others, the transfer servers and, where hosts are `distributed`, the
            CPU's collectives. As all hosts share the configuration, each gets its own by the
            environment variable SKIPPIPE_BIND_ADDRESS, which wins. By default, the address by which
            this host and host 0 reach each other.
        transfer_port: with p, the transfer server of host i for host j, of N hosts, takes requests
            on the port p + iN + j, and host i itself, but for host 0, listens on p + iN + i for the
            messages of the others; so several hosts may share a machine. Arrays come by any free
            ports, which JAX does not let one choose. By default, so does everything. Host k of
            `join.places`, with k >= N, takes the ports p + kk to p + kk + 2k, and so do the others
            for it.
        secret: the file with the secret of the run, which `skippipe keygen FILE` makes and all
            hosts have: they show each other that they do, and encrypt their messages by it. The
            environment variable SKIPPIPE_SECRET_FILE, a path, wins over it, and SKIPPIPE_SECRET,
            the secret itself, over both. Without one, hosts listen and connect on loopback
            addresses only.
        insecure: whether hosts without a secret use other addresses nevertheless, with a warning:
            whoever reaches them is taken for one of the run. A secret in the environment wins.
        insecure_transfers: whether hosts with a secret listen on public addresses too. What they
            transfer goes in clear, whoever has the secret: say so only where a tunnel or a firewall
            keeps others from these addresses.
    """

    host_of_node: tuple[int, ...] | None = None
    runtime: Annotated[str, RUNTIMES] = AUTO
    heartbeat_timeout_s: float = 30.0
    connect_timeout_s: float = 300.0
    rejoin_s: float = 600.0
    grace_s: float = 30.0
    bind_address: str | None = None
    transfer_port: Annotated[int, Whole(1, LAST_PORT)] | None = None
    secret: str | None = None
    insecure: bool = False
    insecure_transfers: bool = False

    def __post_init__(self) -> None:
        """Refuse timeouts that no host could keep, and what is no runtime, address or port."""
        super().__post_init__()
        for field in ("heartbeat_timeout_s", "connect_timeout_s", "rejoin_s", "grace_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"cluster.{field}", value, "not a positive time", "give seconds above 0"
                )
        if self.bind_address is not None:
            require_one_interface(self.bind_address, "cluster.bind_address")
        if self.secret is not None and self.insecure:
            remedy = "write cluster.secret alone, or cluster.insecure alone"
            raise InputError("cluster.insecure", True, "there is a cluster.secret", remedy)

    def port(self, host: int, other: int, hosts: int) -> int:
        """The port on which a host listens for another; for messages of all if both are the same.

        0 stands for any free one. `hosts` are those that the run begins with; what the others need
        lies above all that is needed without them.

        Raises:
            InputError: if there are no such ports for all hosts.
        """
        if self.transfer_port is None:
            return 0
        if self.transfer_port + hosts**2 - 1 > LAST_PORT:
            remedy = f"write at most {LAST_PORT + 1 - hosts**2}"
            problem = f"too high for {hosts**2} ports, one for each pair of {hosts} hosts"
            raise InputError("cluster.transfer_port", self.transfer_port, problem, remedy)
        later = max(host, other)
        if later < hosts:
            return self.transfer_port + host * hosts + other
        return self.transfer_port + later**2 + (other if later == host else later + 1 + host)

    def with_ports(self, hosts: int, spare: int) -> int:
        """How many of the `spare` places have ports, beside those of the hosts of the start."""
        if self.transfer_port is None:
            return spare
        most = math.isqrt(LAST_PORT + 1 - self.transfer_port)
        return max(0, min(spare, most - hosts))


def require_one_interface(address: str, field: str) -> None:
    """Refuse what is no IP address, or stands for every interface."""
    remedy = "give an IP address of this host, such as 10.0.0.1"
    try:
        stands_for_all = ipaddress.ip_address(address).is_unspecified
    except ValueError as error:
        raise InputError(field, address, "not an IP address", remedy) from error
    if stands_for_all:
        raise InputError(field, address, "no other host can reach such an address", remedy)


MOST_PLACES = 1 << 10


@dataclass(frozen=True)
class JoinConfig(Section, name="join"):
    """Say which hosts may join a run of independent hosts.

    Attributes:
        places: so many hosts more than the run begins with may be in it; each serves a replica of a
            stage. They cost nothing as long as nobody comes.
        horizon: in so many seconds such a host has to save more time by shorter iterations than the
            others wait for while it gets the state of its stage; else it does not come, unless a
            single host serves the stage.
    """

    places: Annotated[int, Whole(0, MOST_PLACES)] = 4
    horizon: NonNegative = 3600.0


REWIND, BUDDY, AVERAGE, SKIP, STOP = LOST_STAGE = Choice(
    ("rewind", "buddy", "average", "skip", "stop")
)


@dataclass(frozen=True)
class RecoveryConfig(Section, name="recovery"):
    """Say how a run of independent hosts goes on when some are lost.

    Where a replica of every stage is left, the others take over the paths of what is lost at once.

    Attributes:
        lost_stage: what happens when no replica of a stage is left. `rewind`: every stage goes back
            to the last checkpoint, on the hosts that are left. `buddy`: the lost stage goes on with
            a copy that a host of another stage keeps of it, some steps old; the others stay where
            they are. `average`: it gets the mean of the stages before and after it, weighted by the
            norms of their gradients. `skip`: paths lead past it until a host serves it again, which
            reads it from the last checkpoint. `stop`: the run ends. Only `rewind` is exact; it also
            takes the place of `buddy` where the copy is lost too, of `average` for the first stage,
            the last one, and one with another number of blocks than those beside it, and of `skip`
            for the first stage, and before the first checkpoint. With `averaging.mode: outer` there
            are `rewind` and `stop` alone.
        buddy_every: with `buddy`, copies are made of the states after every so many iterations,
            and are on their way during as many: each iteration sends this part of them.
    """

    lost_stage: Annotated[str, LOST_STAGE] = REWIND
    buddy_every: Count = 10


@dataclass(frozen=True)
class ReplanConfig(Section, name="replan"):
    """How a run of independent hosts gets a better plan when its hosts have changed.

    At once it goes on by a quick plan. In the background, one host searches for a better one, which
    is taken after a step, and stages move to the nodes where that has them.

    Attributes:
        budget_s: seconds that a search may take, besides compiling it once on a machine. 0: never.
        gain: a plan is taken by which an iteration is shorter by more than this share, and only if
            that saves more time, in what is left of the run, than moving the states takes.
        drift: the search is made too where the seconds of iterations, in the median over a few,
            differ from those of the plan by more than this share of them; for it the seconds of
            nodes are corrected by what they were measured to compute. null: never.
    """

    budget_s: NonNegative = DEFAULT_BUDGET_S
    gain: NonNegative = 0.03
    drift: Positive | None = None
