"""What all hosts settle before the first step, in the order in which they do it.

Host 0 writes the run folder, and nothing before all that was given has been found good. The other
hosts read there what it has written. All that can be wrong with the input is found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan

from skippipe_jax.cluster.agreement import agree, from_host_0, gather, hear, tell
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import (
    Config,
    DataConfig,
    StageCut,
    require_same_run,
    to_tree,
)
from skippipe_jax.config.attention import PLATFORM_OF
from skippipe_jax.config.resume import digest, settings
from skippipe_jax.config.tokenizer import BYTES, TOKENIZER_FOLDER
from skippipe_jax.data.batches import Batch, TrainingBatches, check_vocabulary, tokenizer_of
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.models.attention import fault_of, implementation_of
from skippipe_jax.models.in_flight import short_of_memory
from skippipe_jax.models.planned_case import differing_sizes
from skippipe_jax.profiling.case import Profile, check_template
from skippipe_jax.profiling.cluster import measure
from skippipe_jax.program.compiler import Program, compile_plans, hosts_of_nodes
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.reporting.timelines import draw_recorded
from skippipe_jax.runtime.threads import give_collectives_threads
from skippipe_jax.runtime.topology import require_meshes, sharding_of
from skippipe_jax.runtime.transport import Transfers, open_transfers
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.hold import Hold
from skippipe_jax.storage.joined_folder import is_joined, require_not_joined
from skippipe_jax.storage.kept_tokenizer import keep_tokenizer, with_tokenizer_of_run
from skippipe_jax.storage.layout import latest_step
from skippipe_jax.storage.mirror import Mirror
from skippipe_jax.storage.parent import Parent
from skippipe_jax.storage.recording import remove_recordings
from skippipe_jax.storage.writer import CheckpointWriter
from skippipe_jax.training.first_weights import Weights, about_tokenizer, find_weights
from skippipe_jax.training.messages import on_host_0, say, say_meanwhile
from skippipe_jax.training.planning import make_plans, require_patience
from skippipe_jax.training.report import GenerationReport, SessionPlan
from skippipe_jax.training.trackers import require_trackers
from skippipe_jax.training.validation import read_held_out

# How long hosts wait for host 0 while it fetches a run from its copy, or completes the copy.
COPYING_S = 3600.0


@dataclass(frozen=True)
class Settled:
    """What the hosts of a run have settled.

    Attributes:
        schedule: the plans of the run.
        host_of: the host of each node.
        programs: those of this host, by the names of the plans.
        data: the microbatches of the run, if a data node is served here.
        held_out: those of its held-out text, if a data node is served here.
        weights: those that a new run begins with, if it is told where they come from.
        transfers: the transfer servers of this host, once it has met the others.
        mirror: the copy of the run folder, on the host that begins as 0, if there shall be one.
        agreed: what follows from what all hosts have reported, once they have.
    """

    schedule: Schedule
    host_of: tuple[int, ...]
    programs: Mapping[str, Program]
    data: TrainingBatches | None
    held_out: tuple[Batch, ...]
    weights: Weights | None
    transfers: Transfers | None
    mirror: Mirror | None
    agreed: SessionPlan | None = None

    @property
    def plan(self) -> Plan:
        """The run's own plan."""
        return self.schedule.plans[OWN]


def settle(
    config: Config,
    host: Membership,
    hold: Hold,
    *,
    resume: bool,
    config_folder: Path,
) -> Settled:
    """Settle all that the run needs; all hosts call this together.

    `hold` is taken on host 0. `config_folder` is where the link table of a case inside the config
    lies.

    Raises:
        InputError: if the configuration, the plan, the data or the weights cannot be used.
    """
    _require_reaching_collectives(config, host)
    # Whose plans? A run that is resumed goes on under its own, unless it is told of others.
    url = config.checkpoint.copy_to
    mirror = Mirror(url) if url is not None and host.index == 0 else None
    plans_anew = from_host_0(
        host,
        "plans_anew",
        lambda: _opened_folder(config, mirror, hold, resume=resume),
        config.cluster.connect_timeout_s + (0.0 if url is None else COPYING_S),
    )
    # For what cluster? One that is not described is measured, by its own links.
    transfers, profile = None, None
    if config.plan.measure and plans_anew:
        nodes = check_template(config, host.count).count(host.index)
        _give_threads(config, host, nodes, None)
        transfers = open_transfers(config, host)
        links = transfers.links({host.index: sharding_of((jax.local_devices()[0],))})
        profile = measure(config, host, links, on_host_0(host.index, say))
    # By which plans? Host 0 makes them; the others go on when it has written them.
    if host.index != 0:
        schedule = _schedule_of_host_0(config, host)
    elif plans_anew:
        schedule = make_plans(config, config_folder, None if profile is None else profile.case)
    else:
        schedule = run_folder.saved_schedule(Path(config.run_dir))
    plan = schedule.plans[OWN]
    require_patience(config, schedule.longest_s(config.averaging))
    host_of = hosts_of_nodes(len(plan.case.nodes), host.count, config.cluster.host_of_node)
    require_meshes(config, plan.case)
    _give_threads(config, host, host_of.count(host.index), plan.case)
    compiled = compile_plans(schedule.plans, host_of)
    programs = {name: of_hosts[host.index] for name, of_hosts in compiled.items()}
    # On what text, and from what weights?
    data = open_data(config, plan, programs[OWN])
    held_out = () if data is None else read_held_out(config, data_config(config))
    config.model.layers_of_stages(len(plan.stages))
    if not host.is_distributed:
        _require_attention(config)
    weights = None if resume else find_weights(config, anew=host.index == 0)
    if host.index == 0:
        require_trackers(config.log)
        if not resume:
            hold.take()
            run_folder.require_new(Path(config.run_dir))  # Another may have been quicker.
        warnings = about_tokenizer(weights, config) + differing_sizes(config, plan.case)
        for sentence in warnings + short_of_memory(config, plan.case, plan.stage_of):
            say_meanwhile(f"warning: {sentence}")
        _write_folder(config, schedule, weights, profile, resume=resume, plans_anew=plans_anew)
        if host.count > 1 and not host.is_distributed:
            _warn_of_missing_links(Path(config.run_dir))
        tell(host, "run", lambda: _description(config, schedule))
    if host.is_distributed:
        # The first look at devices is one that all hosts take together.
        _require_attention(config)
    data_hosts = {host_of[node] for node in plan.stages[0]}
    if data is not None:
        _require_same_text(config, host, data_hosts, data)
    _say_what_is_too_long(config, host, min(data_hosts), data)
    if transfers is None:
        transfers = open_transfers(config, host)
    return Settled(schedule, host_of, programs, data, held_out, weights, transfers, mirror)


def settle_alone(config: Config, host: Membership) -> Settled:
    """What a host knows by itself that comes back to a run which goes on without it.

    Raises:
        InputError: if the configuration is another than that of the run.
    """
    folder = Path(config.run_dir)
    if not is_joined(folder):
        require_same_run(config, run_folder.saved_config(folder, "run_dir"))
    schedule = run_folder.saved_schedule(folder)
    case = schedule.plans[OWN].case
    host_of = hosts_of_nodes(len(case.nodes), host.count, config.cluster.host_of_node)
    _give_threads(config, host, host_of.count(host.index), case)
    _require_attention(config)
    if host.index >= host.count:  # Which stage it serves the others say.
        return Settled(schedule, host_of, {}, None, (), None, None, None)
    compiled = compile_plans(schedule.plans, host_of)
    programs = {name: of_hosts[host.index] for name, of_hosts in compiled.items()}
    data, held_out = None, ()
    with suppress(InputError):  # Who is given a data node tries again, and then says why.
        data = open_data(config, schedule.plans[OWN], programs[OWN])
        held_out = () if data is None else read_held_out(config, data_config(config))
    return Settled(schedule, host_of, programs, data, held_out, None, None, None)


def go_on(config: Config, step: int, *, is_own: bool = False) -> None:
    """Make the folder of a run ready to go on after `step`; on host 0.

    `is_own`: this process has written the metrics, and nobody since.
    """
    folder, steps = Path(config.run_dir), config.train.steps
    if step >= steps:
        say(f"nothing is left to do: the run is at step {step} of {steps}")
    run_folder.continue_run(folder, config, step, is_own=is_own)
    remove_recordings(folder, after=step)


def own_report(settled: Settled) -> GenerationReport:
    """What this host tells all others of its devices and its text."""
    data = settled.data
    return GenerationReport(
        device_kinds=[device.device_kind for device in jax.local_devices()],
        serves_data=data is not None,
        data_fingerprint=None if data is None else data.fingerprint,
        held_out_microbatches=len(settled.held_out),
    )


def open_writer(
    config: Config, host: Membership | Team, cut: StageCut, mirror: Mirror | None
) -> CheckpointWriter:
    """What writes the checkpoints of the run; all hosts open one."""
    is_team = isinstance(host, Team)
    url = config.checkpoint.copy_to
    if host.index != 0:
        mirror = None
    elif mirror is None and url is not None:
        mirror = _mirror_of_new_leader(url)
    return CheckpointWriter(
        Path(config.run_dir),
        host,
        stage_layers=cut,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        mirror=mirror,
        generation=host.generation.number if is_team else 0,
        when_whole=host.saved if is_team else lambda _: None,
    )


def _mirror_of_new_leader(url: str) -> Mirror | None:
    """The copy goes on by whoever leads, if that host can write it: else the run without a copy."""
    try:
        mirror = Mirror(url)
        mirror.steps()  # What others have copied is not missing.
    except Exception as error:  # whatever the file system raises
        say_meanwhile(f"warning: {error}; checkpoints are copied no longer")
        return None
    return mirror


def data_config(config: Config) -> DataConfig:
    """What is read, with the tokenizer that the run keeps."""
    if tokenizer_of(config.data) == BYTES:
        return config.data
    return with_tokenizer_of_run(config.data, Path(config.run_dir))


def _opened_folder(config: Config, mirror: Mirror | None, hold: Hold, *, resume: bool) -> bool:
    """Refuse a folder that holds another run, or fetch the run from its copy.

    A run that is resumed is held before anything is fetched into it.

    Returns whether the configuration makes the plans: it does for a new run, and for one that is
    resumed if its section `plan` or `recipe` is another.
    """
    folder = Path(config.run_dir)
    if not resume:
        run_folder.require_new(folder)
    elif mirror is not None or run_folder.is_run(folder):
        hold.take()
    message = None if mirror is None else mirror.prepare(folder, resume=resume)
    if message is not None:
        say(message)
    if not resume:
        return True
    require_not_joined(folder)
    saved = run_folder.saved_config(folder, "run_dir")
    for name, now, before in require_same_run(config, saved):
        say(f"the run goes on with {name} = {now!r}, before it was {before!r}")
    return (config.plan, config.recipe) != (saved.plan, saved.recipe)


def _give_threads(config: Config, host: Membership, nodes: int, case: Case | None) -> None:
    give_collectives_threads(config, nodes, case, is_distributed=host.is_distributed)


def _schedule_of_host_0(config: Config, host: Membership) -> Schedule:
    """The plans that host 0 has put into the run folder, if this host was started like host 0."""
    # Host 0 may search for plans first, and compile the search for half a minute before.
    searches = 1 + config.recipe.most_searches
    patience_s = config.cluster.connect_timeout_s + 2 * searches * config.plan.budget_s
    theirs = hear(host, "run", [0], patience_s)[0]
    tree = to_tree(config)
    for section, own in settings(config).items():
        if own != theirs["config"].get(section):
            raise InputError(
                section,
                tree[section],
                f"host {host.index} has this, and host 0 has something else",
                "Start all hosts with the same configuration",
            )
    folder = Path(config.run_dir)
    shared = (folder / run_folder.PLAN).exists()
    schedule = run_folder.saved_schedule(folder) if shared else None
    if schedule is None or _digest_of_plans(schedule) != theirs["plans"]:
        raise InputError(
            "run_dir",
            config.run_dir,
            f"host {host.index} does not find there what host 0 has written",
            "Name a folder that all hosts share",
        )
    return schedule


def _description(config: Config, schedule: Schedule) -> dict[str, Any]:
    """What the other hosts compare their configuration and plans with."""
    return {"config": settings(config), "plans": _digest_of_plans(schedule)}


def _digest_of_plans(schedule: Schedule) -> str:
    return digest({name: plan.to_json() for name, plan in sorted(schedule.plans.items())})


def open_data(config: Config, plan: Plan, program: Program) -> TrainingBatches | None:
    """The microbatches of the run, if a data node is served here."""
    data = data_config(config)
    check_vocabulary(config.model.vocabulary_size, load_tokenizer(tokenizer_of(data)))
    if not set(plan.stages[0]) & set(program.nodes):
        return None
    return TrainingBatches(data)


def with_text(config: Config, settled: Settled) -> Settled:
    """The same with the text of the run, if it is here."""
    if settled.data is not None:
        return settled
    try:
        text = data_config(config)
        data, held_out = TrainingBatches(text), read_held_out(config, text)
    except InputError as error:
        say(f"warning: the text of the run is not here: {error}")
        return settled
    return replace(settled, data=data, held_out=held_out)


def _require_reaching_collectives(config: Config, host: Membership) -> None:
    """Refuse collectives among hosts each of whose JAX knows its own devices only."""
    averaging = config.network.averaging
    if averaging == "collective" and host.count > 1 and not host.is_distributed:
        raise InputError(
            "network.averaging",
            averaging,
            "a collective of JAX does not reach from one host to another where each has its own "
            "JAX, as here (cluster.runtime)",
            "Write auto or ring, or cluster.runtime: distributed",
        )


def _require_attention(config: Config) -> None:
    """Refuse an implementation of attention that this machine does not have, or has wrong."""
    model, found = config.model, jax.default_backend()
    needed = PLATFORM_OF.get(model.attention)
    if needed not in (None, found):
        raise InputError(
            "model.attention",
            model.attention,
            f"needs a {needed.upper()}, and JAX found {found} devices only",
            "Write auto, which takes what each device has",
        )
    kernel = implementation_of(model, config.data.sequence_length, found)
    if kernel in PLATFORM_OF:
        fault = fault_of(kernel, model, is_packed=config.data.packing == "documents")
        if fault:
            raise InputError(
                "model.attention", model.attention, f"{kernel} {fault}", "Write blockwise"
            )


def _write_folder(
    config: Config,
    schedule: Schedule,
    weights: Weights | None,
    profile: Profile | None,
    *,
    resume: bool,
    plans_anew: bool,
) -> None:
    """Begin the folder of a new run, or leave in that of a run the plans it goes on under."""
    folder = Path(config.run_dir)
    if not resume:
        run_folder.write_parent(folder, weights.told() if isinstance(weights, Parent) else None)
    elif plans_anew:
        _leave_plan(folder, schedule.plans[OWN])
    if plans_anew:
        run_folder.start_run(folder, config, schedule)
    if weights is not None and weights.has_tokenizer_of(config.data):
        weights.copy_companions(folder / TOKENIZER_FOLDER)
    if profile is not None:
        profile.save(folder / run_folder.CASE)
    keep_tokenizer(config.data, folder)


def _warn_of_missing_links(folder: Path) -> None:
    """Say so where the last two hosts of a run cannot decide which of them goes on."""
    if not run_folder.makes_links(folder):
        say_meanwhile(
            f"warning: {folder} lies on a file system without hard links: when two hosts are left "
            "and one of them is lost, the run ends with exit code 75"
        )


def _leave_plan(folder: Path, plan: Plan) -> None:
    """Say that a run goes on under another plan, and draw what was recorded under its own."""
    own = run_folder.saved_plan(folder)
    say(
        f"the run goes on under another plan: from {_extent(own)} to {_extent(plan)}, after step "
        f"{latest_step(folder) or 0}"
    )
    draw_recorded(folder)
    remove_recordings(folder, after=0)


def _extent(plan: Plan) -> str:
    return f"{len(plan.stages)} stages on {len(plan.case.nodes)} nodes"


def _require_same_text(
    config: Config, host: Membership, data_hosts: set[int], data: TrainingBatches
) -> None:
    """Data nodes read parts of one text: refuse a host with a data node that reads another."""

    def differing(first: int) -> InputError:
        return InputError(
            "data.source",
            config.data.source,
            f"host {host.index} reads other text than host {first}",
            "Give all hosts with data nodes the same files",
        )

    agree(host, "text", data.fingerprint, config.cluster.connect_timeout_s, differing, data_hosts)


def _say_what_is_too_long(
    config: Config, host: Membership, reader: int, data: TrainingBatches | None
) -> None:
    """Let host 0 say what becomes of documents longer than a sequence; `reader` knows of them."""
    if host.index not in (0, reader):
        return
    lines = [] if data is None else data.too_long
    told = gather(host, "too_long", lambda: lines, config.cluster.connect_timeout_s, [reader])
    for line in told[reader]:
        on_host_0(host.index, say)(line)
