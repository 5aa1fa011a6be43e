"""Validation loss and perplexity of a model, in full and with stages left out or swapped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from skippipe_sched.errors import InputError
from skippipe_sched.figures.tables import aligned
from tqdm import tqdm

from skippipe_jax.config import DataConfig
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, held_out_batches
from skippipe_jax.inference.partial import Question, StageOrder, Variant, full
from skippipe_jax.inference.remote_model import RemoteModel
from skippipe_jax.inference.scaling import Scaling
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.branch_scales import BranchScales

# The exponential of a greater loss is no float any more.
MAX_LOSS_NATS = 700.0
# The columns of a table that hold numbers.
FIGURES = (2, 3, 5, 6)


@dataclass(frozen=True)
class Answer:
    """Mean cross-entropy in nats per token along each variant of a question.

    Means and deviation weigh each variant by the microbatches that take it, if there are any.
    """

    question: Question
    losses: tuple[float, ...]

    @property
    def perplexities(self) -> tuple[float, ...]:
        """The exponential of each loss."""
        return tuple(map(math.exp, self.losses))

    @property
    def loss(self) -> float:
        """The mean of the losses."""
        return float(np.average(self.losses, weights=self._weights))

    @property
    def perplexity(self) -> float:
        """The mean of the perplexities."""
        return float(np.average(self.perplexities, weights=self._weights))

    @property
    def deviation(self) -> float:
        """The standard deviation of the perplexities."""
        squares = np.square(np.subtract(self.perplexities, self.perplexity))
        return float(np.sqrt(np.average(squares, weights=self._weights)))

    @property
    def _weights(self) -> list[int]:
        return [variant.microbatches or 1 for variant in self.question.variants]

    def to_json(self) -> dict[str, Any]:
        """Return the figures over all variants, and of each."""
        question, perplexities = self.question, self.perplexities
        shares = {} if question.share is None else {"share": question.share}
        each = zip(question.variants, self.losses, perplexities, strict=True)
        return shares | {
            "possible": question.possible,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "deviation": self.deviation,
            "least": min(perplexities),
            "greatest": max(perplexities),
            "each": [
                {key: value for key, value in asdict(variant).items() if value is not None}
                | {"loss": loss, "perplexity": perplexity}
                for variant, loss, perplexity in each
            ],
        }


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token, its exponential, and over how many target tokens.

    They are those of the full model; `answers` compare variants of it, over the same tokens.
    `step` is None for a model that is not of a run. `scaled` is the same for a model whose branches
    are scaled, and `scales` are then its scales, by how many stages run.
    """

    step: int | None
    loss: float
    perplexity: float
    tokens: int
    answers: tuple[Answer, ...] = ()
    scales: Mapping[int, BranchScales] | None = None
    scaled: Evaluation | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one object: a list under `keep`, an object under each other question asked."""
        result: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "tokens": self.tokens,
        }
        if self.scales is not None:
            result["scales"] = {kept: asdict(scales) for kept, scales in self.scales.items()}
        for answer in self.answers:
            if answer.question.share is None:
                result[answer.question.name] = answer.to_json()
            else:
                result.setdefault(answer.question.name, []).append(answer.to_json())
        if self.scaled is not None:
            result["scaled"] = self.scaled.to_json()
        return result


def evaluate(
    model: StagedModel | RemoteModel,
    step: int | None,
    data: DataConfig,
    sequences: int,
    questions: Collection[Question],
    scaling: Scaling | None = None,
    part: str = "all",
) -> Evaluation:
    """Evaluate the full model, and all variants of the questions, on the same held-out sequences.

    These are of the `part` that `held_out_batches` takes. With a scaling, all of it is evaluated
    once more with the scales for so many stages as run.

    Raises:
        InputError: if there is no text, or a loss is not finite.
    """
    full_order = full(model.stages)
    orders = {
        full_order,
        *(variant.stages for question in questions for variant in question.variants),
    }
    losses, tokens = losses_by_order(model, orders, data, sequences, part)
    for order, loss in losses.items():
        if not loss < MAX_LOSS_NATS and step is None:
            option = "--hf" if isinstance(model, StagedModel) else "--url"
            problem = f"is that of the model of {option} along stages {list(order)}"
            raise InputError("loss", loss, problem, "Load other weights: training had diverged")
        if not loss < MAX_LOSS_NATS:
            raise InputError(
                "--step",
                step,
                f"the loss along stages {list(order)} is {loss}: training had diverged",
                "Choose an earlier step, or train again with a lower optimizer.learning_rate",
            )
    evaluation = _evaluation(step, questions, losses, full_order, tokens)
    if scaling is None:
        return evaluation
    assert isinstance(model, StagedModel), "a service scales by itself"
    counts = sorted({len(order) for order in orders})
    for kept in counts:
        scaled_model = model.scaled(scaling.scales(kept))
        same_length = [order for order in orders if len(order) == kept]
        losses |= losses_by_order(scaled_model, same_length, data, sequences, part)[0]
    for order, loss in losses.items():
        if not loss < MAX_LOSS_NATS:
            problem = f"the scaled loss along stages {list(order)} is {loss}"
            raise InputError("--scale", scaling.scale, problem, "Write a number closer to 1")
    scaled = _evaluation(step, questions, losses, full_order, tokens)
    scales = {kept: scaling.scales(kept) for kept in counts}
    return replace(evaluation, scaled=replace(scaled, scales=scales))


def _evaluation(
    step: int | None,
    questions: Collection[Question],
    losses: Mapping[StageOrder, float],
    full_order: StageOrder,
    tokens: int,
) -> Evaluation:
    """Return what the losses along all orders say to the questions."""
    answers = tuple(
        Answer(question, tuple(losses[variant.stages] for variant in question.variants))
        for question in questions
    )
    loss = losses[full_order]
    return Evaluation(step, loss, math.exp(loss), tokens, answers)


def losses_by_order(
    model: StagedModel | RemoteModel,
    orders: Collection[StageOrder],
    data: DataConfig,
    sequences: int,
    part: str = "all",
) -> tuple[dict[StageOrder, float], int]:
    """Mean loss in nats along each order of stages, and over how many target tokens it is taken."""
    batch_size = min(data.microbatch_size, sequences)
    ordered = sorted(orders)
    totals = np.zeros((len(ordered), 2))
    with tqdm(unit="pass", disable=None, leave=False) as bar:
        for batch in held_out_batches(data, batch_size, sequences, part=part):
            totals += _sums(model, ordered, batch)
            bar.update(len(ordered))
    means = totals[:, 0] / totals[:, 1]
    return dict(zip(ordered, means.tolist(), strict=True)), int(totals[0, 1])


def _sums(
    model: StagedModel | RemoteModel, orders: Sequence[StageOrder], batch: Batch
) -> Float[np.ndarray, "order 2"]:
    """Sum of the losses in nats along each of the sorted orders, and how many targets there are."""
    if isinstance(model, StagedModel):
        embedded, targets = model.embed(batch), jnp.asarray(batch["targets"])
        losses = _losses_along(model, orders, 1, embedded, targets)
        return np.stack(jax.device_get(list(losses)))
    counted = np.count_nonzero(batch["targets"] != IGNORED_TARGET)
    return np.array([(-model.log_probabilities(batch, order).sum(), counted) for order in orders])


def _losses_along(
    model: StagedModel,
    orders: Sequence[StageOrder],
    shared: int,
    x: Float[Array, "sequence position width"],
    targets: Int[Array, "sequence position"],
) -> Iterator[Float[Array, 2]]:
    """Loss and targets along each of the sorted orders, which share their first `shared` stages.

    What several orders begin with is run once. `x` is the residual stream behind the shared stages.
    """
    if len(orders[0]) == shared:
        yield model.sum_of_losses(x, targets)
        orders = orders[1:]
    for stage, continuing in itertools.groupby(orders, key=lambda order: order[shared]):
        output = model.apply(stage, x)
        yield from _losses_along(model, list(continuing), shared + 1, output, targets)


def subsets(evaluation: Evaluation) -> dict[int, dict[StageOrder, float]]:
    """Return the perplexity of each subset of --keep-fraction, by its number of stages."""
    perplexities: dict[int, dict[StageOrder, float]] = {}
    for answer in evaluation.answers:
        if answer.question.share is not None:
            for variant, perplexity in zip(
                answer.question.variants, answer.perplexities, strict=True
            ):
                perplexities.setdefault(len(variant.stages), {})[variant.stages] = perplexity
    return perplexities


def table(evaluation: Evaluation, model: StagedModel | RemoteModel, data: DataConfig) -> str:
    """Return the evaluation as text: a line for the full model, and for each variant and question.

    The first line names the text of `data`. What is scaled stands beside what is not.
    """
    of_step = "" if evaluation.step is None else f"step {evaluation.step}: "
    text = ", ".join(source.label for source in data.sources())
    lines = [
        f"{of_step}validation loss {evaluation.loss:.4f} nats per token, perplexity "
        f"{evaluation.perplexity:.3f}, over {evaluation.tokens:,} tokens of the held-out part of "
        f"{text}, all stages in order"
    ]
    scaled = evaluation.scaled
    if scaled is not None:
        assert isinstance(model, StagedModel)
        cut = model.cut
        lines.append(f"scaled: loss {scaled.loss:.4f}, perplexity {scaled.perplexity:.3f}")
        lines += [
            f"scales where {kept} of {len(cut)} stages run: {scales.scales_text(cut)}"
            for kept, scales in sorted((scaled.scales or {}).items(), reverse=True)
        ]
    if not evaluation.answers:
        return "\n".join(lines)
    each = [_rows(one, model.stages) for one in (evaluation, scaled) if one is not None]
    titles = ["", "stages"] + ["loss", "perplexity", ""] * len(each)
    if scaled is not None:
        titles[5:7] = ["scaled", "perplexity"]
    rows = [
        [*own[0][:2], *(figure for one in own for figure in one[2:])]
        for own in zip(*each, strict=True)
    ]
    rows.insert(0, titles)
    left = [column for column in range(len(titles)) if column not in FIGURES]
    return "\n".join([*lines, aligned(rows, left)])


def _rows(evaluation: Evaluation, stages: int) -> list[list[str]]:
    """Return a row for the full model, each order and each question: names, stages, figures."""
    rows = [["full", _stages(full(stages)), *_figures(evaluation.loss, evaluation.perplexity), ""]]
    for answer in evaluation.answers:
        question, perplexities = answer.question, answer.perplexities
        variants = zip(question.variants, answer.losses, perplexities, strict=True)
        rows += [
            [_label(question, variant), _stages(variant.stages), *_figures(loss, perplexity), ""]
            for variant, loss, perplexity in variants
        ]
        sample = f"{len(question.variants)} of {question.possible}"
        spread = f"± {answer.deviation:.3f}, {min(perplexities):.3f} to {max(perplexities):.3f}"
        means = _figures(answer.loss, answer.perplexity)
        rows.append([f"{_name(question)}, mean", sample, *means, spread])
    return rows


def _figures(loss: float, perplexity: float) -> tuple[str, str]:
    return f"{loss:.4f}", f"{perplexity:.3f}"


def _stages(order: StageOrder) -> str:
    return " ".join(map(str, order))


def _name(question: Question) -> str:
    return question.name if question.share is None else f"{question.name} {question.share:g}"


def _label(question: Question, variant: Variant) -> str:
    if variant.microbatches is not None:
        return f"path, {variant.microbatches}x"
    if variant.swapped is not None:
        return "swapped {} and {}".format(*variant.swapped)
    if variant.left_out is not None:
        return f"without {variant.left_out}"
    return _name(question)
