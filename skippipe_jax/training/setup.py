"""Setup of a run on all hosts at a start or resume, and of a host that rejoins.

Host 0 checks its own input before it writes the run folder. The others read the plans there and
report what they opened. `build_runtime` then compares the weights that hosts have read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan

from skippipe_jax import log
from skippipe_jax.cluster.agreement import from_host_0, gather, hear, tell
from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import Config, DataConfig, StagePartition, require_same_run
from skippipe_jax.config.data import BYTES, TOKENIZER_FOLDER
from skippipe_jax.config.model import PLATFORM_OF
from skippipe_jax.config.resume import json_digest, settings
from skippipe_jax.data.batches import Batch, TrainingBatches, check_vocabulary, tokenizer_of
from skippipe_jax.data.chat import template_warning
from skippipe_jax.data.documents import require_outside
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.models.attention import implementation_of, kernel_fault
from skippipe_jax.models.in_flight import memory_warnings
from skippipe_jax.models.planned_case import size_mismatches
from skippipe_jax.profiling.case import (
    Profile,
    check_template,
    profile_from_measured,
    read_measured,
)
from skippipe_jax.profiling.cluster import measure, name_and_devices
from skippipe_jax.program.compiler import Program, compile_plans, hosts_of_nodes
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.reporting.timelines import draw_recorded
from skippipe_jax.runtime.threads import give_collectives_threads
from skippipe_jax.runtime.topology import require_meshes, unused_devices_warnings
from skippipe_jax.runtime.transport import Transfers, open_servers, open_transfers
from skippipe_jax.storage.checkpoint import (
    DATA,
    Checkpoint,
    ReplicaStates,
    latest_step,
    replica_name,
)
from skippipe_jax.storage.checkpointer import Checkpointer
from skippipe_jax.storage.joined_folder import is_joined, require_not_joined
from skippipe_jax.storage.loading import load_data_state, parts_for_stages
from skippipe_jax.storage.mirror import Mirror
from skippipe_jax.storage.recording import remove_recordings
from skippipe_jax.storage.restore import CheckpointSearch
from skippipe_jax.storage.run_dir import CASE, PLAN, RunDir
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.callbacks.trackers import require_trackers
from skippipe_jax.training.initial_weights import (
    RunWeights,
    WeightSource,
    open_initial_weights,
    require_own_tokens,
    tokenizer_warning,
)
from skippipe_jax.training.planning import check_deadline, log_planned_time, make_plans
from skippipe_jax.training.report import GenerationReport, SessionPlan, exchange_reports
from skippipe_jax.training.validation import read_held_out

# Seconds that hosts wait for host 0 while it fetches a run from its copy, or completes the copy.
COPYING_S = 3600.0
# Seconds that hosts wait for each other while each reads all of its parts of a checkpoint.
CHECKPOINT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class HostSetup:
    """Setup of a host before the exchange with the others.

    Attributes:
        schedule: the plans of the run.
        host_of: the host of each node.
        programs: the programs of this host, by the names of the plans.
        data: the microbatches of the run, if this host serves a data node.
        held_out: the microbatches of the held-out text, if this host serves a data node.
        weights: the initial weights of a new run with `init_from`.
        mirror: the copy of the run folder, on the host that starts as 0, with `checkpoint.copy_to`.
    """

    schedule: Schedule
    host_of: tuple[int, ...]
    programs: Mapping[str, Program]
    data: TrainingBatches | None = None
    held_out: tuple[Batch, ...] = ()
    weights: WeightSource | None = None
    mirror: Mirror | None = None

    @property
    def plan(self) -> Plan:
        """Plan of the run itself, not of its recipe."""
        return self.schedule.plans[OWN]

    def after(
        self, agreed: SessionPlan, transfers: Transfers, checkpoint: Checkpoint | None = None
    ) -> RunSetup:
        """Return this setup together with the results of the exchange of reports."""
        agreement = {"agreed": agreed, "transfers": transfers, "checkpoint": checkpoint}
        return RunSetup(**vars(self) | agreement)


@dataclass(frozen=True, kw_only=True)
class RunSetup(HostSetup):
    """Setup that the hosts that train have agreed on, and this host's part of it.

    Attributes:
        agreed: the session plan derived from the reports of all hosts.
        transfers: the transfer servers of this host.
        checkpoint: the checkpoint from which a run resumes, if there is one.
    """

    agreed: SessionPlan
    transfers: Transfers
    checkpoint: Checkpoint | None


def setup_run(
    config: Config, host: Membership, lock: RunLock, *, resume: bool, config_folder: Path
) -> RunSetup:
    """Agree with all hosts on the first step and the plans of a run; all call this together.

    Host 0 sends the digest of the plans and the list of checkpoints; then all exchange reports of
    what they opened. A third exchange follows when the stages are open (`build_runtime`). There are
    more with `plan.measure`, and if the newest checkpoint is damaged.

    `lock` protects the folder of the run from other runs. `config_folder` holds the link table of a
    case inside the config.

    Raises:
        InputError: if the configuration, the plan, the data, the weights or the checkpoint cannot
            be used.
    """
    _require_reaching_collectives(config, host)
    if not resume:
        require_own_tokens(config)
    folder, leads = Path(config.run_dir), host.index == 0
    url = config.checkpoint.copy_to
    mirror = Mirror(url) if url is not None and leads else None
    claim_run_dir = partial(_claim_run_dir, config, mirror, lock, resume=resume)
    # With `plan.measure` the cluster is measured over its own links.
    transfers, profile = None, None
    # A checkpoint of another run is read in full to verify it, so it is opened only once.
    open_weights = cache(
        lambda: None if resume else open_initial_weights(config, anew=host.index == 0)
    )
    if config.plan.measure:
        claim = partial(_claim_to_measure, config, host, lock, claim_run_dir, resume=resume)
        needs_planning, transfers, profile = _measure_or_reuse(config, host, claim, open_weights)
    else:
        needs_planning = leads and claim_run_dir()
    # Host 0 makes the plans or reads those of the run; the others wait until it has written them.
    steps: Sequence[int] = ()
    if not leads:
        schedule, steps = _receive_from_leader(config, host)
    elif needs_planning:
        schedule = make_plans(config, config_folder, None if profile is None else profile.case)
    else:
        schedule = RunDir(folder).schedule()
    setup = _open_inputs(config, host, schedule, mirror, open_weights)
    parts = parts_to_restore(config, setup)
    search = CheckpointSearch(folder, host, parts, mirror)
    if leads:
        _begin_run_dir(config, setup, lock, profile, resume=resume, needs_planning=needs_planning)
        steps = search.saved()
        if host.count > 1 and not host.is_distributed:
            _warn_of_missing_links(folder)
        message = {"config": settings(config), "plans": _digest_of_plans(schedule), "steps": steps}
        tell(host, "run", lambda: message)
    if host.is_distributed:
        # In `distributed` mode the first access to devices is collective.
        _require_attention(config)
    transfers = transfers or open_servers(host)
    with close_on_error(transfers):
        setup = _agreed(config, host, setup, transfers, search, steps)
        transfers.connect(setup.agreed.endpoints)
        if leads:
            search.clear(setup.checkpoint)
            step = 0 if setup.checkpoint is None else setup.checkpoint.step
            _log_plan(config, setup, step)
            if resume and step >= config.train.steps:
                log.output(f"already finished: step {step} of {config.train.steps}")
            if resume:
                truncate_run(config, step)
        if host.count > 1 and not host.is_distributed:
            lock.share(host.process)
    return setup


@contextmanager
def close_on_error(transfers: Transfers) -> Iterator[None]:
    """Close the transfer servers if the block raises an error."""
    try:
        yield
    except BaseException:
        transfers.close()
        raise


def _measure_or_reuse(
    config: Config,
    host: Membership,
    claim: Callable[[], dict[str, Any]],
    open_weights: Callable[[], WeightSource | None],
) -> tuple[bool, Transfers | None, Profile | None]:
    """Measure the cluster, unless the resumed run was measured on these hosts.

    All hosts call this together, and host 0 claims the folder of the run. Returns whether plans
    must be made, the transfer servers if links were measured, and on host 0 the profile to plan
    for.
    """
    timeout_s = config.cluster.connect_timeout_s
    patience_s = timeout_s + (0.0 if config.checkpoint.copy_to is None else COPYING_S)
    claimed = from_host_0(host, "claim", claim, patience_s)
    if host.index != 0:
        require_same_start(config, host, claimed["config"])
    needs_planning, recorded = claimed["needs_planning"], claimed["measured"]
    output = partial(log.on_leader, host.index, log_line=log.output)
    if not needs_planning:
        if recorded is not None:
            output(f"not measured again: the run keeps its plan, measured at {recorded['at']}")
        return False, None, None
    if recorded is not None:
        nodes = check_template(config, host.count).count(host.index)
        _give_threads(config, host, nodes, None)
        own = partial(name_and_devices, config, host)
        devices = gather(host, "claim/devices", own, timeout_s)
        if [*devices.values()] != recorded["hosts"]:
            output(
                f"measuring again: hosts or devices differ from those measured at {recorded['at']}"
            )
        elif recorded["is_usable"]:
            output(
                f"not measured again: making a new plan from the measurement of {recorded['at']}"
            )
            return True, None, _recorded(config, host)[1] if host.index == 0 else None
    return True, *_measure_cluster(config, host, open_weights)


def _recorded(config: Config, host: Membership) -> tuple[Mapping[str, Any] | None, Profile | None]:
    """Return the recorded measurement of the run, and the profile from it under `config`."""
    measured = read_measured(Path(config.run_dir) / CASE)
    return measured, None if measured is None else profile_from_measured(
        config, measured, host.count
    )


def _measure_cluster(
    config: Config, host: Membership, open_weights: Callable[[], WeightSource | None]
) -> tuple[Transfers, Profile | None]:
    """Measure the cluster, together with all hosts; only host 0 returns a profile."""
    if host.count == 1:
        # Report wrong inputs before spending time on measuring.
        open_text(config)
        open_weights()
    nodes = check_template(config, host.count).count(host.index)
    _give_threads(config, host, nodes, None)
    transfers = open_transfers(host)
    links = transfers.links()
    output = partial(log.on_leader, host.index, log_line=log.output)
    return transfers, measure(config, host, links, output)


def _open_inputs(
    config: Config,
    host: Membership,
    schedule: Schedule,
    mirror: Mirror | None,
    open_weights: Callable[[], WeightSource | None],
) -> HostSetup:
    """Open the inputs of this host for `schedule`: programs, text, and initial weights."""
    plan, host_of = schedule.plans[OWN], hosts_for(config, schedule, host.count)
    _give_threads(config, host, host_of.count(host.index), plan.case)
    programs = compile_plans(schedule.plans, host_of, host.index)
    serves_data = not {*plan.stages[0]}.isdisjoint(programs[OWN].nodes)
    data, held_out = open_text(config, serves_data=serves_data)
    config.model.stage_partition(len(plan.stages))
    if not host.is_distributed:
        _require_attention(config)
    return HostSetup(
        schedule=schedule,
        host_of=host_of,
        programs=programs,
        data=data,
        held_out=held_out,
        weights=open_weights(),
        mirror=mirror,
    )


def hosts_for(config: Config, schedule: Schedule, hosts: int) -> tuple[int, ...]:
    """Check that so many hosts can train by the plans; return the host of each node.

    Raises:
        InputError: if they cannot.
    """
    case = schedule.plans[OWN].case
    check_deadline(config, schedule.longest_s(config.averaging))
    host_of = hosts_of_nodes(len(case.nodes), hosts, config.cluster.host_of_node)
    require_meshes(config, case)
    return host_of


def _begin_run_dir(
    config: Config,
    setup: HostSetup,
    lock: RunLock,
    profile: Profile | None,
    *,
    resume: bool,
    needs_planning: bool,
) -> None:
    """Write the folder of a run on host 0, once all inputs are checked.

    For a resumed run, write its new plans if there are any.
    """
    require_trackers(config.log)
    if not resume:
        lock.acquire()
        RunDir(config.run_dir).require_new()  # Another process may have been faster.
    plan = setup.plan
    warnings = tokenizer_warning(setup.weights, config) + size_mismatches(config, plan.case)
    chats = [source for source in config.data.sources() if source.kind == "chat"]
    if chats:
        tokenizer = load_tokenizer(tokenizer_of(with_run_tokenizer(config)))
        warnings += template_warning(chats, tokenizer)
    for sentence in warnings + memory_warnings(config, plan.case, plan.stage_of):
        log.warning(sentence)
    folder, weights = Path(config.run_dir), setup.weights
    if not resume:
        parent = weights.provenance() if isinstance(weights, RunWeights) else None
        RunDir(folder).write_parent(parent)
    elif needs_planning:
        _archive_plan(folder, setup.schedule)
    if needs_planning:
        RunDir(folder).create(config, setup.schedule)
    if weights is not None and weights.matches_tokenizer(config.data):
        weights.copy_tokenizer(folder / TOKENIZER_FOLDER)
    if profile is not None:
        profile.save(folder / CASE)
    RunDir(folder).keep_tokenizer(config.data)
    if not resume:
        RunDir(folder).keep_chat_template(config.data)


def _agreed(
    config: Config,
    host: Membership,
    setup: HostSetup,
    transfers: Transfers,
    search: CheckpointSearch,
    steps: Sequence[int],
) -> RunSetup:
    """Exchange reports, and agree on the checkpoint to resume from: one of `steps`, if any."""
    damaged = search.look(steps[-1]) if steps else None
    newest = search.opened.get(steps[-1]) if steps else None
    member: dict[str, Any] = {}
    if host.count > 1 and not host.is_distributed:
        nodes = [node for node, own in enumerate(setup.host_of) if own == host.index]
        member = host.here() | {"nodes": nodes}
    report = own_report(
        setup,
        member=member,
        process=host.process,
        endpoint=transfers.endpoint,
        microbatches_read=_microbatches_read(setup, newest),
        damaged=damaged,
    )
    # Hosts that verify a checkpoint read all of their parts.
    timeout_s = CHECKPOINT_S if steps else config.cluster.connect_timeout_s
    agreed = exchange_reports(host, report, timeout_s)
    _require_same_text(config, host, agreed)
    for line in [*agreed.too_long, *_data_passes(config, setup)]:
        log.on_leader(host.index, line, log.output)
    all_damaged = [own.damaged for own in agreed.reports]
    checkpoint = search.newest(steps, all_damaged)
    # Positions reported for a damaged checkpoint are invalid, even if it was restored since.
    if any(parts is not None for parts in all_damaged):
        own = _microbatches_read(setup, checkpoint)
        read_by_host = gather(host, "checkpoint/read", lambda: own, timeout_s)
        agreed = replace(agreed, microbatches_read=max(read_by_host.values()))
    return setup.after(agreed, transfers, checkpoint)


def _data_passes(config: Config, setup: HostSetup) -> list[str]:
    """Return a line on how often the run reads its text, if this host reads it."""
    if setup.data is None:
        return []
    steps, available = config.train.steps, setup.data.sequences
    read = steps * len(setup.plan.microbatches) * config.data.microbatch_size
    times = f"{read / available:.3g} times that"
    return [f"the text has {available:,} sequences; {steps:,} steps read {times}"]


def _microbatches_read(setup: HostSetup, checkpoint: Checkpoint | None) -> int:
    """Return the microbatches read before a checkpoint; 0 if this host reads no text."""
    if checkpoint is None or setup.data is None:
        return 0
    return setup.data.position(load_data_state(checkpoint))


def setup_rejoining_host(config: Config, host: Membership) -> HostSetup:
    """Prepare the setup of a host that rejoins a live run, without the other hosts.

    Raises:
        InputError: if the configuration differs from that of the run.
    """
    folder = Path(config.run_dir)
    if not is_joined(folder):
        require_same_run(config, RunDir(folder).config())
    schedule = RunDir(folder).schedule()
    case = schedule.plans[OWN].case
    host_of = hosts_of_nodes(len(case.nodes), host.count, config.cluster.host_of_node)
    _give_threads(config, host, host_of.count(host.index), case)
    _require_attention(config)
    setup = HostSetup(schedule=schedule, host_of=host_of, programs={})
    if host.index >= host.count:  # The others assign its stage.
        return setup
    programs = compile_plans(schedule.plans, host_of, host.index)
    serves_data = not {*setup.plan.stages[0]}.isdisjoint(programs[OWN].nodes)
    data, held_out = None, ()
    with suppress(InputError):  # A host that gets a data node tries again, with a warning.
        data, held_out = open_text(config, serves_data=serves_data)
    return replace(setup, programs=programs, data=data, held_out=held_out)


def parts_to_restore(config: Config, setup: HostSetup) -> Callable[[Checkpoint], set[str]]:
    """Return a function that lists the parts of a checkpoint to read: stages and data position."""
    plan = setup.plan
    cut = config.model.stage_partition(len(plan.stages))
    nodes = setup.programs[OWN].nodes
    stages = {plan.stage_of[node] for node in nodes}
    data = set() if setup.data is None else {DATA}

    def parts(checkpoint: Checkpoint) -> set[str]:
        own: set[str] = set()
        if restores_replica_states(config, plan, checkpoint):
            places = {node: (s, p) for s, of in enumerate(plan.stages) for p, node in enumerate(of)}
            own = {replica_name(*places[node]) for node in nodes} & checkpoint.record.parts()
        return parts_for_stages(checkpoint, cut, stages) | own | data

    return parts


def restores_replica_states(config: Config, plan: Plan, checkpoint: Checkpoint) -> bool:
    """Return whether replicas resume from the separate states that a checkpoint holds.

    They do if the number of replicas and of blocks of each stage, and the averaging, are unchanged.
    """
    cut = config.model.stage_partition(len(plan.stages))
    own = ReplicaStates.of(plan.stages, asdict(config.averaging))
    return checkpoint.record.replica_states == own and checkpoint.record.stage_layers == tuple(cut)


def truncate_run(config: Config, step: int, *, is_own: bool = False) -> None:
    """Prepare the folder of a run on host 0 to continue after `step`.

    `is_own`: this process was the last to write the metrics.
    """
    RunDir(config.run_dir).truncate_after(step, config, is_own=is_own)
    remove_recordings(Path(config.run_dir), after=step)


def own_report(setup: HostSetup, **known: Any) -> GenerationReport:
    """Return the report of this host: its devices, its text, and the fields in `known`."""
    data = setup.data
    report = GenerationReport(
        device_kinds=[device.device_kind for device in jax.local_devices()],
        serves_data=data is not None,
        data_fingerprint=None if data is None else data.fingerprint,
        too_long=[] if data is None else data.too_long,
        held_out_microbatches=len(setup.held_out),
    )
    return replace(report, **known)


def _log_plan(config: Config, setup: RunSetup, step: int) -> None:
    """Log the time that the remaining steps will take, and devices that the plan does not use."""
    log_planned_time(config, setup.schedule, step)
    kinds = [own.device_kinds for own in setup.agreed.reports]
    meshes = config.node.meshes(setup.plan.case)
    for warning in unused_devices_warnings(setup.host_of, kinds, meshes):
        log.warning(warning)


def open_checkpointer(
    config: Config, host: Group, cut: StagePartition, mirror: Mirror | None
) -> Checkpointer:
    """Open the checkpointer of the run, on every host."""
    url = config.checkpoint.copy_to
    if host.index != 0:
        mirror = None
    elif mirror is None and url is not None:
        mirror = _mirror_of_new_leader(url)
    return Checkpointer(
        Path(config.run_dir),
        host,
        stage_layers=cut,
        config=config.checkpoint,
        mirror=mirror,
        generation=host.generation.number,
        on_commit=host.saved,
    )


def _mirror_of_new_leader(url: str) -> Mirror | None:
    """Open the copy that a new leader continues; warn and return None if that fails."""
    try:
        mirror = Mirror(url)
        mirror.steps()  # Do not copy again what others have copied.
    except Exception as error:  # The file system may raise anything.
        log.warning(f"{error}; checkpoints are no longer copied")
        return None
    return mirror


def with_run_tokenizer(config: Config) -> DataConfig:
    """Return the data section, with the tokenizer saved in the run folder."""
    if tokenizer_of(config.data) == BYTES:
        return config.data
    return RunDir(config.run_dir).with_tokenizer(config.data)


def _claim_run_dir(config: Config, mirror: Mirror | None, lock: RunLock, *, resume: bool) -> bool:
    """Refuse a folder that holds another run, and fetch the run from its copy if it has one.

    The folder of a resumed run is locked before anything is fetched into it.

    Returns whether plans must be made: for a new run, and for a resumed run whose section `plan` or
    `recipe` has changed.
    """
    folder = Path(config.run_dir)
    if not resume:
        RunDir(folder).require_new()
    elif mirror is not None or RunDir(folder).is_run:
        lock.acquire()
    if mirror is not None:
        mirror.prepare(folder, resume=resume)
    if not resume:
        return True
    require_not_joined(folder)
    saved = RunDir(folder).config()
    for name, now, before in require_same_run(config, saved):
        log.output(f"resuming with {name} = {now!r}, previously {before!r}")
    before = saved.plan, saved.recipe_in_steps
    return (config.plan, config.recipe_in_steps) != before


def _claim_to_measure(
    config: Config,
    host: Membership,
    lock: RunLock,
    claim_run_dir: Callable[[], bool],
    *,
    resume: bool,
) -> dict[str, Any]:
    """Claim the folder of the run, and return a message to the other hosts.

    It holds the settings of host 0, when and on which hosts the run was measured, if it was, and
    whether that measurement may be used for a new plan.
    """
    needs_planning = claim_run_dir()
    message = {"needs_planning": needs_planning, "config": settings(config), "measured": None}
    if not resume:
        lock.acquire()
        return message
    measured, profile = _recorded(config, host)
    # Earlier versions did not record devices.
    if measured is not None and all("devices" in of for of in measured["hosts"]):
        message["measured"] = {
            "at": measured["at"],
            "hosts": [[of["name"], *of["devices"]] for of in measured["hosts"]],
            "is_usable": profile is not None,
        }
    return message


def require_same_start(config: Config, host: Membership, theirs: Mapping[str, str]) -> None:
    """Refuse a configuration or a run folder that differs from that of host 0.

    Raises:
        InputError: naming the key that differs, or the folder.
    """
    for key, own in settings(config).items():
        if own != theirs.get(key):
            problem = f"host {host.index} has this, and host 0 has {theirs.get(key)!r}"
            raise InputError(key, own, problem, "Start all hosts with the same configuration")
    folder = Path(config.run_dir).absolute()
    # Listing the parent makes a network file system look for new entries.
    if not (folder.parent.is_dir() and folder.name in os.listdir(folder.parent)):
        raise _not_shared_error(config, host)


def _not_shared_error(config: Config, host: Membership) -> InputError:
    return InputError(
        "run_dir",
        config.run_dir,
        f"host {host.index} does not find the files that host 0 wrote to it",
        "Set a folder that all hosts share; without one, a host can join a running job: skippipe "
        "join",
    )


def _give_threads(config: Config, host: Membership, nodes: int, case: Case | None) -> None:
    give_collectives_threads(config, nodes, case, is_distributed=host.is_distributed)


def _receive_from_leader(config: Config, host: Membership) -> tuple[Schedule, list[int]]:
    """Return the plans that host 0 wrote to the run folder, and the steps of its checkpoints.

    Raises:
        InputError: if this host was started with another configuration or in another folder.
    """
    # Host 0 may search for plans first, and compile the search for half a minute before.
    searches = 1 + config.recipe_in_steps.max_searches
    patience_s = config.cluster.connect_timeout_s + 2 * searches * config.plan.budget_s
    if config.checkpoint.copy_to is not None:  # Host 0 may fetch the run.
        patience_s += COPYING_S
    theirs = hear(host, "run", [0], patience_s)[0]
    require_same_start(config, host, theirs["config"])
    folder = Path(config.run_dir)
    schedule = RunDir(folder).schedule() if (folder / PLAN).exists() else None
    if schedule is None or _digest_of_plans(schedule) != theirs["plans"]:
        raise _not_shared_error(config, host)
    return schedule, theirs["steps"]


def _digest_of_plans(schedule: Schedule) -> str:
    return json_digest({name: plan.to_json() for name, plan in sorted(schedule.plans.items())})


def open_text(
    config: Config, *, serves_data: bool = True
) -> tuple[TrainingBatches | None, tuple[Batch, ...]]:
    """Open the training and the held-out text; None and () for a host that serves no data node.

    Raises:
        InputError: if it cannot be used.
    """
    for source in config.data.sources():
        require_outside(source, config.run_dir, "run_dir")
    text = with_run_tokenizer(config)
    check_vocabulary(config.model.vocabulary_size, load_tokenizer(tokenizer_of(text)))
    return (TrainingBatches(text), read_held_out(config, text)) if serves_data else (None, ())


def try_open_text(config: Config, setup: HostSetup) -> HostSetup:
    """Open the text of the run if this host has it; otherwise warn."""
    if setup.data is not None:
        return setup
    try:
        data, held_out = open_text(config)
    except InputError as error:
        log.warning(f"this host cannot read the training text: {error}")
        return setup
    return replace(setup, data=data, held_out=held_out)


def _require_reaching_collectives(config: Config, host: Membership) -> None:
    """Refuse collectives between hosts in `independent` mode."""
    averaging = config.network.averaging
    if averaging == "collective" and host.count > 1 and not host.is_distributed:
        raise InputError(
            "network.averaging",
            averaging,
            "requires cluster.runtime: distributed, as JAX collectives do not connect independent "
            "hosts",
            "Set auto or ring, or cluster.runtime: distributed",
        )


def _require_attention(config: Config) -> None:
    """Refuse an attention implementation that this machine lacks or that is faulty here."""
    model, platform = config.model, jax.default_backend()
    needed = PLATFORM_OF.get(model.attention)
    if needed not in (None, platform):
        raise InputError(
            "model.attention",
            model.attention,
            f"needs a {needed.upper()}, but JAX found only {platform} devices",
            "Set auto, which selects a kernel for each device",
        )
    kernel = implementation_of(model, config.data.sequence_length, platform)
    if kernel in PLATFORM_OF:
        fault = kernel_fault(kernel, model, is_packed=config.data.packing == "documents")
        if fault:
            raise InputError(
                "model.attention", model.attention, f"{kernel} {fault}", "Set blockwise"
            )


def _warn_of_missing_links(folder: Path) -> None:
    """Warn if the last two hosts of a run cannot decide which of them continues."""
    if not RunDir(folder).supports_links():
        log.warning(
            f"{folder} is on a file system without hard links: if one of the last two hosts fails, "
            "the run ends with exit code 75"
        )


def _archive_plan(folder: Path, schedule: Schedule) -> None:
    """Report that a run continues under another plan, and draw the recordings of the old one."""
    step = latest_step(folder) or 0
    change = plan_change(RunDir(folder).schedule().plan(step), schedule.plan(step), step)
    if change:
        log.output(change)
    draw_recorded(folder)
    remove_recordings(folder, after=0)


def plan_change(before: Plan, after: Plan, step: int) -> str:
    """Describe how the plan of a run changes after `step`; "" if size and time stay the same."""
    extents = [
        f"{len(plan.stages)} stages on {len(plan.case.nodes)} nodes" for plan in (before, after)
    ]
    seconds = [f"{plan.predicted.iteration_s:.3g}" for plan in (before, after)]
    if extents[0] == extents[1] and seconds[0] == seconds[1]:
        return ""
    moved = f"{extents[0]} -> {extents[1]}; " if extents[0] != extents[1] else ""
    return (
        f"plan changed after step {step}: {moved}predicted iteration {seconds[0]} s -> "
        f"{seconds[1]} s"
    )


def _require_same_text(config: Config, host: Membership, agreed: SessionPlan) -> None:
    """Raise InputError on a host that reads other text than the first host with a data node."""
    texts = enumerate(own.data_fingerprint for own in agreed.reports)
    read = {other: text for other, text in texts if text is not None}
    first = min(read)
    if read.get(host.index, read[first]) != read[first]:
        raise InputError(
            "data.source",
            config.data.source,
            f"the text differs between host {host.index} and host {first}",
            "Use the same files on all hosts with data nodes",
        )
