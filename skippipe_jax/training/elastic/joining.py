"""Joining a run by the address of any of its hosts.

ask and fetch -> find a place -> compile and measure -> join -> train as a rejoining host
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.cluster.joining import joined
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.connections.directory import HOST_ID
from skippipe_jax.connections.join_offer import Place
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.models.footprint import buddy_checkpoint_bytes
from skippipe_jax.program.compiler import hosts_of_nodes
from skippipe_jax.runtime.compilation import enable_compilation_cache
from skippipe_jax.runtime.compiled_ahead import compile_ahead
from skippipe_jax.runtime.threads import give_collectives_threads
from skippipe_jax.runtime.topology import spreads_of_host
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.elastic.admission import admission
from skippipe_jax.training.elastic.extra_hosts import host_by_node
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
    membership = joined(
        config.cluster,
        seeking.asked,
        seeking.offer.hosts,
        place.host,
        last_addresses=seeking.addresses,
        run=seeking.run,
        is_joiner=True,
        spare=config.join.places,
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
    own = spreads_of_host(config, plan.case, host_of, place.host)
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
