"""The training loop: what one host does from its configuration to the last checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from skippipe_sched.auto import candidates, load_cases
from skippipe_sched.case import Case
from skippipe_sched.errors import InputError
from skippipe_sched.methods import plan_best
from skippipe_sched.plan import Plan, load_plan
from skippipe_sched.rules import require
from skippipe_sched.search import Search

from skippipe_jax import run_folder
from skippipe_jax.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    prepare_run,
    read_data_state,
    read_stage,
)
from skippipe_jax.cluster import Membership
from skippipe_jax.config import Config, PlanConfig, require_same_run, to_tree
from skippipe_jax.data import Batch, TrainingBatches, check_vocabulary
from skippipe_jax.emulation import Emulation
from skippipe_jax.executor import Executor, Outcome, devices_of_nodes, functions_of_stages
from skippipe_jax.first_weights import begin_with, first_weights
from skippipe_jax.links import Transfers
from skippipe_jax.live import Clock, LiveIteration
from skippipe_jax.measured_case import Profile, check_template
from skippipe_jax.measured_cluster import measure
from skippipe_jax.model import ModelConfig
from skippipe_jax.program import Program, compile_plan, hosts_of_nodes
from skippipe_jax.progress import CompilationCounter, Progress
from skippipe_jax.recording import draw_recorded, remove_recordings

# The results of an iteration are read when this many later ones have been dispatched, so that
# devices have work while the host reads.
ITERATIONS_AHEAD = 1


@dataclass(frozen=True)
class Ending:
    """How a run ended: after which step, and which signal cut it short, if one did."""

    step: int
    cut_short_by: signal.Signals | None


def train(config: Config, host: Membership, *, resume: bool, config_folder: Path) -> Ending:
    """Train as `config` says, as one host of the run; returns when the last checkpoint is written.

    `config_folder` is where the link table of a case inside the config lies.

    Raises:
        InputError: before the first iteration, if the configuration, the plan, the data or the
            checkpoint cannot be used.
    """
    folder = Path(config.run_dir)
    if host.index == 0 and not resume:
        run_folder.require_new(folder)
    transfers, profile = None, None
    if config.plan.measure and not resume:
        _give_sums_threads(config, host, check_template(config, host.count).count(host.index))
        transfers = open_transfers(config, host)
        here = {host.index: jax.local_devices()[0]}
        tell = _say if host.index == 0 else _say_nothing
        profile = measure(config, host, transfers.links(here), tell)
    if host.index == 0:
        plan = _plan_of_run(config, resume, config_folder, profile)
    else:
        plan = _plan_of_host_0(config, host)
    _require_patience(config, plan)
    host_of = hosts_of_nodes(len(plan.case.nodes), host.count, config.cluster.host_of_node)
    program = compile_plan(plan, host_of)[host.index]
    data = _open_data(config, plan, program)
    config.model.layers_of_stages(len(plan.stages))
    _require_attention(config.model)
    weights = None if resume else first_weights(config)
    # Nothing is written before all that was given has been found good.
    if host.index == 0:
        if not resume:
            run_folder.start_run(folder, config, plan)
            if weights is not None:
                weights.copy_companions(folder / run_folder.TOKENIZER)
            if profile is not None:
                profile.save(folder / run_folder.CASE)
        host.put("run", _description(config, plan))
    _require_same_text(config, host, host_of[plan.stages[0][0]], data)
    if transfers is None:
        _give_sums_threads(config, host, len(program.nodes))
        transfers = open_transfers(config, host)
    executor = make_executor(config, plan, host, host_of, program, transfers)

    found = prepare_run(folder, host)
    step, read = 0, 0
    if found is not None:
        step = found.step
        _restore(found, executor)
        if data is not None:
            read = data.position(read_data_state(found))
    else:
        # A run that stopped before its first checkpoint begins anew when it is resumed.
        weights = weights or first_weights(config)
        if weights is not None:
            begin_with(weights, executor, config, host)
    if host.index == 0 and resume:
        run_folder.continue_run(folder, config, step)
        remove_recordings(folder, after=step)
    writer = CheckpointWriter(
        folder,
        host,
        stages=len(plan.stages),
        keep=config.checkpoint.keep,
    )
    iterations = Iterations(config, executor, host)
    progress = Progress(config, plan, step, folder if host.index == 0 else None)

    saved_step, stopping = step, False
    with (
        _stop_signals() as received,
        closing(progress),
        # Whatever happens in an iteration, the checkpoint before it is written to its end.
        closing(writer),
        CompilationCounter() as compilations,
    ):
        while step < config.train.steps and not stopping:
            batches = _batches(program, plan, data, read)
            outcome = iterations.run(step, batches, stop=bool(received))
            step, read = step + 1, read + len(plan.microbatches)
            progress.watch(step, outcome, compilations.take())
            saves = step % config.checkpoint.every == 0
            # Saving waits for the parameters anyway, and nothing is saved after a loss that is NaN.
            stopping = progress.report(leave=0 if saves else ITERATIONS_AHEAD)
            if saves:
                _save(writer, step, executor, data, read)
                saved_step = step
        progress.report()
        if saved_step != step:
            _save(writer, step, executor, data, read)
    if config.trace != "never":
        host.barrier("recordings", config.cluster.connect_timeout_s)
        if host.index == 0:
            draw_recorded(folder)
    # A run that is resumed after its last step has nothing left to do.
    if step >= config.train.steps:
        return Ending(step, None)
    # All hosts stop when one is asked to; those that were not asked stop as if they had been.
    return Ending(step, received[0] if received else signal.SIGTERM)


def _plan_of_run(
    config: Config, resume: bool, config_folder: Path, profile: Profile | None
) -> Plan:
    """The plan of host 0: the run's own, one for the case that was measured, or a given one."""
    folder = Path(config.run_dir)
    if resume:
        require_same_run(config, run_folder.saved_config(folder, "run_dir"))
        return run_folder.saved_plan(folder)
    if profile is not None:
        _say(f"planning for what was measured, {config.plan.budget_s:g} s at most")
        return _planned(config.plan, candidates(profile.case))
    return plan_of(config.plan, config_folder)


def _plan_of_host_0(config: Config, host: Membership) -> Plan:
    """The plan that host 0 has put into the run folder, if this host was started like host 0."""
    # Host 0 may search for a plan first, and compile the search for half a minute before.
    patience_s = config.cluster.connect_timeout_s + 2 * config.plan.budget_s
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
    plan = run_folder.saved_plan(folder) if shared else None
    if plan is None or _digest(plan.to_json()) != theirs["plan"]:
        raise InputError(
            "run_dir",
            config.run_dir,
            f"host {host.index} does not find there what host 0 has written",
            "Name a folder that all hosts share",
        )
    return plan


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(_: str) -> None:
    """What host 0 says is enough."""


def _description(config: Config, plan: Plan) -> str:
    """What the other hosts compare their configuration and plan with."""
    sections = {section: _digest(value) for section, value in to_tree(config).items()}
    return json.dumps({"config": sections, "plan": _digest(plan.to_json())})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def plan_of(config: PlanConfig, config_folder: Path) -> Plan:
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
    return _planned(config, cases)


def _planned(config: PlanConfig, cases: Sequence[Case]) -> Plan:
    return plan_best(cases, config.method, Search(config.seed, config.budget_s))


def _require_patience(config: Config, plan: Plan) -> None:
    """Refuse a deadline that passes while everything goes as planned."""
    if config.network.deadline_s <= plan.predicted.iteration_s:
        raise InputError(
            "network.deadline_s",
            config.network.deadline_s,
            f"a host may have to wait for most of an iteration, which takes "
            f"{plan.predicted.iteration_s:.3g} s by the plan",
            f"Write {2 * plan.predicted.iteration_s:.0f} or more",
        )


def _open_data(config: Config, plan: Plan, program: Program) -> TrainingBatches | None:
    """The microbatches of the run, if a data node is served here."""
    check_vocabulary(config.model.vocabulary_size)
    if not set(plan.stages[0]) & set(program.nodes):
        return None
    return TrainingBatches(config.data)


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


def open_transfers(config: Config, host: Membership) -> Transfers:
    """The transfer servers of this host; all hosts call this together."""

    def exchange(address: str) -> list[str]:
        host.put(f"transfer_server/{host.index}", address)
        timeout_s = config.cluster.connect_timeout_s
        return [
            host.get(f"transfer_server/{index}", timeout_s, source=index)
            for index in range(host.count)
        ]

    backend = jax.local_devices()[0].client
    return Transfers(host.index, host.count, backend, host.transfer_addresses(), exchange)


def make_executor(
    config: Config,
    plan: Plan,
    host: Membership,
    host_of: Sequence[int],
    program: Program,
    transfers: Transfers,
) -> Executor:
    """What runs this host's `program`, with first parameters; all hosts call this together."""
    batch, time = config.data.microbatch_size, config.data.sequence_length
    devices = devices_of_nodes(plan, host_of)
    links = transfers.links({node: devices[node] for node in program.nodes})
    functions = functions_of_stages(
        plan, config.model, config.optimizer, config.train.steps, batch * time
    )
    executor = Executor(
        plan,
        program,
        devices,
        functions,
        links,
        host_of,
        config.model,
        config.seed,
        jax.ShapeDtypeStruct((batch, time, config.model.width), config.model.compute_dtype),
        config.network,
    )
    host.barrier("executors", config.cluster.connect_timeout_s)
    executor.open_sums()
    return executor


class Iterations:
    """Runs each iteration in the way that the configuration asks for."""

    def __init__(self, config: Config, executor: Executor, host: Membership):
        """Find out how far this host's clock is from host 0's, if timelines are recorded."""
        self.config = config
        self.executor = executor
        self.host = host
        network = config.network
        self.emulation = (
            Emulation(executor.plan, network, config.seed) if network.mode == "emulate" else None
        )
        self.ready_first = config.execution == "ready-first"
        self.clock_offset_s = host.clock_offset_s() if config.trace != "never" else 0.0
        # In one process nothing is ever late, unless it is made so.
        self.waits = (
            host.count > 1 or self.emulation is not None or self.ready_first or bool(executor.rings)
        )

    def run(self, iteration: int, batches: Mapping[int, Sequence[Batch]], stop: bool) -> Outcome:
        """Run one iteration, and record it in the run folder if its turn has come."""
        traced = self.config.traces(iteration)
        if not (self.waits or traced):
            return self.executor.run(iteration, batches, stop)
        live = LiveIteration(
            self.executor, iteration, ready_first=self.ready_first, emulation=self.emulation
        )
        outcome = live.run(batches, stop)
        if traced:
            recording = live.recording(Clock.with_offset(self.clock_offset_s))
            recording.save(Path(self.config.run_dir), iteration + 1, self.host.index)
        return outcome


def _give_sums_threads(config: Config, host: Membership, nodes: int) -> None:
    """Let XLA have more threads than cores on a CPU, which it creates when it is first used.

    There a collective holds a thread until all replicas have come to it, and so does a launch for
    which the device has no room yet: with two threads, both may wait for work that has no thread
    left. Rings need no such threads, and operations are quicker without.
    """
    if host.count > 1 and config.network.averaging != "ring":
        threads = (os.cpu_count() or 1) + 2 * nodes + 1
        os.environ.setdefault("PJRT_NPROC", str(threads))


def _batches(
    program: Program, plan: Plan, data: TrainingBatches | None, read: int
) -> dict[int, list[Batch]]:
    """The batches of each data node served here, one for each of its microbatches.

    Microbatch m of an iteration is number `read` + m of the run.
    """
    if data is None:
        return {}
    batches: dict[int, list[Batch]] = {node: [] for node in plan.stages[0] if node in program.nodes}
    for microbatch, path in enumerate(plan.microbatches):
        if path[0] in batches:
            batches[path[0]].append(data[read + microbatch])
    return batches


def _save(
    writer: CheckpointWriter, step: int, executor: Executor, data: TrainingBatches | None, read: int
) -> None:
    stages = {stage: state.to_save() for stage, state in executor.owned_stages().items()}
    # Whoever owns stage 0 serves a data node.
    writer.save(step, stages, data.state(read) if data is not None and 0 in stages else None)


def _restore(found: Checkpoint, executor: Executor) -> None:
    for (stage, device), state in executor.states.items():
        sharding = jax.sharding.SingleDeviceSharding(device)
        abstract = jax.tree.map(
            lambda leaf, sharding=sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            state.to_save(),
        )
        state.restore(read_stage(found, stage, abstract))


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
