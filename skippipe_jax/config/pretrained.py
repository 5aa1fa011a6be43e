"""Pretrained weights: the value of `init_from`, and shapes from Hugging Face's config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.data import TOKENIZER_FOLDER
from skippipe_jax.config.model import ModelConfig, RopeScaling

HUGGING_FACE, RUN = "hf", "run"

SHAPES = (
    "vocabulary_size",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "ffn_width",
    "context",
    "rope_theta",
    "rope_scaling",
    "tied_head",
    "norm_epsilon",
)
"""Keys of the section `model` that the weights determine."""


@dataclass(frozen=True)
class InitialWeights:
    """Source of the initial weights.

    Attributes:
        kind: `hf` or `run`.
        folder: folder of a Hugging Face model, or of a run.
        step: step of the run's checkpoint. None: the newest committed one.
    """

    kind: str
    folder: Path
    step: int | None = None

    @property
    def tokenizer(self) -> Path:
        """Path of the tokenizer that comes with the weights, if one does."""
        return self.folder / TOKENIZER_FOLDER if self.kind == RUN else self.folder


def parse_init_from(init_from: str) -> InitialWeights:
    """Parse `init_from`: `hf:DIR`, `run:DIR` or `run:DIR@STEP`.

    Raises:
        InputError: if it has another form.
    """
    kind, _, path = init_from.partition(":")
    step = None
    if kind == RUN:
        folder, at, last = path.rpartition("@")
        if at and "/" not in last:  # Else it belongs to the name of a folder.
            if not re.fullmatch("[0-9]{1,15}", last):
                remedy = "Write run:DIR@200, or run:DIR for the newest checkpoint"
                raise InputError("init_from", init_from, f"{last!r} is not a step", remedy)
            path, step = folder, int(last)
    if kind not in (HUGGING_FACE, RUN) or not path:
        raise InputError(
            "init_from",
            init_from,
            "does not name weights",
            "Write hf:DIR, where DIR contains config.json and safetensors files; or run:DIR, a run "
            "directory, or run:DIR@STEP",
        )
    return InitialWeights(kind, Path(path).expanduser(), step)


def require_shapes(file: Path, of_weights: ModelConfig, configured: Mapping[str, Any]) -> None:
    """Reject keys of `model` that differ from those of the weights, except a shorter context.

    `file` is the file that holds the shapes of the weights.
    """
    for key in SHAPES:
        expected = getattr(of_weights, key)
        value = configured.get(key, expected)
        if value != expected and not (key == "context" and value < expected):
            raise InputError(
                f"model.{key}",
                value,
                f"must be {expected!r}, as in {file}",
                "Remove it: with init_from, shapes come from that file",
            )


MODEL_CONFIG = "config.json"

# By model_type: names of the one architecture that is supported, and defaults of transformers for
# keys that config.json may omit.
MODEL_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}


# Values of keys of config.json that the model supports; a missing key is accepted too.
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": None,
    "quantization_config": None,
}


HEADS = "num_attention_heads"
SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    HEADS: "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_width",
    "max_position_embeddings": "context",
}
"""Our names of the sizes in config.json."""

INITIALIZER_RANGE = 0.02
"""Default of transformers for a config.json without this key."""

ROPE = {"rope_type", "type", "rope_theta"}


LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}

# Name of a model on the Hub: an optional owner, and a name.
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def download_remedy(name: str, *patterns: str) -> str:
    """Return a remedy that downloads `name` from the Hub; "" if it is not such a name.

    The remedy is the end of a sentence. `patterns` select the files, all of them by default.
    """
    if not HUB_NAME.fullmatch(name):
        return ""
    filters = "".join(f' --include "{pattern}"' for pattern in patterns)
    folder = name.rpartition("/")[2]
    return (
        f". If {name} is a name on the Hugging Face Hub, run hf download {name}{filters} "
        f"--local-dir {folder}, and name the folder {folder}"
    )


def read_model(folder: Path, field: str = MODEL_CONFIG) -> ModelConfig:
    """Return the model with the shapes in `folder`'s config.json, and defaults elsewhere.

    The caller must call `require_no_window` with the length of its longest sequence.

    Raises:
        InputError: naming `field`, if the folder does not exist; naming config.json, if it is
            missing or describes a model that is not supported.
    """
    path = folder / MODEL_CONFIG
    if not folder.is_dir():
        problem = "is not a local folder, and nothing is downloaded"
        remedy = f"Name a local folder with {MODEL_CONFIG} and safetensors files"
        raise InputError(field, str(folder), problem, remedy + download_remedy(str(folder)))
    content = _load(folder)
    family = MODEL_FAMILIES[content["model_type"]]
    for key, value in (SUPPORTED_VALUES | {"architectures": family["architectures"]}).items():
        if content.get(key) not in (None, value):
            raise _not_supported(path, key, content[key], value)

    default = {"num_key_value_heads": family.get("num_key_value_heads", content.get(HEADS))}
    given = default | {key: value for key, value in content.items() if value is not None}
    sizes: dict[str, Any] = {
        ours: fields.integer(given.get(theirs), f"{path}: {theirs}", 1)
        for theirs, ours in SIZES.items()
    }
    head_dim, width = content.get("head_dim"), sizes["width"] / sizes["heads"]
    if head_dim not in (None, width):
        problem = f"is not supported: only hidden_size / {HEADS} = {width:g} is"
        remedy = "Choose a model with this head_dim"
        raise InputError(f"{path}: head_dim", head_dim, problem, remedy)
    rope_theta, rope_scaling = _read_rope(content, path)
    tied_head = content.get("tie_word_embeddings", False)
    if not isinstance(tied_head, bool):
        raise InputError(
            f"{path}: tie_word_embeddings", tied_head, "must be true or false", "Correct the file"
        )
    deviation = content.get("initializer_range", INITIALIZER_RANGE)
    return ModelConfig(
        **sizes,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_head=tied_head,
        norm_epsilon=fields.number(content.get("rms_norm_eps", 1e-6), f"{path}: rms_norm_eps"),
        initial_deviation=fields.number(deviation, f"{path}: initializer_range"),
    )


def require_no_window(folder: Path, context: int) -> None:
    """Reject a sliding window that is shorter than a sequence of `context` tokens."""
    content, name = _load(folder), f"{folder / MODEL_CONFIG}: sliding_window"
    # A missing key means the default of transformers for the family; null means no window.
    default_window = MODEL_FAMILIES[content["model_type"]].get("sliding_window")
    window = None if default_window is None else content.get("sliding_window", default_window)
    if window is not None and fields.integer(window, name, 1) < context:
        raise InputError(
            name,
            window,
            f"is shorter than model.context = {context} tokens: sliding-window attention is not "
            "supported",
            f"Set model.context (or max_position_embeddings in config.json) to {window} or less",
        )


def _load(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, after a check of its model_type."""
    path = folder / MODEL_CONFIG
    content = fields.load_json(path, MODEL_CONFIG)
    if not isinstance(content, dict):
        raise InputError(MODEL_CONFIG, str(path), "is not a mapping", "Name the folder of a model")
    family = content.get("model_type")
    if family is not None and family not in list(MODEL_FAMILIES):
        raise _not_supported(path, "model_type", family, *MODEL_FAMILIES)
    return content | {"model_type": family or "llama"}


def _not_supported(path: Path, key: str, value: Any, *supported: Any) -> InputError:
    return InputError(
        f"{path}: {key}",
        value,
        f"is not supported: only {' or '.join(map(json.dumps, supported))} is",
        "Choose an unquantized model of the Llama 2, Llama 3 or Mistral family",
    )


def _read_rope(content: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary frequencies, from the older or the newer form."""
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    name = f"{path}: {key}"
    rope = content.get(key) or {}
    rope_type = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    kind = rope_type or "default"
    if kind not in ("default", "llama3"):
        raise InputError(
            f"{name}.rope_type", kind, "is not supported: only llama3 is", "Choose another model"
        )
    required = LLAMA3_ROPE if kind == "llama3" else ()
    fields.checked_mapping(rope, name, ROPE | LLAMA3_ROPE.keys(), required)
    theta_name = f"{name}.rope_theta" if "rope_theta" in rope else f"{path}: rope_theta"
    theta = fields.number(rope.get("rope_theta", content.get("rope_theta", 10000.0)), theta_name)
    if kind == "default":
        return theta, None
    factors = {
        ours: fields.number(rope[theirs], f"{name}.{theirs}", 0.0, above=True)
        for theirs, ours in LLAMA3_ROPE.items()
        if ours != "original_context"
    }
    original = fields.integer(
        rope["original_max_position_embeddings"], f"{name}.original_max_position_embeddings", 1
    )
    return theta, RopeScaling(original_context=original, **factors)
