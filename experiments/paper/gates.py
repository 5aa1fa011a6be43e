"""Trains one model in which every microbatch runs the blocks of its own stages, on one thread.

    python -m experiments.paper.gates RUN.json --work FOLDER --output RESULT.json

The planner and the runtime are left out: the stages of each microbatch are drawn evenly, and one
program computes the exact gradient of an iteration, as the one-device oracle of the tests does.
Blocks, loss and optimizer are the library's, and a test holds the parameters against the oracle's.

A run that was stopped goes on from its last saved step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from skippipe_sched.errors import run_command

from experiments.benchmarks.harness import reporting
from experiments.paper import study_text
from skippipe_jax.config import ModelConfig, OptimizerConfig
from skippipe_jax.config.model import BLOCKWISE
from skippipe_jax.models.llama import DataStage, parameter_count
from skippipe_jax.optim.update_rule import learning_rate_schedule, update_rule
from skippipe_jax.storage.files import PARTIAL, atomic_write

MICROBATCHES, SEQUENCES, LENGTH = 8, 4, 64
TOKENS = MICROBATCHES * SEQUENCES * LENGTH
"""Bytes that an iteration learns."""
HEAD_WIDTH = 8
SAVE_EVERY_S = 120.0
# Sequences of an evaluation: of the full model, and of each set of stages.
EVALUATED, EVALUATED_OF_SETS, AT_ONCE = 2048, 512, 256


class Phase(NamedTuple):
    """A part of training, from a share of the steps on.

    Attributes:
        begins: at which share of the steps.
        visited: stages that a skipping microbatch visits.
        skipping: the share of an iteration's microbatches that skip.
        every: one iteration in so many has microbatches that skip; in the others none does.
    """

    begins: float
    visited: int
    skipping: float = 1.0
    every: int = 1


@dataclass(frozen=True)
class GatedRun:
    """A model, how it learns, and how its microbatches skip.

    Attributes:
        blocks, stages, width: of the model; the blocks are spread over the stages evenly.
        steps: iterations.
        seed: of the first weights, of the order of the text, and of the stages that are visited.
        phases: before the first, all microbatches visit all stages.
        schedule: as `optimizer.schedule`; `warmup-stable-decay` falls to 0 over the last part.
        decay_fraction: that part.
        learning_rate: the highest.
        scaled_start: the output matrices of residual branches begin at 1 / sqrt(2 blocks) of the
            usual deviation.
        optimizer: `adamw`, or `muon` for the matrices of blocks.
        skip_scaling: `inverse` divides what a stage adds, in training, by the share of
            microbatches that visit it.
        depth: which stages are skipped more often: `even`, the `late` or the `early` ones.
        distillation: weight of the divergence of skipping microbatches from what the full model
            says of the same text. The full model is run for that and learns nothing by it.
        grown_from: blocks in the first part of training. 0: all.
        grown_at: the share of the steps after which the last blocks are stacked once more.
    """

    blocks: int = 12
    stages: int = 6
    width: int = 16
    steps: int = 1072
    seed: int = 0
    phases: tuple[Phase, ...] = ()
    schedule: str = "warmup-stable-decay"
    decay_fraction: float = 0.3
    learning_rate: float = 2e-2
    scaled_start: bool = True
    optimizer: str = "adamw"
    skip_scaling: str = "none"
    depth: str = "even"
    distillation: float = 0.0
    grown_from: int = 0
    grown_at: float = 0.7

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> GatedRun:
        """Read what `dataclasses.asdict` gave."""
        return cls(**{**tree, "phases": tuple(Phase(*phase) for phase in tree["phases"])})

    @property
    def model(self) -> ModelConfig:
        """The shapes of the model, in the library's words."""
        return ModelConfig(
            vocabulary_size=259,
            width=self.width,
            layers=self.blocks,
            heads=self.width // HEAD_WIDTH,
            kv_heads=self.width // HEAD_WIDTH,
            ffn_width=8 * self.width // 3 // 8 * 8,
            context=LENGTH,
            initial_deviation=self.width**-0.5,
            attention=BLOCKWISE,  # On one thread a step takes 0.5 to 0.65 times as long as by XLA.
        )

    def phase(self, step: int) -> Phase:
        """The phase of an iteration, counted from 0; one without skipping before the first."""
        begun = [phase for phase in self.phases if phase.begins * self.steps <= step]
        return begun[-1] if begun else Phase(0.0, self.stages, 0.0)

    def skipping(self, step: int) -> int:
        """Count the microbatches of an iteration that skip stages."""
        phase = self.phase(step)
        if self.grown_from and step < self._grows_at:
            return 0
        return round(phase.skipping * MICROBATCHES) if (step + 1) % phase.every == 0 else 0

    def blocks_at(self, step: int) -> int:
        """Count the blocks that the model has in an iteration."""
        return self.grown_from if self.grown_from and step < self._grows_at else self.blocks

    @property
    def _grows_at(self) -> int:
        return round(self.grown_at * self.steps)

    def compute(self) -> float:
        """Blocks that all microbatches of all iterations run, in iterations of the full model."""
        per_stage = self.blocks // self.stages
        total = 0.0
        for step in range(self.steps):
            share = self.skipping(step) / MICROBATCHES
            partial = self.phase(step).visited * per_stage
            if self.distillation:
                partial += self.blocks / 3  # a forward pass more, which is a third of all
            total += share * partial + (1 - share) * self.blocks_at(step)
        return total / self.blocks


def drawn_stages(
    rng: np.random.Generator, count: int, visited: int, stages: int, depth: str = "even"
) -> Int[np.ndarray, "count visited"]:
    """Draw the stages of `count` microbatches, the data stage among them, in order.

    Every inner stage is visited equally often, with a difference of one, unless `depth` says else.
    """
    weights = {
        "even": np.ones(stages - 1),
        "late": np.linspace(1.4, 0.6, stages - 1),
        "early": np.linspace(0.6, 1.4, stages - 1),
    }[depth]
    visits, rows = np.zeros(stages - 1), []
    for _ in range(count):
        seldom_first = np.lexsort((rng.random(stages - 1), visits / weights))
        chosen = np.sort(seldom_first[: visited - 1])
        visits[chosen] += 1
        rows.append([0, *(1 + chosen)])
    return np.array(rows)


def blocks_of(stages: Sequence[int], per_stage: int) -> Int[np.ndarray, " block"]:
    """Number the blocks of some stages."""
    return (np.asarray(stages)[:, None] * per_stage + np.arange(per_stage)).ravel()


Parameters = dict[str, Any]


class Training:
    """A run while it trains: its program, its parameters and the state of its optimizer."""

    def __init__(self, run: GatedRun):
        """Draw the first weights."""
        self.run, self.step = run, 0
        self._set_blocks(run.blocks_at(0))
        self.parameters = self._first_weights()
        self.optimizer = optimizer_of(run)
        self.state = self.optimizer.init(self.parameters)
        self._iterate = jax.jit(self._iteration)
        self._evaluate = jax.jit(self._loss)

    def _set_blocks(self, blocks: int) -> None:
        model = self.run.model
        self.blocks = blocks
        shapes = nnx.eval_shape(lambda: DataStage(model, blocks, 0, jax.random.key(0)))
        self.structure = nnx.graphdef(shapes)

    def _first_weights(self) -> Parameters:
        run = self.run
        model = DataStage(run.model, self.blocks, 0, jax.random.key(run.seed))
        parameters = nnx.to_pure_dict(nnx.state(model))
        if run.scaled_start:
            for name in ("output", "down"):
                own = parameters["blocks"][name]
                own["kernel"] = own["kernel"] / math.sqrt(2 * self.blocks)
        return parameters

    def train_step(self, tokens: Int[np.ndarray, "microbatch sequence position"]) -> float:
        """Run one iteration; returns its loss in nats per byte."""
        run, step = self.run, self.step
        if run.blocks_at(step) != self.blocks:
            self._grow()
        count, phase = run.skipping(step), run.phase(step)
        visited = None
        if count:
            rng = np.random.default_rng([run.seed, 2, step])
            drawn = drawn_stages(rng, count, phase.visited, run.stages, run.depth)
            per_stage = run.blocks // run.stages
            visited = np.stack([blocks_of(stages, per_stage) for stages in drawn])
        arguments = (visited, tokens[:count], tokens[count:])
        self.parameters, self.state, loss = self._iterate(self.parameters, self.state, *arguments)
        self.step += 1
        return float(loss)

    def evaluate(
        self,
        tokens: Int[np.ndarray, "sequence position"],
        stages: Sequence[int] | None = None,
    ) -> float:
        """Mean loss in nats per byte, of the full model or of some stages."""
        visited = None
        if stages is not None:
            visited = blocks_of(stages, self.run.blocks // self.run.stages)
        parts = np.split(tokens, len(tokens) // AT_ONCE)
        return float(np.mean([self._evaluate(self.parameters, visited, part) for part in parts]))

    def _model(self, parameters: Parameters, visited: Any) -> tuple[Any, Any]:
        if visited is not None:
            chosen = jax.tree.map(lambda leaf: leaf[visited], parameters["blocks"])
            if self.run.skip_scaling == "inverse":
                chosen = self._divided(chosen, visited)
            parameters = {**parameters, "blocks": chosen}
        return nnx.merge(self.structure, parameters), parameters

    def _divided(self, chosen: Parameters, visited: Any) -> Parameters:
        """Divide what blocks of inner stages add by the share of microbatches that visit them."""
        per_stage = self.run.blocks // self.run.stages
        share = (visited.shape[-1] / per_stage - 1) / (self.run.stages - 1)
        factor = jnp.where(visited >= per_stage, 1 / share, 1.0)[:, None, None]
        scaled = {name: {"kernel": factor * chosen[name]["kernel"]} for name in ("output", "down")}
        return {**chosen, **scaled}

    def _loss(
        self, parameters: Parameters, visited: Any, tokens: Int[Array, "sequence position"]
    ) -> Float[Array, ""]:
        model, _ = self._model(parameters, visited)
        nats, count = model.loss(model(tokens[:, :-1]), tokens[:, 1:])
        return nats / count

    def _distilled(self, parameters: Parameters, visited: Any, tokens: Any) -> Float[Array, ""]:
        """The loss of some stages, and their divergence from the full model."""
        model, _ = self._model(parameters, visited)
        hidden = model(tokens[:, :-1])
        nats, count = model.loss(hidden, tokens[:, 1:])
        full, _ = self._model(jax.lax.stop_gradient(parameters), None)
        teacher = jax.nn.log_softmax(full.logits(full(tokens[:, :-1])))
        own = jax.nn.log_softmax(model.logits(hidden))
        divergence = jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - own), axis=-1))
        weight = self.run.distillation
        return (1 - weight) * nats / count + weight * divergence

    def _mean_loss(self, parameters: Parameters, visited: Any, partial: Any, full: Any) -> Any:
        """The mean over the microbatches of an iteration."""
        total = jnp.zeros(())
        if len(partial):
            loss = self._distilled if self.run.distillation else self._loss
            total += jnp.sum(jax.vmap(loss, (None, 0, 0))(parameters, visited, partial))
        if len(full):
            together = full.reshape(-1, full.shape[-1])
            total += len(full) * self._loss(parameters, None, together)
        return total / (len(partial) + len(full))

    def _iteration(
        self, parameters: Parameters, state: Any, visited: Any, partial: Any, full: Any
    ) -> tuple[Any, Any, Float[Array, ""]]:
        loss, gradients = jax.value_and_grad(self._mean_loss)(parameters, visited, partial, full)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def _grow(self) -> None:
        """Stack the last blocks once more, with what the optimizer holds of them."""
        added = self.run.blocks - self.blocks
        order = np.concatenate(
            [np.arange(self.blocks), np.arange(self.blocks - added, self.blocks)]
        )

        def stacked(path: tuple[Any, ...], leaf: Any) -> Any:
            names = [getattr(key, "key", None) for key in path]
            return leaf[order] if "blocks" in names and leaf.ndim > 1 else leaf

        self.parameters = jax.tree_util.tree_map_with_path(stacked, self.parameters)
        self.state = jax.tree_util.tree_map_with_path(stacked, self.state)
        self._set_blocks(self.run.blocks)

    def start_from(self, path: Path) -> None:
        """Take over the weights of another run, which `save` has written."""
        weights, structure = jax.tree.flatten(self.parameters)
        with np.load(path) as saved:
            weights = [jnp.asarray(saved[f"leaf{n}"]) for n in range(len(weights))]
        self.parameters = jax.tree.unflatten(structure, weights)

    def save(self, path: Path) -> None:
        """Write all that the run needs to go on."""
        leaves = jax.tree.leaves((self.parameters, self.state))
        partial = path.with_name(path.name + PARTIAL)
        with partial.open("wb") as file:
            np.savez(file, step=self.step, **{f"leaf{n}": leaf for n, leaf in enumerate(leaves)})
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from what `save` has written."""
        with np.load(path) as saved:
            self.step = int(saved["step"])
            if self.run.blocks_at(max(self.step - 1, 0)) != self.blocks:
                self._grow()
            structure = jax.tree.structure((self.parameters, self.state))
            leaves = [jnp.asarray(saved[f"leaf{n}"]) for n in range(structure.num_leaves)]
            self.parameters, self.state = jax.tree.unflatten(structure, leaves)


def optimizer_config(run: GatedRun) -> OptimizerConfig:
    """Say how a run learns, in the library's words."""
    is_cosine = run.schedule == "cosine"
    config = OptimizerConfig(
        learning_rate=run.learning_rate,
        schedule=run.schedule,
        warmup_steps=max(10, run.steps // 50),
        final_ratio=0.1 if is_cosine else 0.0,
        weight_decay=0.0,
    )
    return config if is_cosine else replace(config, decay_fraction=run.decay_fraction)


def optimizer_of(run: GatedRun) -> optax.GradientTransformation:
    """Build the optimizer of a run, with clipping by the global norm."""
    config = optimizer_config(run)
    clipped = optax.clip_by_global_norm(1.0)
    if run.optimizer == "adamw":
        return optax.chain(clipped, update_rule(config, run.steps))

    def dimensions(parameters: Any) -> Any:
        # Matrices of blocks are stacked by depth; all else is left to Adam.
        return jax.tree.map(
            lambda leaf: optax.contrib.MuonDimensionNumbers(1, 2) if leaf.ndim == 3 else None,
            parameters,
        )

    schedule = learning_rate_schedule(config, run.steps)
    muon = optax.contrib.muon(
        schedule, adam_b2=0.95, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions
    )
    return optax.chain(clipped, muon)


def batches(run: GatedRun, text: np.ndarray, step: int) -> Int[np.ndarray, "microbatch row token"]:
    """Cut the windows of an iteration; each window of the text comes once in an epoch."""
    windows = (len(text) - 1) // LENGTH
    rows = MICROBATCHES * SEQUENCES
    epoch, first = divmod(step * rows, windows // rows * rows)
    order = np.random.default_rng([run.seed, 1, epoch]).permutation(windows)[first : first + rows]
    return cut(text, order).reshape(MICROBATCHES, SEQUENCES, LENGTH + 1)


def cut(text: np.ndarray, windows: np.ndarray) -> Int[np.ndarray, "window token"]:
    """Cut windows of a text, each with the first byte of the next one."""
    return text[windows[:, None] * LENGTH + np.arange(LENGTH + 1)].astype(np.int32)


def evaluated(text: np.ndarray) -> Int[np.ndarray, "window token"]:
    """Choose the windows that are evaluated, the same for all runs."""
    windows = (len(text) - 1) // LENGTH
    chosen = np.random.default_rng(0).permutation(windows)[:EVALUATED]
    return cut(text, chosen[: len(chosen) // AT_ONCE * AT_ONCE])


def losses(
    evaluate: Callable[..., float], stages: int, texts: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Evaluate the full model, and all sets of half of its stages, on both held-out texts.

    `evaluate` takes windows, and the stages that run if they are not all.
    """
    found = {}
    half = stages // 2
    for part in (study_text.VALIDATION, study_text.TEST):
        windows = evaluated(texts[part])
        found[part] = evaluate(windows)
        few = windows[:EVALUATED_OF_SETS]
        sets = itertools.combinations(range(1, stages), half - 1)
        found[f"{part} of {half} stages"] = float(
            np.mean([evaluate(few, (0, *own)) for own in sets])
        )
    return {name: round(loss, 5) for name, loss in found.items()}


def state_of(work: Path, name: str) -> Path:
    """The file in which a run of this name keeps its state."""
    return work / "saved" / f"{name}.npz"


def train(
    run: GatedRun, work: Path, name: str, text: str = study_text.ALL, start: str | None = None
) -> dict[str, Any]:
    """Train a run, from where it was; returns what is found.

    `text` is one of `study_text`. With `start`, the name of another run, its weights are the first
    ones, and what is found says how good they are, and what becomes of the general text.
    """
    texts = study_text.read(work / "text", text)
    measured, before = {"": texts}, {}
    training, saved = Training(run), state_of(work, name)
    if start is not None:
        measured["general "] = study_text.read(work / "text", study_text.GENERAL)
        training.start_from(state_of(work, start))
        before = {
            f"{label}{part} before": round(training.evaluate(evaluated(own[part])), 5)
            for label, own in measured.items()
            for part in (study_text.VALIDATION, study_text.TEST)
        }
    saved.parent.mkdir(parents=True, exist_ok=True)
    if saved.exists():
        training.restore(saved)
    begun_s = saved_s = time.monotonic()
    while training.step < run.steps:
        tokens = batches(run, texts[study_text.TRAINING], training.step)
        loss = training.train_step(tokens)
        if training.step % 50 == 0:
            print(f"step {training.step}/{run.steps}  loss {loss:.4f}", flush=True)
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            training.save(saved)
            saved_s = time.monotonic()
    training.save(saved)
    return {
        "compute": round(run.compute(), 3),
        "losses": before
        | {
            f"{label}{part}": loss
            for label, own in measured.items()
            for part, loss in losses(training.evaluate, run.stages, own).items()
        },
        "parameters": parameter_count(training.parameters),
        "minutes": round((time.monotonic() - begun_s) / 60, 1),
    }


def main() -> int:
    """Parse the command line, train and write the result; returns the exit code."""
    parser = reporting.documented_parser("python -m experiments.paper.gates", __doc__)
    parser.add_argument("run", type=Path, help="definition of the run, as JSON")
    parser.add_argument("--work", type=Path, required=True, help="folder for texts and states")
    parser.add_argument("--output", type=Path, required=True, help="output file of the result")
    arguments = parser.parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    given = json.loads(arguments.run.read_text(encoding="utf-8"))
    run = GatedRun.from_json(given["run"])
    of_text = {key: given[key] for key in ("text", "start") if key in given}
    found = train(run, arguments.work, arguments.output.stem, **of_text)
    result = given | {"run": asdict(run)} | found | reporting.origin(given["command"])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.output, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
