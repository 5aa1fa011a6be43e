"""What is read of a Hugging Face folder, and what is refused by the name of file and tensor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.configuration_mistral import MistralConfig

from skippipe_jax.config import ModelConfig, RopeScaling, parse_config
from skippipe_jax.config.pretrained import read_model, require_no_window
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.interop.huggingface import INDEX, WEIGHTS, open_weights
from skippipe_jax.models.llama import rotary_frequencies
from tests.harness.llama_models import SMALL, TIME, llama3_rope, llama_config, random_llama, save
from tests.harness.messages import refusal


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama 3.1 in one file."""
    return save(random_llama("llama-3.1"), tmp_path_factory.mktemp("llama"))


def config_file(folder: Path, **values: Any) -> Path:
    """A folder whose config.json says this; keys that are None are left out."""
    given = {"model_type": "llama"} | SMALL | values
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in given.items() if value is not None})
    )
    return folder


def refused(folder: Path, **values: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read_model(config_file(folder, **values))
    return caught.value


# The configuration.


def test_shapes_come_from_config_json(tmp_path: Path):
    rope = {"rope_theta": 5e5, "rope_scaling": llama3_rope(8, 8192)}
    given = {"num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    given["initializer_range"] = 0.01
    model = ModelConfig(
        vocabulary_size=260,
        width=32,
        layers=5,
        heads=4,
        kv_heads=2,
        ffn_width=48,
        context=TIME,
        rope_theta=5e5,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
        tied_head=True,
        norm_epsilon=1e-5,
        initial_deviation=0.01,
    )
    assert read_model(config_file(tmp_path, **given, **rope)) == model
    newer = {"rope_parameters": {"rope_theta": 5e5, **llama3_rope(8, 8192)}}
    assert read_model(config_file(tmp_path, **given, **newer)) == model
    older = {"type" if key == "rope_type" else key: v for key, v in llama3_rope(8, 8192).items()}
    assert read_model(config_file(tmp_path, **given, **rope | {"rope_scaling": older})) == model


def test_what_config_json_leaves_out_is_as_in_transformers(tmp_path: Path):
    model, theirs = read_model(config_file(tmp_path)), llama_config(**SMALL)
    assert model.kv_heads == theirs.num_key_value_heads == 4
    assert model.norm_epsilon == theirs.rms_norm_eps
    assert model.tied_head == theirs.tie_word_embeddings is False
    assert (model.rope_theta, model.rope_scaling) == (10000.0, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma"),
        ("model_type", ["llama"]),
        ("architectures", ["MistralForCausalLM"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
        ("head_dim", 16),
        ("vocab_size", "many"),
        ("num_hidden_layers", 0),
        ("tie_word_embeddings", "yes"),
        ("rms_norm_eps", "small"),
        ("rope_theta", "large"),
        ("rope_scaling", 8),
        ("rope_parameters", [8]),
        *((key, None) for key in ("hidden_size", "max_position_embeddings", "num_hidden_layers")),
    ],
)
def test_what_the_model_cannot_be_is_refused_by_its_key(key: str, value: Any, tmp_path: Path):
    assert refused(tmp_path, **{key: value}).field == f"{tmp_path / 'config.json'}: {key}"
    # Heads are refused as of a configuration.
    assert refused(tmp_path, num_attention_heads=5).field == "model.heads"
    assert refused(tmp_path, num_key_value_heads=3).field == "model.kv_heads"


def test_a_mistral_is_a_llama_with_defaults_of_its_own(tmp_path: Path):
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    wide = {"hidden_size": 64, "num_attention_heads": 16}
    as_llama = read_model(config_file(tmp_path, **wide, num_key_value_heads=8))
    assert read_model(config_file(tmp_path, **wide, **mistral)) == as_llama
    assert MistralConfig(**SMALL).num_key_value_heads == as_llama.kv_heads


@pytest.mark.parametrize(
    ("window", "longest"),
    [({}, MistralConfig().sliding_window), ({"sliding_window": 16}, 16), (None, 2**20)],
)
def test_a_window_bounds_the_context_of_a_mistral_alone(
    window: dict[str, int] | None, longest: int, tmp_path: Path
):
    config = (
        {"model_type": "mistral"} | SMALL | ({"sliding_window": None} if window is None else window)
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_no_window(tmp_path, longest)
    if window is not None:
        told = f"...Set model.context (or ...) to {longest} or less"
        with refusal(f"{tmp_path / 'config.json'}: sliding_window = {told}"):
            require_no_window(tmp_path, longest + 1)
    require_no_window(config_file(tmp_path, sliding_window=8), 64)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_other_rotary_embeddings_are_refused(kind: str, key: str, name: str, tmp_path: Path):
    error = refused(tmp_path, **{key: {name: kind, "factor": 2.0}})
    assert error.field.endswith(f": {key}.rope_type")
    assert error.value == kind


@pytest.mark.parametrize("key", list(llama3_rope(8, 32))[1:])
def test_a_llama3_rope_without_one_of_its_numbers_is_refused(key: str, tmp_path: Path):
    rope = llama3_rope(8.0, 32)
    del rope[key]
    assert refused(tmp_path, rope_scaling=rope).field.endswith(f"rope_scaling.{key}")
    assert refused(tmp_path, rope_scaling=rope | {key: 0}).field.endswith(f"rope_scaling.{key}")
    rope = llama3_rope(8.0, 32) | {"partial_rotary_factor": 0.5}
    assert refused(tmp_path, rope_scaling=rope).field.endswith(".partial_rotary_factor")


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "Llama-3.2-1B"])
def test_a_name_on_the_hub_is_no_folder_and_how_to_fetch_it_is_said(name: str):
    told = f"init_from = '{name}': is not a local folder, and nothing is downloaded"
    remedy = f"Name a local folder with config.json...hf download {name} --local-dir Llama-3.2-1B"
    with refusal(f"{told}...{remedy}"):
        parse_config({"init_from": f"hf:{name}"})
    with pytest.raises(InputError, match=r"--hf = .*hf download"):
        open_source(hf=Path(name))


def test_what_is_no_name_on_the_hub_is_not_to_be_fetched(tmp_path: Path):
    for folder in (tmp_path / "nowhere", Path("../nowhere"), Path("a/b/c")):
        with pytest.raises(InputError, match="is not a local folder") as caught:
            read_model(folder)
        assert "hf download" not in caught.value.remedy
    with pytest.raises(InputError, match=r"config\.json = .*No such file"):
        read_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "null", ""])
def test_a_config_json_that_is_none_is_refused(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        read_model(tmp_path)


@settings(max_examples=25)
@given(
    head=st.sampled_from([2, 16, 128]),
    theta=st.floats(2.0, 1e7),
    factor=st.floats(0.5, 64.0),
    low=st.floats(0.25, 8.0),
    above=st.floats(0.5, 8.0),
    original=st.integers(1, 2**17),
)
def test_rotary_frequencies_are_those_of_transformers(
    head: int, theta: float, factor: float, low: float, above: float, original: int
):
    rope = llama3_rope(factor, original)
    rope |= {"low_freq_factor": low, "high_freq_factor": low + above}
    theirs = llama_config(
        hidden_size=head, num_attention_heads=1, rope_theta=theta, rope_scaling=rope
    )
    scaling = RopeScaling(factor, low, low + above, original)
    ours = ModelConfig(width=head, heads=1, kv_heads=1, rope_theta=theta, rope_scaling=scaling)
    expected = LlamaRotaryEmbedding(theirs).inv_freq.numpy()
    np.testing.assert_allclose(rotary_frequencies(ours), expected, rtol=2e-5)


@pytest.mark.parametrize("turns", [1.0, 4.0])
def test_a_wavelength_on_the_boundary_is_scaled_as_by_transformers(turns: float):
    """The first frequency is 1, its wavelength 2 pi: here it turns just `turns` times."""
    rope = llama3_rope(8.0, 25) | {"low_freq_factor": 25 / (2 * np.pi) / turns}
    rope |= {"high_freq_factor": 4 * rope["low_freq_factor"]}
    theirs = llama_config(hidden_size=8, num_attention_heads=1, rope_scaling=rope)
    scaling = RopeScaling(8.0, rope["low_freq_factor"], rope["high_freq_factor"], 25)
    ours = ModelConfig(width=8, heads=1, kv_heads=1, rope_scaling=scaling)
    expected = LlamaRotaryEmbedding(theirs).inv_freq.numpy()
    np.testing.assert_allclose(rotary_frequencies(ours), expected, rtol=1e-6)


# The weights.


def open_refused(folder: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        open_weights(folder)
    return caught.value


KEY, NORM = "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"
UP, INVERSE = "model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture
def damaged(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model some of whose tensors are others, or none."""

    def write(change: Callable[[str, np.ndarray], Any], **more: np.ndarray) -> Path:
        arrays = safetensors.numpy.load_file(llama / WEIGHTS)
        changed = {name: change(name, array) for name, array in arrays.items()} | more
        kept = {name: array for name, array in changed.items() if array is not None}
        (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
        safetensors.numpy.save_file(kept, tmp_path / WEIGHTS)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (UP, lambda _: None, ""),
        (KEY, lambda array: np.ascontiguousarray(array.T), " = [32, 16]...[16, 32]"),
        (NORM, lambda array: array.astype(np.int8), " = 'I8'"),
    ],
)
def test_a_tensor_that_is_not_as_it_should_be_is_refused_by_name(
    name: str, change: Any, told: str, damaged: Any
):
    folder = damaged(lambda own, array: change(array) if own == name else array)
    with refusal(f"{folder / WEIGHTS if told else folder}: {name}{told}"):
        open_weights(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.5.mlp.up_proj.weight", "head"]
)
def test_a_tensor_that_the_model_has_no_use_for_is_refused(name: str, damaged: Any):
    folder = damaged(lambda _, array: array, **{name: np.zeros(3, np.float32)})
    with refusal(f"{folder / WEIGHTS}: {name} = "):
        open_weights(folder)


def test_dtypes_may_be_mixed_and_frequencies_be_there(llama: Path, damaged: Any):
    """Mixed weights need float32; rotary frequencies are left out."""

    def mixed(name: str, array: np.ndarray) -> np.ndarray:
        return array.astype("float32" if "norm" in name else "bfloat16")

    folder = damaged(mixed, **{INVERSE: np.zeros(4, np.float32)})
    assert open_weights(folder).model == open_weights(llama).model
    assert open_weights(folder).model.parameter_dtype == "float32"


@pytest.mark.parametrize("length", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_refused_by_name(length: int, llama: Path, tmp_path: Path):
    content = (llama / WEIGHTS).read_bytes()
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / WEIGHTS).write_bytes(content[:length])
    assert open_refused(tmp_path).field == str(tmp_path / WEIGHTS)


def test_errors_of_an_index_name_file_and_tensor(tmp_path: Path):
    save(random_llama("llama-2"), tmp_path, "20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    file, other = index["weight_map"][name], index["weight_map"]["lm_head.weight"]
    assert file != other
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {name: other}}))
    assert open_refused(tmp_path).field == f"{tmp_path / other}: {name}"
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / file).unlink()
    assert open_refused(tmp_path).field == str(tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: 3}}))
    assert open_refused(tmp_path).field == f"{tmp_path / INDEX}: weight_map"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path):
    config_file(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch stolen'\ntR.")
    error = open_refused(tmp_path)
    assert (error.value, "safe_serialization=True" in error.remedy) == (name, True)


def test_the_package_that_is_missing_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    error = open_refused(llama)
    assert 'pip install -e ".[hf]"' in error.remedy
