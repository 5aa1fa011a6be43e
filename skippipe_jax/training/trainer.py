"""The training loop: what one host does from its configuration to the last checkpoint."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from skippipe_sched.errors import InputError
from skippipe_sched.problem.auto import candidates, load_cases
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.problem.rules import require
from skippipe_sched.search.budget import Search
from tqdm import tqdm

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import (
    NO_RECIPE,
    Config,
    DataConfig,
    ModelConfig,
    PlanConfig,
    RecipeConfig,
    require_same_run,
    to_tree,
)
from skippipe_jax.config.tokenizer import BYTES, TOKENIZER_FOLDER
from skippipe_jax.data.batches import Batch, TrainingBatches, check_vocabulary, tokenizer_of
from skippipe_jax.data.read_ahead import ReadAhead
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.profiling.case import Profile, check_template
from skippipe_jax.profiling.cluster import measure
from skippipe_jax.program.compiler import Program, compile_plans, hosts_of_nodes
from skippipe_jax.program.schedule import OWN, Schedule, best_plan, make_schedule
from skippipe_jax.runtime.runtime import Runtime, give_collectives_threads, open_runtime
from skippipe_jax.runtime.state import from_checkpoint
from skippipe_jax.runtime.topology import sharding_of
from skippipe_jax.runtime.transport import open_transfers
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.checkpoint import (
    CheckpointWriter,
    latest_step,
    prepare_run,
    read_data_state,
)
from skippipe_jax.storage.mirror import Mirror
from skippipe_jax.storage.reader import read_data_state, read_stage
from skippipe_jax.storage.recording import draw_recorded, remove_recordings
from skippipe_jax.training.first_weights import (
    first_weights,
    from_weights,
    require_same_weights,
)
from skippipe_jax.training.profiled_steps import profiled
from skippipe_jax.training.progress import CompilationCounter, Progress
from skippipe_jax.training.trackers import require_trackers
from skippipe_jax.training.validation import BestCheckpoint, Validation

# The results of an iteration are read when this many later ones have been dispatched, so that
# devices have work while the host reads.
ITERATIONS_AHEAD = 1

# How long hosts wait for host 0 while it fetches a run from its copy, or completes the copy.
COPYING_S = 3600.0


@dataclass(frozen=True)
class Ending:
    """How a run ended: after which step, and which signal cut it short, if one did."""

    step: int
    cut_short_by: signal.Signals | None


def train(config: Config, host: Membership, *, resume: bool, config_folder: Path) -> Ending:
    """Train as one host of the run while no other training writes its folder; see `_train`."""
    with run_folder.Hold(Path(config.run_dir)) as hold:
        return _train(config, host, resume, config_folder, hold)


def _train(
    config: Config, host: Membership, resume: bool, config_folder: Path, hold: run_folder.Hold
) -> Ending:
    """Train as `config` says, as one host of the run; returns when the last checkpoint is written.

    `config_folder` is where the link table of a case inside the config lies.

    Raises:
        InputError: before the first iteration, if the configuration, the plan, the data or the
            checkpoint cannot be used.
    """
    folder = Path(config.run_dir)
    mirror = _prepare_folder(config, resume) if host.index == 0 else None
    if host.index == 0 and run_folder.is_run(folder):
        hold.take()
    plans_anew = _plans_anew(config, host, resume)
    transfers, profile = None, None
    if config.plan.measure and plans_anew:
        give_collectives_threads(config, host, check_template(config, host.count).count(host.index))
        transfers = open_transfers(config, host)
        here = {host.index: sharding_of((jax.local_devices()[0],))}
        tell = _say if host.index == 0 else _say_nothing
        profile = measure(config, host, transfers.links(here), tell)
    if host.index == 0:
        schedule = _schedule_of_run(config, plans_anew, config_folder, profile)
    else:
        schedule = _schedule_of_host_0(config, host)
    plan = schedule.plans[OWN]
    _require_patience(config, schedule.longest_s)
    host_of = hosts_of_nodes(len(plan.case.nodes), host.count, config.cluster.host_of_node)
    compiled = compile_plans(schedule.plans, host_of)
    programs = {name: of_hosts[host.index] for name, of_hosts in compiled.items()}
    program = programs[OWN]
    data = _open_data(config, plan, program)
    stage_layers = config.model.layers_of_stages(len(plan.stages))
    _require_attention(config.model)
    if host.index == 0:
        require_trackers(config.log)
    weights = None if resume else first_weights(config)
    # Nothing is written before all that was given has been found good.
    if host.index == 0:
        if not resume:
            hold.take()
            run_folder.require_new(folder)  # Another may have been quicker.
        if resume and plans_anew:
            _leave_plan(folder, plan)
        if plans_anew:
            run_folder.start_run(folder, config, schedule)
        if weights is not None and tokenizer_of(config.data) in (BYTES, str(weights.folder)):
            weights.copy_companions(folder / TOKENIZER_FOLDER)
        if profile is not None:
            profile.save(folder / run_folder.CASE)
        keep_tokenizer(config.data, folder)
        host.put("run", _description(config, schedule))
    _require_same_text(config, host, host_of[plan.stages[0][0]], data)
    if transfers is None:
        give_collectives_threads(config, host, len(program.nodes))
        transfers = open_transfers(config, host)
    found = prepare_run(folder, host)
    step, read, origin, digests = 0, 0, None, None
    if found is not None:
        step, origin = found.step, from_checkpoint(found, stage_layers)
        if data is not None:
            read = data.position(read_data_state(found))
    else:
        # A run that stopped before its first checkpoint begins anew when it is resumed.
        weights = weights or first_weights(config)
        if weights is not None:
            digests = {}
            origin = from_weights(weights, stage_layers, digests)
    runtime = open_runtime(config, schedule, programs, host_of, host, transfers, origin)
    if digests is not None:
        require_same_weights(digests, runtime.topology, config, host)
    if host.index == 0 and resume:
        if step >= config.train.steps:
            _say(f"nothing is left to do: the run is at step {step} of {config.train.steps}")
        run_folder.continue_run(folder, config, step)
        remove_recordings(folder, after=step)
    writer = CheckpointWriter(
        folder,
        host,
        stage_layers=stage_layers,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        mirror=mirror,
    )
    progress = Progress(config, schedule, runtime, step, folder if host.index == 0 else None)
    validation = (
        Validation(config, _data_config(config), runtime, host) if config.validation.every else None
    )
    best = BestCheckpoint(writer, folder if host.index == 0 else None)
    reader = None if data is None else ReadAhead(data.__getitem__, config.data.prefetch)

    recipe = config.recipe
    saved_step, stopping, held_out = step, False, None
    with (
        _stop_signals() as received,
        nullcontext() if reader is None else closing(reader),
        closing(progress),
        # Whatever happens in an iteration, the checkpoint before it is written to its end.
        closing(writer),
        CompilationCounter(_say_meanwhile if host.index == 0 else _say_nothing) as compilations,
    ):
        while step < config.train.steps and not (stopping and recipe.replicas_agree(step)):
            batches = _batches(program, schedule.plan(step), reader, read)
            record, stop = config.traces(step), bool(received)
            traces = config.log.profiles(step + 1)
            with profiled(runtime, folder, step + 1, host.index) if traces else nullcontext():
                outcome = runtime.run(step, batches, stop=stop, record=record)
            if outcome.recording is not None:
                outcome.recording.save(folder, step + 1, host.index)
            step, read = step + 1, read + len(plan.microbatches)
            progress.watch(step, outcome, compilations.take())
            held_out = None
            if validation is not None and config.validation.validates(step):
                held_out = validation.loss(step)
                progress.validated(step, held_out)
            saves = step % config.checkpoint.every == 0
            # Saving waits for the parameters anyway, and nothing is saved after a loss that is NaN.
            was_stopping = stopping
            stopping = progress.report(leave=0 if saves else ITERATIONS_AHEAD)
            if stopping and not (was_stopping or recipe.replicas_agree(step)) and host.index == 0:
                _say(
                    f"asked to stop: ends when replicas have averaged, after "
                    f"{recipe.average_parameters_every} iterations at most; Ctrl-C: at once"
                )
            if saves:
                _save(writer, step, runtime, data, read)
                best.consider(step, held_out)
                saved_step = step
        progress.report()
        if saved_step != step:
            _save(writer, step, runtime, data, read)
            best.consider(step, held_out)
    if config.checkpoint.copy_to is not None:
        if host.index == 0:
            host.put("copied", "")
        host.get("copied", COPYING_S, source=0)
    if config.trace != "never":
        host.barrier("recordings", config.cluster.connect_timeout_s)
        if host.index == 0:
            draw_recorded(folder)
    # A run that is resumed after its last step has nothing left to do.
    if step >= config.train.steps:
        return Ending(step, None)
    # All hosts stop when one is asked to; those that were not asked stop as if they had been.
    return Ending(step, received[0] if received else signal.SIGTERM)


def _prepare_folder(config: Config, resume: bool) -> Mirror | None:
    """Refuse a folder that holds another run, or fetch the run from its copy; returns the copy."""
    folder, url = Path(config.run_dir), config.checkpoint.copy_to
    if not resume:
        run_folder.require_new(folder)
    if url is None:
        return None
    mirror = Mirror(url)
    message = mirror.prepare(folder, resume=resume)
    if message is not None:
        _say(message)
    return mirror


def _plans_anew(config: Config, host: Membership, resume: bool) -> bool:
    """Whether the configuration makes the plans; else the run goes on under its own.

    A run that is resumed gets other plans if the section `plan` or `recipe` is another.
    """
    if host.index == 0:
        anew = True
        if resume:
            saved = run_folder.saved_config(Path(config.run_dir), "run_dir")
            for name, now, before in require_same_run(config, saved):
                _say(f"the run goes on with {name} = {now!r}, before it was {before!r}")
            anew = (config.plan, config.recipe) != (saved.plan, saved.recipe)
        host.put("plans_anew", json.dumps(anew))
    copying_s = COPYING_S if config.checkpoint.copy_to is not None else 0.0
    timeout_s = config.cluster.connect_timeout_s + copying_s
    return json.loads(host.get("plans_anew", timeout_s, source=0))


def _leave_plan(folder: Path, plan: Plan) -> None:
    """Say that a run goes on under another plan, and draw what was recorded under its own."""
    own = run_folder.saved_plan(folder)
    _say(
        f"the run goes on under another plan: from {_extent(own)} to {_extent(plan)}, after step "
        f"{latest_step(folder) or 0}"
    )
    draw_recorded(folder)
    remove_recordings(folder, after=0)


def _extent(plan: Plan) -> str:
    return f"{len(plan.stages)} stages on {len(plan.case.nodes)} nodes"


def _schedule_of_run(
    config: Config, anew: bool, config_folder: Path, profile: Profile | None
) -> Schedule:
    """The plans of host 0: those of the run, or new ones, made for what was measured or given."""
    if not anew:
        return run_folder.saved_schedule(Path(config.run_dir))
    if profile is not None:
        own = _planned(config.plan, candidates(profile.case), config.recipe, "what was measured")
    else:
        own = plan_of(config.plan, config_folder, config.recipe)
    search = config.plan.method, config.plan.seed, config.plan.budget_s
    with _interrupts_that_end():
        return make_schedule(config.recipe, own, *search, _say)


def _schedule_of_host_0(config: Config, host: Membership) -> Schedule:
    """The plans that host 0 has put into the run folder, if this host was started like host 0."""
    # Host 0 may search for plans first, and compile the search for half a minute before.
    searches = 1 + config.recipe.most_searches
    patience_s = config.cluster.connect_timeout_s + 2 * searches * config.plan.budget_s
    theirs = json.loads(host.get("run", patience_s, source=0))
    for section, value in to_tree(config).items():
        if _digest(value) != theirs["config"][section]:
            raise InputError(
                section,
                value,
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


def _say(text: str) -> None:
    print(text, flush=True)


def _say_meanwhile(text: str) -> None:
    """Say what takes so long, above the bar if there is one."""
    tqdm.write(text, file=sys.stderr)


def _say_nothing(_: str) -> None:
    """What host 0 says is enough."""


def _description(config: Config, schedule: Schedule) -> str:
    """What the other hosts compare their configuration and plans with."""
    sections = {section: _digest(value) for section, value in to_tree(config).items()}
    return json.dumps({"config": sections, "plans": _digest_of_plans(schedule)})


def _digest_of_plans(schedule: Schedule) -> str:
    return _digest({name: plan.to_json() for name, plan in sorted(schedule.plans.items())})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def plan_of(config: PlanConfig, config_folder: Path, recipe: RecipeConfig = NO_RECIPE) -> Plan:
    """The plan that a configuration names, or one made for the case that it names.

    Raises:
        InputError: if it names neither, or the plan breaks a rule of its case.
    """
    if config.file is not None:
        return require(load_plan(Path(config.file)))
    if config.case is None:
        raise InputError(
            "plan.case", None, "there is no plan to train by", "Give plan.case or plan.file"
        )
    if isinstance(config.case, str):
        cases = load_cases(Path(config.case))
    else:
        cases = candidates(config.case, config_folder)
    return _planned(config, cases, recipe, "plan.case")


def _planned(config: PlanConfig, cases: Sequence[Case], recipe: RecipeConfig, what: str) -> Plan:
    if config.method != "balanced":  # Which is instant.
        _say_meanwhile(f"planning for {what} by {config.method}, {config.budget_s:g} s at most")
    with _interrupts_that_end():
        return best_plan(cases, config.method, Search(config.seed, config.budget_s), recipe)


@contextmanager
def _interrupts_that_end() -> Iterator[None]:
    """Let Ctrl-C end the program at once, without the exception that is its usual way.

    numba compiles the search by callbacks from C, in which exceptions get lost.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _require_patience(config: Config, longest_s: float) -> None:
    """Refuse a deadline that passes while everything goes as planned."""
    if config.network.deadline_s <= longest_s:
        raise InputError(
            "network.deadline_s",
            config.network.deadline_s,
            f"a host may have to wait for most of an iteration, which takes "
            f"{longest_s:.3g} s by the plan",
            f"Write {2 * longest_s:.0f} or more",
        )


def _open_data(config: Config, plan: Plan, program: Program) -> TrainingBatches | None:
    """The microbatches of the run, if a data node is served here."""
    data = _data_config(config)
    check_vocabulary(config.model.vocabulary_size, load_tokenizer(tokenizer_of(data)))
    if not set(plan.stages[0]) & set(program.nodes):
        return None
    return TrainingBatches(data)


def _data_config(config: Config) -> DataConfig:
    """What is read, with the tokenizer that the run keeps."""
    if tokenizer_of(config.data) == BYTES:
        return config.data
    return with_tokenizer_of_run(config.data, Path(config.run_dir))


def _require_same_text(
    config: Config, host: Membership, first: int, data: TrainingBatches | None
) -> None:
    """Data nodes read parts of one text: refuse a host with a data node that reads another."""
    if data is None:
        return
    host.put(f"text/{host.index}", data.fingerprint)
    timeout_s = config.cluster.connect_timeout_s
    if data.fingerprint != host.get(f"text/{first}", timeout_s, source=first):
        raise InputError(
            "data.source",
            config.data.source,
            f"host {host.index} reads other text than host {first}",
            "Give all hosts with data nodes the same files",
        )


def _require_attention(model: ModelConfig) -> None:
    """Refuse an implementation of attention that this machine does not have."""
    if model.attention == "cudnn" and jax.default_backend() != "gpu":
        raise InputError(
            "model.attention",
            model.attention,
            f"needs a GPU, and JAX found {jax.default_backend()} devices only",
            "Write xla",
        )


def _batches(
    program: Program, plan: Plan, reader: ReadAhead[Batch] | None, read: int
) -> dict[int, Batch]:
    """The batch of each microbatch whose data node is served here.

    Microbatch m of an iteration is number `read` + m of the run.
    """
    if reader is None:
        return {}
    own = [number for number, path in enumerate(plan.microbatches) if path[0] in program.nodes]
    batches = {microbatch: reader[read + microbatch] for microbatch in own}
    reader.announce(read + len(plan.microbatches) + microbatch for microbatch in own)
    return batches


def _save(
    writer: CheckpointWriter, step: int, runtime: Runtime, data: TrainingBatches | None, read: int
) -> None:
    stages = runtime.owned_stages()
    # Whoever owns stage 0 serves a data node.
    writer.save(step, stages, data.state(read) if data is not None and 0 in stages else None)


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM; a second one ends the program at once."""
    received: list[signal.Signals] = []

    def receive(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
