"""Joining a run by the address of any of its hosts, if it pays off.

ask and fetch -> find a place -> compile and measure -> join -> train as a rejoining host
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from skippipe_sched.errors import InputError, TemporaryError
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.node_addition import NewNode
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax import log
from skippipe_jax.cluster.joining import connect
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.connections.directory import HOST_ID
from skippipe_jax.connections.join_offer import Place
from skippipe_jax.connections.link_probe import MeasuredLink
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.models.footprint import buddy_checkpoint_bytes
from skippipe_jax.program.compiler import hosts_of_nodes
from skippipe_jax.runtime.ahead_of_time import compile_ahead
from skippipe_jax.runtime.compilation import enable_compilation_cache
from skippipe_jax.runtime.threads import give_collectives_threads
from skippipe_jax.runtime.topology import shardings_of_host
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.elastic.extra_hosts import extend_case, host_by_node, with_stages
from skippipe_jax.training.elastic.join_measurements import (
    JoinMeasurements,
    forward_seconds,
    new_nodes,
)
from skippipe_jax.training.elastic.join_search import JoinSearch
from skippipe_jax.training.setup import with_run_tokenizer


@contextmanager
def joined_by_address(
    addresses: Sequence[str],
    run_dir: Path | None,
    overrides: Sequence[str],
    *,
    anyway: bool = False,
) -> Iterator[tuple[Config, Membership]]:
    """Join a run as an extra host, or in place of a lost one, for the length of a block.

    Yields the configuration with this host's own folder, and its membership, which `is_outside`
    until `Trainer` calls `Membership.request_admission`. The end of the block ends no other host.
    With `anyway` it joins even if that does not pay off.

    Raises:
        InputError: if the folder belongs to another run, this host is refused, or `overrides` set
            a value that must be the same on all hosts.
        TemporaryError: if no host answers with a run, or for ``cluster.rejoin_s`` no place is free
            or joining does not pay off.
    """
    seeking = JoinSearch(addresses, run_dir, overrides, _fingerprint)
    with ExitStack() as stack:
        stack.enter_context(seeking.fetch())
        config = seeking.config
        enable_compilation_cache(config.compilation_cache)
        place = seeking.place()
        measured = _compile_and_measure(seeking, place)
        while True:
            if not seeking.is_free(place):
                log.output(
                    f"host id {place.host} is taken, or a failed host must be replaced first; "
                    "choosing again"
                )
            elif (why := _decline_reason(seeking, place, measured, anyway=anyway)) is not None:
                seeking.wait(why)
                if not {*seeking.offer.members} <= measured.ways.keys():
                    measured = replace(measured, ways=seeking.ways())
            elif (host := _try_join(stack, seeking, place, measured)) is not None:
                break
            before, place = place, seeking.place()
            if (before.host, before.stages) != (place.host, place.stages):
                measured = _compile_and_measure(seeking, place)
        yield config, host


def _try_join(
    stack: ExitStack, seeking: JoinSearch, place: Place, measured: JoinMeasurements
) -> Membership | None:
    """Join as the host of a place until `stack` is closed; return None if another host took it."""
    measured.keep(seeking.folder)
    config = seeking.config
    membership = connect(
        config,
        seeking.asked,
        seeking.offer.hosts,
        place.host,
        last_addresses=seeking.addresses,
        run=seeking.run,
        is_joiner=True,
    )
    try:
        return stack.enter_context(membership)
    except InputError as error:
        if error.field != HOST_ID or isinstance(error, TemporaryError):
            raise
        log.output(f"another machine joined as host {place.host} ({error.problem}); choosing again")
        return None


def _fingerprint(config: Config) -> str:
    return TrainingBatches(with_run_tokenizer(config)).fingerprint


def _compile_and_measure(seeking: JoinSearch, place: Place) -> JoinMeasurements:
    """Compile the stages of a place, and measure if it is an extra one.

    For an extra place, measures the links to the hosts that train and, if the run has measured its
    case, the stage on the device that would serve it.
    """
    config, hosts, since_s = seeking.config, seeking.offer.hosts, time.monotonic()
    what = f"replacing host {place.host}"
    if place.host >= hosts:
        what = f"joining as extra host {place.host} of a run of {hosts} hosts"
    stages = f"stage{'s' * (len(place.stages) > 1)} {', '.join(map(str, place.stages))}"
    log.output(f"{what} ({stages})")
    plan = RunDir(seeking.folder).plan()
    host_of = hosts_of_nodes(len(plan.case.nodes), hosts, config.cluster.host_of_node)
    nodes = max(1, host_of.count(place.host))
    give_collectives_threads(config, nodes, plan.case, is_distributed=False)
    own = shardings_of_host(config, plan.case, host_of, place.host)
    count = compile_ahead(config, place.stages, len(plan.stages), own, plan.case)
    programs = "1 program" if count == 1 else f"{count} programs"
    log.output(f"compiled {programs} in {time.monotonic() - since_s:.1f} s")
    if place.host < hosts:
        return JoinMeasurements()
    return JoinMeasurements(seeking.ways(), forward_seconds(config, plan, place.stages[0], own[0]))


def _decline_reason(
    seeking: JoinSearch, place: Place, measured: JoinMeasurements, *, anyway: bool
) -> str | None:
    """Explain why joining at an extra place does not pay off; None if it does."""
    config, offer = seeking.config, seeking.offer
    if place.host < offer.hosts:
        return None
    plan = RunDir(seeking.folder).plan()
    own = hosts_of_nodes(len(plan.case.nodes), offer.hosts, config.cluster.host_of_node)
    host_of = host_by_node(config, own)
    estimate = admission(
        plan,
        host_of,
        place.host,
        offer.members,
        offer.placement,
        new_nodes({place.host: measured}, host_of, len(own)),
        measured.ways,
        buddy_checkpoint_bytes(config, len(plan.stages)),
    )
    horizon_s = config.join.horizon
    return None if estimate.pays(horizon_s, anyway=anyway) else estimate.decline_reason(horizon_s)


@dataclass(frozen=True)
class Admission:
    """Cost and benefit of admitting an extra host.

    All hosts wait while the state of its stages is transferred; then iterations may be shorter. The
    host is admitted if that saves more time within `join.horizon` than it costs, or if one of its
    stages has a single host now, with which the stage would be lost. The place of a lost host is
    always filled, as the run's own plan counts on it.

    Attributes:
        transfer_s: seconds that the others wait for the state transfer; infinite if no host with
            the state could be reached.
        saved: fraction by which iterations get shorter.
        is_redundant: whether each of its stages is already on several hosts.
    """

    transfer_s: float
    saved: float
    is_redundant: bool

    def pays(self, horizon_s: float, *, anyway: bool = False) -> bool:
        """Return whether to admit the host; `anyway` only requires that its state is reachable."""
        must_save = self.is_redundant and not anyway
        return self.transfer_s < (self.saved * horizon_s if must_save else math.inf)

    def decline_reason(self, horizon_s: float) -> str:
        """Explain why a host is not admitted."""
        if math.isinf(self.transfer_s):
            return "this host could not reach a host with the state of its stage"
        return (
            f"join declined: the state transfer stalls the run {self.transfer_s:.3g} s, faster "
            f"steps ({self.saved:.2%}) save {self.saved * horizon_s:.3g} s within join.horizon = "
            f"{horizon_s:g} s (join --anyway overrides this)"
        )


def admission(
    plan: Plan,
    host_of: Sequence[int],
    host: int,
    members: Collection[int],
    placement: Placement,
    new: Mapping[int, NewNode],
    ways: Mapping[int, MeasuredLink],
    sizes: Sequence[float],
) -> Admission:
    """Estimate cost and benefit if a host joins the members, under their placement.

    `plan` is the run's own, `host_of` the host of each node including extra places, and `new` the
    measured nodes of extra places. `ways` are the measured links to other hosts, and `sizes` the
    bytes of the states of stages. State is only transferred from hosts with a measured link.
    """
    now = {node for node, own in enumerate(host_of) if own in members}
    then = now | {node for node, own in enumerate(host_of) if own == host}
    left_out = [stage for stage, own in enumerate(placement) if now.isdisjoint(own)]
    following = with_stages(plan, placement, then, left_out)

    def iteration_s(nodes: Collection[int], stages: Placement) -> float:
        present = tuple(tuple(node for node in own if node in nodes) for own in stages)
        # A plan made by hand may have no prediction, so both are simulated.
        repaired = repair_plan(extend_case(plan, nodes, new), nodes, present, left_out)
        return simulate_plan(repaired).iteration_s

    served = [
        stage for stage, own in enumerate(following) if any(host_of[node] == host for node in own)
    ]
    owners = {
        stage: {host_of[node] for node in placement[stage] if node in now} for stage in served
    }
    transfer_s = sum(
        min(
            (way.latency_s + sizes[stage] / way.back for h, way in ways.items() if h in own),
            default=math.inf,
        )
        for stage, own in owners.items()
    )
    saved = 1.0 - iteration_s(then, following) / iteration_s(now, placement)
    return Admission(transfer_s, max(0.0, saved), all(len(own) > 1 for own in owners.values()))
