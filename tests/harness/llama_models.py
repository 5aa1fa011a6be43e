"""Small Llamas and Mistrals with random weights: those of transformers, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

# Not from `transformers` itself: a type checker would read all of its models for that.
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.utils.logging import disable_progress_bar

from skippipe_jax.data.batches import IGNORED_TARGET

BATCH, TIME, VOCABULARY = 2, 64, 260
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": TIME,
}


def llama3_rope(factor: float, original_context: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_context,
    }


# With these contexts the scaling leaves some frequencies, divides some, and blends others.
LLAMAS: dict[str, dict[str, Any]] = {
    "llama-2": SMALL | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama-3.1": SMALL
    | {
        "num_key_value_heads": 2,
        "rope_theta": 500.0,
        "rope_scaling": llama3_rope(8.0, 32),
        "rms_norm_eps": 1e-5,
        "bos_token_id": 256,
        "eos_token_id": [257, 259],
    },
    "llama-3.2": SMALL
    | {
        "num_key_value_heads": 1,
        "rope_theta": 500.0,
        "rope_scaling": llama3_rope(32.0, 16),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}


def llama_config(**values: Any) -> LlamaConfig:
    """A configuration of transformers, in the older form or the newer one."""
    return LlamaConfig(**values)


def random_llama(kind: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama with random weights."""
    return in_dtype(randomized(LlamaForCausalLM(llama_config(**LLAMAS[kind]))), dtype)


def random_mistral(window: int | None) -> MistralForCausalLM:
    """A Mistral with random weights, whose tokens see no more than so many before them."""
    values = LLAMAS["llama-2"] | {"num_key_value_heads": 2, "rope_theta": 1e6}
    return randomized(MistralForCausalLM(MistralConfig(**values, sliding_window=window)))


Model = TypeVar("Model", bound=PreTrainedModel)


def randomized(model: Model) -> Model:
    """The model itself, its weights so large, and scales of norms too, that what is lost shows."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=draw)
            if parameter.ndim == 1:
                parameter += 1.0
    return model


def in_dtype(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model itself, its weights rounded."""
    torch.nn.Module.to(model, dtype)
    return model


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> Path:
    """The folder, in which transformers has written the model."""
    disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def random_text() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, of which some do not count."""
    random = np.random.default_rng(1)
    tokens, targets = random.integers(0, VOCABULARY, (2, BATCH, TIME), dtype=np.int32)
    targets[:, ::7] = IGNORED_TARGET
    return tokens, targets


def logits_and_loss(model: LlamaForCausalLM | MistralForCausalLM) -> tuple[np.ndarray, float]:
    """What transformers computes in float32 for `random_text`."""
    tokens, targets = (torch.from_numpy(array).long() for array in random_text())
    with torch.no_grad():
        logits = model.float()(tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET
        )
    return logits.numpy(), float(loss)
