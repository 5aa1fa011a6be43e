"""How much longer an iteration takes through a pipeline than in a plain one-device program.

    python -m experiments.benchmarks.overhead --json experiments/results/overhead_MACHINE.json

The pipeline is what training runs: a `Runtime` in one process, all nodes on one device, and full
paths, so that both sides do the same work. Against it run one-device programs as one would write
them without a pipeline: one jitted step with donated state for forward, backward, clipping and
AdamW, from the same first parameters, on the same batches, with the same recomputation. A plain
step takes all microbatches of the iteration as one batch; an accumulating one adds up the gradients
of one microbatch after another, in a scan. Either goes through the layers in the way that suits it:
`scanned`, all layers in one scan, or `in turn`, stage after stage as the pipeline does.

All programs take turns, iteration by iteration, so that a busy machine slows all of them. "Times"
is the median of (seconds of the pipeline / seconds of that program) over the turns; the ratio of
the last line is the one to the quickest plain step. Peak memory comes from two iterations of each
program in a process of its own, which finds it compiled: the device's own count, or on a CPU the
resident memory, less that of a process which only starts JAX.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from skippipe_sched.errors import run_command
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case
from skippipe_sched.search.budget import Search

from experiments.benchmarks import machine, reporting
from skippipe_jax.config import (
    PRESETS,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from skippipe_jax.config.attention import ATTENTION
from skippipe_jax.config.choices import DTYPES
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.data.batches import Batch
from skippipe_jax.models.llama import Stage, create_stage
from skippipe_jax.optim.adamw import adamw
from skippipe_jax.program.compiler import compile_plan
from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, TOKENS
from skippipe_jax.runtime.topology import Device, Topology

CLIP_NORM = 1.0
OPTIMIZER = OptimizerConfig(beta2=0.999, weight_decay=0.0, clip_norm=CLIP_NORM)
STEPS = 1000
SEED = 0

# Runs one iteration on the microbatches to its end; returns its loss.
Iteration = Callable[[Sequence[Batch]], float]


@dataclass(frozen=True)
class Workload:
    """What both sides train: a model over stages, and the batches of an iteration."""

    model: ModelConfig
    stages: int
    replicas: int
    microbatches_per_data_node: int
    microbatch_size: int
    sequence_length: int

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration."""
        return self.replicas * self.microbatches_per_data_node

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    def random_batches(self, random: np.random.Generator) -> list[Batch]:
        """Random tokens for one iteration."""
        shape = (self.microbatches, self.microbatch_size, self.sequence_length + 1)
        ids = random.integers(0, self.model.vocabulary_size, shape, dtype=np.int32)
        return [{"tokens": own[:, :-1], "targets": own[:, 1:]} for own in ids]


def pipeline(workload: Workload) -> Iteration:
    """Train through the runtime, as a host that serves all nodes on one device."""
    nodes = workload.stages * workload.replicas
    case = parse_case(
        {
            "nodes": nodes,
            "locations": ["here"],
            "links": [],
            "activation_bytes": 0,
            "stage_bytes": 0,
            "forward_s": 1,
            "stages": [workload.replicas] * workload.stages,
            "path_length": workload.stages,
            "microbatches_per_data_node": workload.microbatches_per_data_node,
            "memory": workload.stages,
        }
    )
    plan = make_plan(case, "full", Search(SEED))
    host_of = (0,) * nodes
    [program] = compile_plan(plan, host_of)
    config = Config(
        seed=SEED,
        model=workload.model,
        optimizer=OPTIMIZER,
        data=DataConfig(
            microbatch_size=workload.microbatch_size, sequence_length=workload.sequence_length
        ),
        train=TrainConfig(STEPS),
    )
    devices = [(Device(0, 0, jax.devices()[0].device_kind),)] * nodes
    numbers = HopNumbers(program.first_free_hop)
    topology = Topology.of(config, plan, program.host, host_of, devices, numbers)
    runtime = Runtime(config, Schedule(config.recipe, {OWN: plan}), {OWN: program}, topology, {})
    iteration = 0

    def run(batches: Sequence[Batch]) -> float:
        nonlocal iteration
        outcome = runtime.run(iteration, dict(enumerate(batches)))
        iteration += 1
        jax.block_until_ready([state.to_save() for state in runtime.states.values()])
        return float(outcome.totals[LOSS] / outcome.totals[TOKENS])

    return run


def one_device(workload: Workload, *, scanned: bool, accumulating: bool) -> Iteration:
    """Train in one jitted step, without nodes, programs or transfers."""
    model = workload.model
    layers = (model.layers,) if scanned else model.layers_of_stages(workload.stages)
    modules = [create_stage(model, s, layers, jax.random.key(SEED)) for s in range(len(layers))]
    parameters = [nnx.to_pure_dict(nnx.state(module)) for module in modules]
    structures = [nnx.graphdef(module) for module in modules]
    transformation = optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw(OPTIMIZER, STEPS))
    state = transformation.init(parameters)
    scans_stages = scanned and model.recompute == "stage"

    def nats_and_tokens(parameters: list[Any], batch: Batch) -> tuple[Any, Any]:
        if scans_stages:
            x = scan_stages(model, workload.stages, parameters[0], jnp.asarray(batch["tokens"]))
        else:
            x = jnp.asarray(batch["tokens"])
            for structure, own in zip(structures, parameters, strict=True):
                x = _stage(structure, model)(own, x)
        return nnx.merge(structures[0], parameters[0]).loss(x, batch["targets"])

    def of_whole_batch(parameters: list[Any], batches: Batch):
        def mean(parameters: list[Any]):
            merged = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batches)
            nats, tokens = nats_and_tokens(parameters, merged)
            return nats / tokens

        return jax.value_and_grad(mean)(parameters)

    def of_each_microbatch(parameters: list[Any], batches: Batch):
        def add(total: Any, batch: Batch):
            (nats, tokens), own = jax.value_and_grad(nats_and_tokens, has_aux=True)(
                parameters, batch
            )
            return jax.tree.map(jnp.add, total, (own, nats, tokens)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), parameters)
        (gradients, nats, tokens), _ = jax.lax.scan(add, (zeros, 0.0, 0.0), batches)
        return nats / tokens, jax.tree.map(lambda leaf: leaf / tokens, gradients)

    loss_and_gradients = of_each_microbatch if accumulating else of_whole_batch

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: list[Any], state: Any, batches: Batch):
        loss, gradients = loss_and_gradients(parameters, batches)
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def run(batches: Sequence[Batch]) -> float:
        nonlocal parameters, state
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        parameters, state, loss = jax.block_until_ready(step(parameters, state, stacked))
        return float(loss)

    return run


def _stage(structure: Any, model: ModelConfig) -> Callable[[Any, jax.Array], jax.Array]:
    def apply(parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x)

    return jax.checkpoint(apply) if model.recompute == "stage" else apply


def scan_stages(model: ModelConfig, stages: int, parameters: Any, tokens: jax.Array) -> jax.Array:
    """All layers of a one-stage model, recomputed stage by stage in a scan over the stages."""
    [layers] = set(model.layers_of_stages(stages))
    structure = nnx.graphdef(nnx.eval_shape(lambda: Stage(model, layers, 0, jax.random.key(SEED))))
    blocks = jax.tree.map(
        lambda leaf: leaf.reshape(stages, layers, *leaf.shape[1:]), parameters["blocks"]
    )

    def apply(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return nnx.merge(structure, {"blocks": own})(x), None

    x = parameters["embedding"][tokens].astype(model.compute_dtype)
    return jax.lax.scan(jax.checkpoint(apply, prevent_cse=False), x, blocks)[0]


TIMES, NOTHING = "times", "nothing"
PIPELINE = "pipeline"
PLAIN = ("plain, scanned", "plain, in turn")
PROGRAMS: dict[str, Callable[[Workload], Iteration]] = {
    PIPELINE: pipeline,
    PLAIN[0]: functools.partial(one_device, scanned=True, accumulating=False),
    PLAIN[1]: functools.partial(one_device, scanned=False, accumulating=False),
    "accumulating, scanned": functools.partial(one_device, scanned=True, accumulating=True),
    "accumulating, in turn": functools.partial(one_device, scanned=False, accumulating=True),
}


def time_in_turns(workload: Workload, warmup: int, turns: int) -> dict[str, list[float]]:
    """Seconds of every iteration of every program.

    Raises:
        RuntimeError: if the programs' losses differ, so that they did not do the same work.
    """
    iterations = {name: create(workload) for name, create in PROGRAMS.items()}
    random = np.random.default_rng(SEED)
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    losses: dict[str, float] = {}
    for turn in range(warmup + turns):
        batches = workload.random_batches(random)
        for name, iteration in iterations.items():
            start = time.perf_counter()
            losses[name] = iteration(batches)
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    tolerance = 1e-4 if workload.model.compute_dtype == "float32" else 1e-2
    if not all(math.isclose(loss, losses[PIPELINE], rel_tol=tolerance) for loss in losses.values()):
        raise RuntimeError(f"the programs do not train alike, their last losses are {losses}")
    return seconds


def summary(workload: Workload, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and how the pipeline compares with each program and with the quickest plain step."""
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    times = {
        name: statistics.median(a / b for a, b in zip(seconds[PIPELINE], own, strict=True))
        for name, own in seconds.items()
    }
    quickest = min(PLAIN, key=lambda name: medians[name])
    return {
        "recompute": workload.model.recompute,
        "workload": asdict(workload),
        "ratio": round(times[quickest], 4),
        "ratio_to": quickest,
        "programs": {
            name: {
                "seconds_per_iteration": round(medians[name], 5),
                "tokens_per_second": round(workload.tokens / medians[name], 1),
                "pipeline_takes_times": round(times[name], 4),
                "seconds": [round(value, 5) for value in own],
            }
            for name, own in seconds.items()
        },
    }


def peak_memory_of(name: str, workload: Workload) -> int:
    """Peak bytes of this process after two iterations of the program, or after none."""
    device = jax.devices()[0]
    if name != NOTHING:
        iteration, random = PROGRAMS[name](workload), np.random.default_rng(SEED)
        for _ in range(2):
            iteration(workload.random_batches(random))
    return machine.peak_memory_bytes(device)


def table(result: dict[str, Any]) -> str:
    """The result of one recomputation mode, a line for each program."""
    lines = [
        f"recompute {result['recompute']:<15}{'s/iteration':>12}{'tokens/s':>11}{'peak MB':>9}"
        f"{'times':>7}"
    ]
    for name, own in result["programs"].items():
        lines.append(
            f"  {name:<23}{own['seconds_per_iteration']:>12.4f}{own['tokens_per_second']:>11.0f}"
            f"{own['peak_memory_bytes'] / 1e6:>9.0f}{own['pipeline_takes_times']:>7.3f}"
        )
    ratio = f"  the pipeline takes {result['ratio']:.3f} times as long as the quickest plain step"
    return "\n".join([*lines, f"{ratio} ({result['ratio_to']})"])


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.part is not None:
        print(json.dumps(_part(arguments)))
        return 0
    described, results = {}, []
    with tempfile.TemporaryDirectory() as cache:
        for recompute in arguments.recompute:
            run_part = functools.partial(_in_own_process, arguments, recompute, cache)
            result = run_part(TIMES)
            described = result.pop("machine")
            nothing = run_part(NOTHING)
            for name, own in result["programs"].items():
                own["peak_memory_bytes"] = run_part(name) - nothing
            print(table(result), flush=True)
            results.append(result)
    report = reporting.begun("overhead", described) | {"results": results}
    return reporting.finish(report, None, arguments.json)


def _in_own_process(arguments: argparse.Namespace, recompute: str, cache: str, part: str) -> Any:
    """What a process of its own finds for one part; the parts share their compiled programs."""
    own = ["--recompute", recompute, "--part", part]
    for name in ("preset", "compute_dtype", "attention", *WORKLOAD, *TURNS):
        own += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    finished = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.overhead", *own],
        env={
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        | os.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout)


def _part(arguments: argparse.Namespace) -> Any:
    [recompute] = arguments.recompute
    model = ModelConfig(
        **PRESETS[arguments.preset],
        compute_dtype=arguments.compute_dtype,
        attention=arguments.attention,
        recompute=recompute,
    )
    workload = Workload(model, **{name: getattr(arguments, name) for name in WORKLOAD})
    if arguments.part != TIMES:
        return peak_memory_of(arguments.part, workload)
    before = machine.describe()
    seconds = time_in_turns(workload, **{name: getattr(arguments, name) for name in TURNS})
    return summary(workload, seconds) | {"machine": before}


WORKLOAD = {
    "stages": (4, "stages of the pipeline"),
    "replicas": (2, "replicas of each stage"),
    "microbatches_per_data_node": (6, "microbatches of each data node in an iteration"),
    "microbatch_size": (4, "sequences of a microbatch"),
    "sequence_length": (256, "tokens of a sequence"),
}
TURNS = {
    "warmup": (2, "turns that are not counted"),
    "turns": (10, "turns that are counted"),
}


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("overhead", __doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--compute-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--attention", choices=ATTENTION, default="auto")
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        nargs="+",
        default=RECOMPUTE,
        help="modes to measure (all)",
    )
    for name, (default, text) in (WORKLOAD | TURNS).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} ({default})"
        )
    # What one of this program's own processes measures.
    parser.add_argument("--part", choices=(TIMES, NOTHING, *PROGRAMS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
