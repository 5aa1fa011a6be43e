"""The section `model`: shape and numerics, and what may compute attention of which shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import DTYPES, Choice, Count, Positive, Section

AUTO, XLA, BLOCKWISE, CUDNN, SPLASH = "auto", "xla", "blockwise", "cudnn", "splash"
ATTENTION = Choice((AUTO, XLA, BLOCKWISE, CUDNN, SPLASH))
SHORT = 256
"""Sequences up to so long have so few scores that by default all of them are there at once."""
CPU_BLOCK, BLOCK = 128, 512
"""Queries, and keys, that blockwise attention takes at a time on processors, and on others."""
PLATFORM_OF = {CUDNN: "gpu", SPLASH: "tpu"}
"""Where a kernel runs that does not run everywhere, by JAX's names."""
MOST_CONSTANTS = 1 << 19
"""Numbers in the cosines and sines that a program has as constants, in 2 MB."""
SPLASH_LANES = 128
CUDNN_MOST_WIDTH, CUDNN_WIDTH_STEP = 128, 8


def holds_all_scores(attention: str, length: int) -> bool:
    """Whether all scores of a sequence of so many tokens are there at once, wherever it runs."""
    return attention == XLA or (attention == AUTO and length <= SHORT)


def turns_by_constants(length: int, head_width: int) -> bool:
    """Tell whether the rotations of sequences of so many tokens are constants of a program."""
    return length * head_width <= MOST_CONSTANTS


def why_unfit(implementation: str, *, length: int, head_width: int, compute_dtype: str) -> str:
    """Why a kernel does not take such sequences and heads, as a part of a sentence; "" if it does.

    Both kernels say so themselves, but only when they are compiled, and of one device.
    """
    if implementation == CUDNN:
        if compute_dtype == "float32":
            return "does not compute in model.compute_dtype = 'float32'"
        if head_width > CUDNN_MOST_WIDTH or head_width % CUDNN_WIDTH_STEP:
            return (
                f"takes heads of a width up to {CUDNN_MOST_WIDTH} that {CUDNN_WIDTH_STEP} divides, "
                f"and model.width / model.heads is {head_width}"
            )
    if implementation == SPLASH:
        if length % SPLASH_LANES:
            return (
                f"takes sequences of a multiple of {SPLASH_LANES} tokens, and "
                f"data.sequence_length is {length}"
            )
        if head_width % SPLASH_LANES:
            return (
                f"takes heads whose width {SPLASH_LANES} divides, and model.width / model.heads "
                f"is {head_width}"
            )
    return ""


RECOMPUTE = Choice(
    (
        "none",
        "dots_with_no_batch_dims_saveable",
        "offload_dot_with_no_batch_dims",
        "save_only_attention",
        "block",
        "stage",
    )
)
PRECISIONS = Choice(("default", "high", "highest"))

# How a model that comes without a plan is cut. For inference into at most so many stages, as far as
# layers allow; as a run, which is converted stage by stage, into one for every so many layers.
MOST_STAGES = 6
LAYERS_OF_STAGE = 4

# tiny is the quickstart's model, 3.3 million parameters. Published shapes: 500m and 1.5b are the
# paper's models, 8b is Llama 3 8B.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocabulary_size": 259,
        "width": 256,
        "layers": 4,
        "heads": 4,
        "kv_heads": 4,
        "ffn_width": 704,
        "context": 256,
    },
    "500m": {
        "vocabulary_size": 32000,
        "width": 1024,
        "layers": 24,
        "heads": 16,
        "kv_heads": 16,
        "ffn_width": 4096,
        "context": 1024,
    },
    "1.5b": {
        "vocabulary_size": 32000,
        "width": 2048,
        "layers": 24,
        "heads": 16,
        "kv_heads": 16,
        "ffn_width": 8192,
        "context": 4096,
    },
    "8b": {
        "vocabulary_size": 128256,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "ffn_width": 14336,
        "context": 4096,
        "rope_theta": 500000.0,
        "norm_epsilon": 1e-5,
    },
}


@dataclass(frozen=True)
class RopeScaling(Section, name="model.rope_scaling"):
    """Llama 3's stretching of rotary wavelengths beyond the context that it was trained with.

    Attributes:
        factor: how many times longer wavelengths become that are long.
        low_frequency_factor: long are those above `original_context` over this.
        high_frequency_factor: short, and left as they are, those below `original_context` over
            this; between the two it goes over smoothly.
        original_context: positions that the model was first trained with.
    """

    factor: Positive = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: Count = 8192

    def __post_init__(self):
        """Refuse what would divide by zero."""
        super().__post_init__()
        fields.number(
            self.high_frequency_factor,
            "model.rope_scaling.high_frequency_factor",
            self.low_frequency_factor,
            above=True,
        )


class StageCut(tuple[int, ...]):
    """How a model is cut: the blocks of each stage, the data stage first."""

    __slots__ = ()

    def blocks(self, stage: int) -> range:
        """Return which blocks of the model a stage holds."""
        first = sum(self[:stage])
        return range(first, first + self[stage])


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """Shape and numerics of the model.

    Attributes:
        preset: fills in every shape that neither is given nor comes with `init_from`.
        vocabulary_size: tokens that there are, by default those of the tokenizer.
        width: of the residual stream.
        layers: blocks of attention and feed-forward.
        heads: of attention; they share the width.
        kv_heads: of keys and values, each shared by `heads / kv_heads` heads.
        ffn_width: the inner width of the feed-forward.
        context: the longest sequence.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: Llama 3's stretching of the wavelengths. null: none.
        tied_head: the head is the embedding.
        norm_epsilon: added to mean squares before their root is taken.
        initial_deviation: of matrices and embedding, which are drawn from a normal distribution.
            null: one over the root of the width.
        stage_layers: blocks of each stage. null: spread over the stages evenly.
        parameter_dtype: `float32` or `bfloat16`. Most updates are smaller than what bfloat16 tells
            apart: training rounds them up or down by chance, so that small ones add up.
        compute_dtype: `float32` or `bfloat16`, for activations and their gradients.
        matmul_precision: of matrix products, by JAX's names: what a device is quickest with
            (`default`: of float32 often fewer bits), `high`, or `highest`.
        recompute: what the backward pass computes again: `none`, each `block` from its input, or
            the whole `stage` from its input. Between them, from its input and what is kept besides:
            `save_only_attention`, what attention gives; `dots_with_no_batch_dims_saveable`, the
            products with matrices; `offload_dot_with_no_batch_dims`, these in the host's memory.
        attention: `xla` holds all scores of a sequence at once; `blockwise` those of some tokens by
            as many, one square after another; `cudnn` is the fused kernel of NVIDIA GPUs, and
            `splash` that of TPUs. `auto` is the kernel of the device if the shapes fit it, else
            `blockwise`, and `xla` for sequences of up to 256 tokens.
    """

    preset: Annotated[str, Choice(PRESETS)] | None = None
    vocabulary_size: Count = 259
    width: Count = 256
    layers: Count = 4
    heads: Count = 4
    kv_heads: Count = 4
    ffn_width: Count = 704
    context: Count = 256
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    norm_epsilon: Positive = 1e-6
    initial_deviation: Positive | None = None
    stage_layers: tuple[int, ...] | None = None
    parameter_dtype: Annotated[str, DTYPES] = "float32"
    compute_dtype: Annotated[str, DTYPES] = "float32"
    matmul_precision: Annotated[str, PRECISIONS] = "default"
    recompute: Annotated[str, RECOMPUTE] = "none"
    attention: Annotated[str, ATTENTION] = AUTO

    def __post_init__(self):
        """Refuse shapes and names that fit no model."""
        super().__post_init__()
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise InputError(
                "model.heads",
                self.heads,
                f"width {self.width} does not split into heads of an even width",
                "Choose heads so that width / heads is a whole even number",
            )
        if self.heads % self.kv_heads:
            raise InputError(
                "model.kv_heads",
                self.kv_heads,
                f"{self.heads} heads do not share it evenly",
                "Choose a divisor of model.heads",
            )

    @property
    def deviation(self) -> float:
        """The standard deviation of the first matrices and embedding."""
        return self.width**-0.5 if self.initial_deviation is None else self.initial_deviation

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads

    def why_unfit(self, attention: str, length: int) -> str:
        """Why a kernel of attention does not take sequences of so many tokens; "" if it does."""
        return why_unfit(
            attention,
            length=length,
            head_width=self.head_width,
            compute_dtype=self.compute_dtype,
        )

    def layers_of_stages(self, stages: int) -> StageCut:
        """Return how many blocks each of `stages` stages holds.

        Raises:
            InputError: if the layers do not spread over the stages.
        """
        if self.stage_layers is None:
            if self.layers % stages:
                raise InputError(
                    "model.layers",
                    self.layers,
                    f"does not spread evenly over the plan's {stages} stages",
                    "Choose a multiple, or say in model.stage_layers how many each stage holds",
                )
            return StageCut((self.layers // stages,) * stages)
        if len(self.stage_layers) != stages or min(self.stage_layers) < 1:
            raise InputError(
                "model.stage_layers",
                list(self.stage_layers),
                f"must give one number, at least 1, for each of the plan's {stages} stages",
                f"Write {stages} numbers",
            )
        if sum(self.stage_layers) != self.layers:
            raise InputError(
                "model.stage_layers",
                list(self.stage_layers),
                f"adds up to {sum(self.stage_layers)}, but model.layers is {self.layers}",
                "Make the two agree",
            )
        return StageCut(self.stage_layers)
