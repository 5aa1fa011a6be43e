"""`init_from`: what config.json beside weights says goes before a preset, and not before a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import PRESETS, Config, RopeScaling, load_config, parse_config
from tests.harness.messages import refusal

ROOT = Path(__file__).parents[2]

# As Meta published Llama 3.1 8B.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MISTRAL = {
    key: value for key, value in LLAMA.items() if key not in ("architectures", "rope_scaling")
} | {"model_type": "mistral", "sliding_window": 4096}


def weights(folder: Path, description: dict[str, Any] = LLAMA) -> str:
    """What `init_from` says of a folder that holds this config.json."""
    (folder / "config.json").write_text(json.dumps(description))
    return f"hf:{folder}"


def config_of(init_from: str, **model: Any) -> Config:
    return parse_config({"init_from": init_from, "model": model, "data": {"sequence_length": 64}})


@pytest.mark.parametrize("context", [8192, 131072])
def test_the_comment_in_8b_yaml_does_what_it_says(context: int, tmp_path: Path):
    path = ROOT / "experiments" / "paper" / "configs" / "8b.yaml"
    [line] = [line for line in path.read_text().splitlines() if "--set init_from=" in line]
    assert line.startswith("#")
    override = line.partition("--set ")[2].replace("LLAMA_3_FOLDER", str(tmp_path))
    weights(tmp_path, LLAMA | {"max_position_embeddings": context})
    config = load_config(path, [override])
    assert config.model.context == context
    assert config.model.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    without = load_config(path)
    assert config.model.stage_layers == without.model.stage_layers == (2, 6, 6, 6, 6, 6)
    assert config.data == without.data


def test_weights_go_before_any_preset(tmp_path: Path):
    of_weights = config_of(weights(tmp_path)).model
    for preset in PRESETS:
        by_preset = config_of(f"hf:{tmp_path}", preset=preset, recompute="block").model
        assert by_preset.width == of_weights.width == 4096
        assert by_preset.rope_scaling == of_weights.rope_scaling
        assert by_preset.recompute == "block"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layers", 24, "32"),
        ("rope_scaling", None, "RopeScaling("),
        ("norm_epsilon", 1e-6, "1e-05"),
        ("context", 131073, "131072"),
    ],
)
@pytest.mark.parametrize("preset", [None, "8b"])
def test_what_a_user_says_against_the_weights_is_refused(
    key: str, value: Any, said: str, preset: str | None, tmp_path: Path
):
    with refusal(f"model.{key} = {value}: must be {said}..., as in {tmp_path / 'config.json'}"):
        config_of(weights(tmp_path), preset=preset, **{key: value})


def test_what_a_user_says_like_the_weights_is_taken(tmp_path: Path):
    init_from = weights(tmp_path)
    scaling = {"factor": 8, "original_context": 8192}
    config = config_of(init_from, preset="8b", layers=32, rope_scaling=scaling)
    assert config.model == config_of(init_from, preset="8b").model


@pytest.mark.parametrize("value", ["long", None, 0])
def test_a_context_that_is_none_is_refused_by_its_name(value: Any, tmp_path: Path):
    with refusal("model.context = "):
        config_of(weights(tmp_path), context=value)


def test_a_context_may_be_shorter_than_that_of_the_weights(tmp_path: Path):
    assert config_of(weights(tmp_path), context=4096).model.context == 4096


def test_a_mistral_with_a_window_is_taken_for_sequences_within_it(tmp_path: Path):
    init_from = weights(tmp_path, MISTRAL)
    assert config_of(init_from, context=4096).model.context == 4096
    with pytest.raises(InputError, match=r"sliding_window = 4096: .* 131072 .* to 4096 or less"):
        config_of(init_from)
    assert config_of(weights(tmp_path, MISTRAL | {"sliding_window": None})).model.context == 131072
