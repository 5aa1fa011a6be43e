"""Hugging Face's form of a model, config.json and safetensors, read and written stage by stage.

Read are LLaMAs, and Mistrals without a window, which are the same network; LLaMAs are written.
Their weights are [out, in], a tensor for each layer; ours are [in, out], stacked over the layers of
a stage. `tensors_of_stage` says which is which, in both directions.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxtyping import Num
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.links import GIBIBYTE
from tqdm import tqdm

from skippipe_jax.config import DataConfig, ModelConfig
from skippipe_jax.config.data import BYTES, CHAT_TEMPLATE
from skippipe_jax.config.extras import require_extra
from skippipe_jax.config.pretrained import (
    LLAMA3_ROPE,
    MODEL_FAMILIES,
    SIZES,
    SUPPORTED_VALUES,
    read_model,
    require_no_window,
    require_shapes,
)
from skippipe_jax.data.batches import tokenizer_of
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.runtime.stage_functions import Parameters
from skippipe_jax.storage.arrays import flatten

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"

# Text goes in and comes out by these; they are kept with a run and handed on as they are.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    CHAT_TEMPLATE,
    GENERATION,
)


HEAD = "lm_head.weight"
# Their name of each of our parameters; blocks have one for each layer.
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "blocks/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "blocks/query/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "blocks/key/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "blocks/value/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "blocks/output/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "blocks/ffn_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "blocks/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "blocks/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "blocks/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "final_norm/scale": "model.norm.weight",
    "head/kernel": HEAD,
}
# Old files hold rotary frequencies, which are computed.
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# A host that writes weights holds a stage and, twice, as much as this.
SHARD_BYTES = 2 * GIBIBYTE

DOWNLOAD_AGAIN = "Download the file again"


@dataclass(frozen=True)
class Tensor:
    """One of their tensors: its name and shape, and which parameter of a stage it is.

    `row` is its place in a parameter that is stacked over layers, None in others.
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    row: int | None

    def view(self, leaves: Mapping[str, Num[np.ndarray, "*_"]]) -> Num[np.ndarray, "*_"]:
        """Return the view of a stage's parameters, by path, that is this tensor."""
        array = leaves[self.leaf] if self.row is None else leaves[self.leaf][self.row]
        return array.T if self.leaf.endswith("/kernel") else array


def tensors_of_stage(parameters: Any, first_layer: int) -> list[Tensor]:
    """List the tensors that make up a stage, from its parameters or their shapes."""
    tensors = []
    for leaf, array in flatten(parameters).items():
        stacked = leaf.startswith("blocks/")
        shape = array.shape[1:] if stacked else array.shape
        shape = shape[::-1] if leaf.endswith("/kernel") else shape
        for row in range(array.shape[0]) if stacked else [None]:
            name = NAMES[leaf].format(first_layer + (row or 0))
            tensors.append(Tensor(name, tuple(shape), leaf, row))
    return tensors


# The configuration.


def config_json(
    model: ModelConfig, dtype: str, companions: Path, end_of_turn: int | None = None
) -> dict[str, Any]:
    """Make the content of config.json for `model`, whose weights are of `dtype`.

    It is written in the older form, which every version of transformers reads. `companions` is the
    folder with what came along with the run's weights. Generation also ends at `end_of_turn`.
    """
    scaling = model.rope_scaling
    rope = {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3_ROPE.items() if scaling}
    return {
        # A Mistral that can be trained here is a Llama.
        "model_type": "llama",
        **MODEL_FAMILIES["llama"],
        **{key: value for key, value in SUPPORTED_VALUES.items() if value is not None},
        **{theirs: getattr(model, ours) for theirs, ours in SIZES.items()},
        "head_dim": model.head_width,
        "rope_theta": model.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **rope} if rope else None,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.deviation,
        "tie_word_embeddings": model.tied_head,
        "torch_dtype": dtype,
        **_ending_at(end_of_turn, _marks(companions)),
    }


def _marks(companions: Path) -> dict[str, Any]:
    """Return which tokens begin and end a text and pad it, as far as that is known."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    path = companions / CONFIG
    if path.exists():
        given = fields.load_json(path, CONFIG)
        return {name: given.get(name) for name in names}
    # A run without a tokenizer has trained on bytes.
    tokenizer = load_tokenizer(str(companions) if companions.exists() else BYTES)
    marks = (tokenizer.begin, tokenizer.end, tokenizer.padding)
    return dict(zip(names, marks, strict=True))


def _ending_at(token: int | None, marks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks with a token among those that end generation."""
    given = marks.get("eos_token_id")
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if token is None or token in ends:
        return dict(marks)
    return {**marks, "eos_token_id": [*ends, token]}


def end_generation_at(token: int | None, folder: Path) -> None:
    """Let generation end at a token too, by the generation_config.json in a folder that has one."""
    path = folder / GENERATION
    if token is not None and path.exists():
        content = _ending_at(token, fields.load_json(path, str(path)))
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path, names: Sequence[str] = COMPANIONS) -> None:
    """Copy the files of `names` that `source` has into the folder `target`."""
    for name in names:
        if (source / name).is_file():
            target.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


# Reading weights.


@dataclass(frozen=True)
class Weights:
    """A folder whose weights have been found whole; they are read when a stage is.

    `model` has the shapes of config.json and the parameter dtype that holds these weights exactly;
    `files` says where each tensor lies.
    """

    folder: Path
    model: ModelConfig
    files: Mapping[str, Path]

    def require_shapes(self, model: ModelConfig) -> None:
        """Refuse a model of other shapes, or of sequences in which a window would show."""
        require_shapes(self.folder / CONFIG, self.model, vars(model))
        require_no_window(self.folder, model.context)

    def load_stage(self, parameters: Any, first_layer: int) -> Parameters:
        """Read a stage into NumPy arrays of the shapes and dtypes that `parameters` have.

        Raises:
            InputError: if a file cannot be read any more.
        """
        shapes = flatten(parameters)
        leaves = {leaf: np.empty(array.shape, array.dtype) for leaf, array in shapes.items()}
        for tensor in tensors_of_stage(parameters, first_layer):
            array = self._read(tensor.name)
            tensor.view(leaves)[...] = array
            if tensor.leaf == "embedding" and self.model.tied_head and HEAD in self.files:
                self._require_tied(array)
        return jax.tree.unflatten(jax.tree.structure(parameters), leaves.values())

    def matches_tokenizer(self, data: DataConfig) -> bool:
        """Return whether its tokenizer is that of the data, or may stand beside bytes."""
        return tokenizer_of(data) in (BYTES, str(self.folder))

    def copy_tokenizer(self, target: Path) -> None:
        """Copy config.json and what belongs to the tokenizer into the folder `target`."""
        copy_companions(self.folder, target, (CONFIG, *COMPANIONS))

    def _read(self, name: str) -> Num[np.ndarray, "*shape"]:
        with _opened(self.files[name]) as file:
            return file.get_tensor(name)

    def _require_tied(self, embedding: Num[np.ndarray, "vocabulary width"]) -> None:
        if not np.array_equal(self._read(HEAD), embedding):
            raise InputError(
                f"{self.files[HEAD]}: {HEAD}",
                list(embedding.shape),
                f"differs from the embedding, but {CONFIG} sets tie_word_embeddings",
                "Set tie_word_embeddings to false if the model has a separate head",
            )


def open_weights(folder: Path, field: str = CONFIG) -> Weights:
    """Find every tensor of the model in `folder`, which `field` names, and look at them.

    Raises:
        InputError: naming the file, and the tensor, that is missing, damaged or of another shape
            or dtype than it may be.
    """
    model = read_model(folder, field)
    files = _files_of_tensors(folder)
    expected = {t.name: t.shape for t in tensors_of_stage(stage_shapes(model, 1)[0], 0)}
    ignored = {HEAD} if model.tied_head else set()
    for name in expected:
        if name not in files:
            raise InputError(
                f"{folder}: {name}", None, "is not in any file", "Download the model again"
            )
    names_of_files: dict[Path, list[str]] = defaultdict(list)
    for name, path in files.items():
        if name in expected:
            names_of_files[path].append(name)
        elif name not in ignored and not COMPUTED.fullmatch(name):
            problem = "is not part of a LLaMA model"
            raise InputError(f"{path}: {name}", "a tensor", problem, "Choose another model")
    dtypes = set()
    for path, names in names_of_files.items():
        with _opened(path) as file:
            held = set(file.keys())
            for name in names:
                refuse = functools.partial(InputError, f"{path}: {name}")
                if name not in held:
                    raise refuse(None, "is not in the file", DOWNLOAD_AGAIN)
                tensor = file.get_slice(name)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if shape != expected[name]:
                    problem = f"must have the shape {list(expected[name])} according to {CONFIG}"
                    raise refuse(list(shape), problem, "Download config.json and the file again")
                if dtype not in DTYPES:
                    problem = f"must be one of {', '.join(DTYPES)}"
                    raise refuse(dtype, problem, "Choose a model that is not quantized")
                dtypes.add(DTYPES[dtype])
    parameter_dtype = "bfloat16" if dtypes == {"bfloat16"} else "float32"
    return Weights(folder, replace(model, parameter_dtype=parameter_dtype), files)


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Find the file of each tensor: the only one, or as the index says."""
    if (folder / WEIGHTS).exists():
        with _opened(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), folder / WEIGHTS)
    if not (folder / INDEX).exists():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        raise InputError(
            str(folder),
            ", ".join(others) or "no weights",
            f"{WEIGHTS} and {INDEX} do not exist, and pickled files are not loaded because they "
            "can run arbitrary code",
            "Choose a version with safetensors, or convert the model by transformers: "
            "save_pretrained(DIR, safe_serialization=True)",
        )
    index = fields.load_json(folder / INDEX, INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise InputError(
            f"{folder / INDEX}: weight_map", named, "does not map tensors to files", DOWNLOAD_AGAIN
        )
    return {name: folder / file for name, file in named.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose tensors are read one by one."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            str(path), "unreadable", f"cannot be read, or is incomplete: {error}", DOWNLOAD_AGAIN
        ) from error


def _safetensors() -> ModuleType:
    require_extra("safetensors.numpy", "hf", "weights", "safetensors")
    return require_extra("safetensors", "hf", "weights", "safetensors")


# Writing weights.


def write_weights(
    folder: Path,
    model: ModelConfig,
    stages: int,
    load_stage: Callable[[int], Parameters],
    dtype: str,
) -> None:
    """Write the weights of all stages into `folder`, in files of `SHARD_BYTES` at most.

    A file holds tensors of one stage only; a tensor that is larger has a file of its own. One
    stage, as `load_stage` gives it, is held at a time.
    """
    safetensors = _safetensors()
    width = np.dtype(dtype).itemsize
    layers = model.stage_partition(stages)
    shards = [
        _shards(tensors_of_stage(shapes, sum(layers[:stage])), width)
        for stage, shapes in enumerate(stage_shapes(model, stages))
    ]
    count = sum(map(len, shards))
    file_of_tensor: dict[str, str] = {}

    def write(parameters: Parameters, own: list[list[Tensor]], first: int) -> None:
        leaves = {path: np.asarray(leaf) for path, leaf in flatten(parameters).items()}
        for place, shard in enumerate(own, first):
            file = f"model-{place:05d}-of-{count:05d}.safetensors" if count > 1 else WEIGHTS
            arrays = {t.name: np.ascontiguousarray(t.view(leaves), dtype) for t in shard}
            # Without this note transformers refuses the file.
            safetensors.numpy.save_file(arrays, folder / file, {"format": "pt"})
            file_of_tensor.update(dict.fromkeys(arrays, file))

    for stage in tqdm(range(stages), unit="stage", disable=None, leave=False):
        write(load_stage(stage), shards[stage], 1 + sum(map(len, shards[:stage])))
    if count > 1:
        total = sum(_bytes(tensor, width) for own in shards for shard in own for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Sequence[Tensor], width: int) -> list[list[Tensor]]:
    """Group tensors of numbers of `width` bytes, in order, by `SHARD_BYTES` at most."""
    shards: list[list[Tensor]] = []
    size = SHARD_BYTES
    for tensor in tensors:
        if size + _bytes(tensor, width) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += _bytes(tensor, width)
    return shards


def _bytes(tensor: Tensor, width: int) -> int:
    return int(np.prod(tensor.shape)) * width
