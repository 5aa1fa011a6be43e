"""The section `model`: shape, numerics, and the limits of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from skippipe_sched import fields

from skippipe_jax.config.choices import DTYPES, AtLeastOne, Choice, Positive, Section

AUTO, XLA, BLOCKWISE, CUDNN, SPLASH = "auto", "xla", "blockwise", "cudnn", "splash"
SHORT = 256
"""Longest sequence, in tokens, for which `auto` attention holds all scores at once."""
CPU_BLOCK, BLOCK = 128, 512
"""Queries and keys in a block of blockwise attention: on CPUs, and on other platforms."""
PLATFORM_OF = {CUDNN: "gpu", SPLASH: "tpu"}
"""Platform, in JAX's names, of each kernel that runs on one platform only."""
MOST_CONSTANTS = 1 << 19
"""Maximum number of cosines and sines that a program holds as constants (2 MB)."""
SPLASH_LANES = 128
CUDNN_MOST_WIDTH, CUDNN_WIDTH_STEP = 128, 8


def holds_all_scores(attention: str, length: int) -> bool:
    """Return whether, on every platform, all scores of `length` tokens are held at once."""
    return attention == XLA or (attention == AUTO and length <= SHORT)


def rotations_as_constants(length: int, head_width: int) -> bool:
    """Return whether the rotations of such sequences are constants of a program."""
    return length * head_width <= MOST_CONSTANTS


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

# Stage partition of a model without a plan: for inference at most `MOST_STAGES` stages, as far as
# the layers divide; for a run, which is converted stage by stage, one stage per `LAYERS_PER_STAGE`
# layers.
MOST_STAGES = 6
LAYERS_PER_STAGE = 4

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
    """Llama 3's scaling of rotary wavelengths to contexts longer than in pretraining.

    Attributes:
        factor: multiplier of long wavelengths.
        low_frequency_factor: wavelengths above `original_context` divided by this are long.
        high_frequency_factor: wavelengths below `original_context` divided by this stay unchanged;
            others are interpolated.
        original_context: context length of the pretraining.
    """

    factor: Positive = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: AtLeastOne = 8192

    def __post_init__(self):
        """Reject factors that would divide by zero."""
        super().__post_init__()
        fields.number(
            self.high_frequency_factor,
            "model.rope_scaling.high_frequency_factor",
            self.low_frequency_factor,
            above=True,
        )


class StagePartition(tuple[int, ...]):
    """Stage partition: the number of blocks of each stage, the data stage first."""

    __slots__ = ()

    def blocks(self, stage: int) -> range:
        """Return the indices of the model's blocks that a stage holds."""
        first = sum(self[:stage])
        return range(first, first + self[stage])


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """Shape and numerics of the model.

    Attributes:
        preset: shapes that neither this section nor `init_from` sets.
        vocabulary_size: tokens in the vocabulary; by default the tokenizer's.
        width: width of the residual stream.
        layers: transformer blocks.
        heads: attention heads.
        kv_heads: key and value heads (grouped-query attention).
        ffn_width: inner width of the feed-forward layer.
        context: maximum sequence length, in tokens.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: Llama 3's scaling of the wavelengths.
        tied_head: use the embedding as the head.
        norm_epsilon: constant added to mean squares.
        initial_deviation: standard deviation of initial matrices and embedding. null:
            1/sqrt(width).
        stage_layers: blocks of each stage. null: distributed evenly.
        parameter_dtype: type of the parameters; bfloat16 is rounded stochastically.
        compute_dtype: type of activations and their gradients.
        matmul_precision: precision of matrix products, as in JAX: `default` is the device's
            fastest, often below float32.
        recompute: what the backward pass recomputes (activation checkpointing): `none`; each
            `block`, or the whole `stage`, from its input; or each block except its saved outputs of
            attention (`save_only_attention`), products with weights
            (`dots_with_no_batch_dims_saveable`), or these in host memory
            (`offload_dot_with_no_batch_dims`).
        attention: `xla` holds all scores at once; `blockwise` computes them in blocks; `cudnn` and
            `splash` are fused kernels of NVIDIA GPUs and TPUs. `auto`: `xla` for up to 256 tokens,
            else the device's kernel if the shapes fit, else `blockwise`.
    """

    preset: Annotated[str, Choice(PRESETS)] | None = None
    vocabulary_size: AtLeastOne = 259
    width: AtLeastOne = 256
    layers: AtLeastOne = 4
    heads: AtLeastOne = 4
    kv_heads: AtLeastOne = 4
    ffn_width: AtLeastOne = 704
    context: AtLeastOne = 256
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    norm_epsilon: Positive = 1e-6
    initial_deviation: Positive | None = None
    stage_layers: tuple[int, ...] | None = None
    parameter_dtype: Annotated[str, DTYPES] = "float32"
    compute_dtype: Annotated[str, DTYPES] = "float32"
    matmul_precision: Annotated[str, Choice(("default", "high", "highest"))] = "default"
    recompute: Annotated[str, RECOMPUTE] = "none"
    attention: Annotated[str, Choice((AUTO, XLA, BLOCKWISE, CUDNN, SPLASH))] = AUTO

    def __post_init__(self):
        """Reject shapes and names that do not make a model."""
        super().__post_init__()
        if self.width % self.heads or (self.width // self.heads) % 2:
            problem = f"does not split model.width {self.width} into heads of an even width"
            remedy = "Choose heads so that width / heads is an even whole number"
            raise self.error("heads", problem, remedy)
        if self.heads % self.kv_heads:
            problem = f"does not divide model.heads = {self.heads}"
            raise self.error("kv_heads", problem, "Choose a divisor of model.heads")

    @property
    def deviation(self) -> float:
        """Standard deviation of the initial matrices and embedding."""
        return self.width**-0.5 if self.initial_deviation is None else self.initial_deviation

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    def unsupported_reason(self, attention: str, length: int) -> str:
        """Return why an attention kernel does not support `length` tokens; "" if it does.

        The reason is part of a sentence. The kernels raise errors themselves, but only when they
        are compiled, and only for one device.
        """
        width = self.head_width
        if attention == CUDNN:
            if self.compute_dtype == "float32":
                return "does not support model.compute_dtype = 'float32'"
            if width > CUDNN_MOST_WIDTH or width % CUDNN_WIDTH_STEP:
                return (
                    f"needs a head width of up to {CUDNN_MOST_WIDTH} that is a multiple of "
                    f"{CUDNN_WIDTH_STEP}, but model.width / model.heads is {width}"
                )
        if attention == SPLASH:
            if length % SPLASH_LANES:
                return (
                    f"needs data.sequence_length to be a multiple of {SPLASH_LANES}, but it is "
                    f"{length}"
                )
            if width % SPLASH_LANES:
                return (
                    f"needs a head width that is a multiple of {SPLASH_LANES}, but model.width / "
                    f"model.heads is {width}"
                )
        return ""

    def stage_partition(self, stages: int) -> StagePartition:
        """Return the number of blocks of each of `stages` stages.

        Raises:
            InputError: if the layers cannot be distributed over the stages.
        """
        if self.stage_layers is None:
            if self.layers % stages:
                problem = f"is not a multiple of the plan's {stages} stages"
                remedy = "Choose a multiple, or set model.stage_layers"
                raise self.error("layers", problem, remedy)
            return StagePartition((self.layers // stages,) * stages)
        if len(self.stage_layers) != stages or min(self.stage_layers) < 1:
            problem = f"must give one number, at least 1, for each of the plan's {stages} stages"
            raise self.error("stage_layers", problem, f"Write {stages} numbers")
        if sum(self.stage_layers) != self.layers:
            problem = f"adds up to {sum(self.stage_layers)}, but model.layers is {self.layers}"
            raise self.error("stage_layers", problem, "Make the two agree")
        return StagePartition(self.stage_layers)
