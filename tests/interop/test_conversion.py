"""Hugging Face models become runs and runs become Hugging Face models, and compute the same."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from skippipe_sched.errors import InputError
from tokenizers import Tokenizer
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from skippipe_jax.cli.main import main
from skippipe_jax.config import (
    Config,
    DataConfig,
    DocumentSource,
    ModelConfig,
    to_yaml,
)
from skippipe_jax.config.parsing import CONFIG
from skippipe_jax.data.chat import TEMPLATES
from skippipe_jax.data.documents import Document
from skippipe_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from skippipe_jax.data.tokenizing import train_bpe
from skippipe_jax.inference.model_source import load_model
from skippipe_jax.interop import huggingface
from skippipe_jax.interop.conversion import from_huggingface, to_huggingface
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.storage.checkpointer import write_initial_checkpoint
from tests.harness.llama_models import (
    LLAMAS,
    TIME,
    VOCABULARY,
    in_dtype,
    logits_and_loss,
    random_llama,
    random_mistral,
    random_text,
    save,
)
from tests.harness.partial_models import evaluate_run, logits_of
from tests.harness.training_runs import Arrays, assert_same_bits

OURS = ModelConfig(
    vocabulary_size=VOCABULARY,
    ffn_width=40,
    context=TIME,
    width=24,
    layers=3,
    heads=2,
    kv_heads=2,
    stage_layers=(1, 2),
)
STAGES = 2


def random_run(model: ModelConfig, folder: Path, stages: int = STAGES) -> Path:
    """A run folder whose parameters, scales of norms too, are random."""
    random = np.random.default_rng(0)

    def state_of(stage: int) -> dict[str, Any]:
        def drawn(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
            mean = 1.0 if path[-1].key == "scale" else 0.0
            return jnp.asarray(random.normal(mean, 0.15, shape.shape), shape.dtype)

        shapes = stage_shapes(model, stages)[stage]
        return {"parameters": jax.tree_util.tree_map_with_path(drawn, shapes)}

    write_initial_checkpoint(folder, 0, model.stage_partition(stages), state_of)
    config = Config(run_dir=str(folder), model=model, data=DataConfig(sequence_length=TIME))
    (folder / CONFIG).write_text(to_yaml(config))
    return folder


def weights_in(folder: Path) -> Arrays:
    arrays: Arrays = {}
    for path in folder.glob("*.safetensors"):
        arrays |= safetensors.numpy.load_file(path)
    return arrays


def require_same_model(run: Path, *theirs: Any) -> None:
    """That models of transformers compute what the run does."""
    model, (tokens, targets) = load_model(run), random_text()
    logits = logits_of(model, model.default_order, tokens)
    loss = model.loss({"tokens": tokens, "targets": targets})
    for model in theirs:
        their_logits, their_loss = logits_and_loss(model)
        assert np.abs(their_logits).max() > 1
        np.testing.assert_allclose(logits, their_logits, rtol=0, atol=1e-4)
        assert abs(loss - their_loss) < 1e-5


@pytest.mark.parametrize("kind", [*LLAMAS, None, TIME])
def test_a_model_of_theirs_computes_the_same_here(kind: str | int | None, tmp_path: Path):
    """A Mistral, too, whose window leaves nothing out; it comes back as a Llama."""
    model = random_llama(kind) if isinstance(kind, str) else random_mistral(kind)
    from_huggingface(save(model, tmp_path / "hf"), tmp_path / "run", 2)
    to_huggingface(tmp_path / "run", tmp_path / "back")
    require_same_model(tmp_path / "run", model, LlamaForCausalLM.from_pretrained(tmp_path / "back"))


def test_a_mistral_with_a_window_is_no_run(tmp_path: Path):
    source = save(random_mistral(TIME - 1), tmp_path / "hf")
    with pytest.raises(InputError, match=r"sliding_window = 63: .*model\.context = 64"):
        from_huggingface(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "shard", "dtype"),
    [
        ("llama-2", "1GB", torch.bfloat16),
        ("llama-3.1", "20KB", torch.float32),
        ("llama-3.2", "20KB", torch.bfloat16),
    ],
)
def test_there_and_back_every_bit_is_the_same(
    kind: str, shard: str, dtype: torch.dtype, tmp_path: Path
):
    source = save(random_llama(kind, dtype), tmp_path / "hf", shard)
    assert (source / huggingface.INDEX).exists() == (shard == "20KB")
    config = from_huggingface(source, tmp_path / "run", 3)
    assert config.model.parameter_dtype == str(dtype).removeprefix("torch.")
    to_huggingface(tmp_path / "run", tmp_path / "back")
    assert_same_bits(weights_in(tmp_path / "back"), weights_in(source))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    first = LlamaForCausalLM.from_pretrained(source)
    assert again.config.to_diff_dict().items() >= {
        (key, value)
        for key, value in first.config.to_diff_dict().items()
        if not isinstance(value, dict | list)
    }
    assert again.config.eos_token_id == first.config.eos_token_id


def test_a_run_in_bfloat16_is_evaluated(tmp_path: Path):
    source = save(random_llama("llama-2", torch.bfloat16), tmp_path / "hf")
    config = from_huggingface(source, tmp_path / "run")
    assert (config.model.stage_partition(1), config.data.sequence_length) == ((5,), TIME)
    found = evaluate_run(tmp_path / "run", None, 4)
    assert (found.step, found.tokens) == (0, 4 * TIME)
    assert 0 < found.loss < 50


def test_halves_become_floats_and_floats_are_rounded_as_torch_does(tmp_path: Path):
    model = random_llama("llama-3.1", torch.float16)
    from_huggingface(save(model, tmp_path / "hf"), tmp_path / "run")
    to_huggingface(tmp_path / "run", tmp_path / "float32")
    to_huggingface(tmp_path / "run", tmp_path / "bfloat16", dtype="bfloat16")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        expected = save(in_dtype(model, dtype), tmp_path / f"expected {name}")
        assert_same_bits(weights_in(tmp_path / name), weights_in(expected))
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == name


def test_a_run_keeps_the_tokenizer_and_hands_it_on(tmp_path: Path):
    source = save(random_llama("llama-3.1"), tmp_path / "hf")
    files = {name: f"{name}: ä".encode() for name in huggingface.COMPANIONS[:-1]}
    for name, content in files.items():
        (source / name).write_bytes(content)
    (source / "README.md").write_text("theirs")
    from_huggingface(source, tmp_path / "run")
    to_huggingface(tmp_path / "run", tmp_path / "back")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "run" / "tokenizer").iterdir()}
    theirs = ("config.json", "generation_config.json")
    assert kept == files | {name: (source / name).read_bytes() for name in theirs}
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files
    assert not (tmp_path / "back" / "README.md").exists()


def test_a_run_on_bytes_hands_on_a_tokenizer_of_bytes(tmp_path: Path):
    to_huggingface(random_run(OURS, tmp_path / "run"), tmp_path / "hf")
    ours, theirs = ByteTokenizer(), AutoTokenizer.from_pretrained(tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    marks = {"bos": ours.begin, "eos": ours.end, "pad": ours.padding}
    assert {mark: written[f"{mark}_token_id"] for mark in marks} == marks
    assert {mark: getattr(theirs, f"{mark}_token_id") for mark in marks} == marks
    assert len(theirs) == ours.vocabulary_size
    again = load_tokenizer(str(tmp_path / "hf"))
    assert (again.begin, again.end, again.padding) == tuple(marks.values())
    every_character = "".join(map(chr, range(0x800))) + "中文 🙂"
    for text in (every_character, "", " a  b\r\n\t c ", "don't <s> </s>", theirs.eos_token):
        tokens = ours.encode(text).tolist()
        assert theirs(text).input_ids == tokens
        assert theirs.decode(tokens) == text
    # Bytes that are no UTF-8, and the marks among them.
    bytes_in_any_order = np.random.default_rng(0).permutation(ours.vocabulary_size)
    text = ours.decode(bytes_in_any_order)
    assert theirs.decode(bytes_in_any_order, skip_special_tokens=True) == text
    assert again.decode(bytes_in_any_order) == text


def test_a_run_with_a_tokenizer_of_its_own_says_which_of_its_tokens_mark_documents(tmp_path: Path):
    run = random_run(OURS, tmp_path / "run")
    text = Document("text", b"", b"skipping stages")
    train_bpe([(text, DocumentSource("text", "text"))], VOCABULARY, run / "tokenizer")
    tokenizer = load_tokenizer(str(run / "tokenizer"))
    to_huggingface(run, tmp_path / "hf")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf").generation_config
    assert theirs is not None
    found = [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id]
    assert found == [tokenizer.begin, tokenizer.end, tokenizer.padding]
    assert len(set(found)) == 3


OF_A_FILE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATES["chatml"], OF_A_FILE])
def test_their_generation_ends_where_an_answer_ends_by_the_chat_template(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, run, back = (tmp_path / name for name in ("hf", "run", "back"))
    text = Document("text", b"", b"skipping stages")
    train_bpe([(text, DocumentSource("text", "text"))], 259, source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    config = from_huggingface(save(random_llama("llama-3.1"), source), run)
    (run / "tokenizer" / "chat_template.jinja").write_text(template)

    def exported_ends(data: DataConfig) -> list[Any]:
        (run / CONFIG).write_text(to_yaml(replace(config, data=data)))
        shutil.rmtree(back, ignore_errors=True)
        assert main(["convert", "to-hf", "--run", str(run), "-o", str(back)]) == 0
        found = LlamaForCausalLM.from_pretrained(back)
        assert found.generation_config is not None
        return [found.config.eos_token_id, found.generation_config.eos_token_id]

    of_base = [257, 259]
    assert exported_ends(replace(config.data, source="text", path="a")) == [of_base, of_base]
    assert capsys.readouterr().out.endswith("--prompt TEXT\n")
    chats = replace(config.data, source="chat", path="a", packing="documents")
    with_turn_end = [*of_base, tokenizer.token_to_id("<|im_end|>")]
    assert exported_ends(chats) == [with_turn_end, with_turn_end]
    about, end, tried = capsys.readouterr().out.splitlines()
    assert about.endswith("in float32 (--dtype)")
    assert end.startswith(
        f"an answer ends with <|im_end|>; eos_token_id includes its token {with_turn_end[-1]}"
    )
    assert tried.endswith(f"skippipe generate --hf {back} --chat")


@pytest.mark.parametrize(("stages", "layers"), [(1, (5,)), (2, (3, 2)), (5, (1, 1, 1, 1, 1))])
def test_layers_are_cut_evenly(stages: int, layers: tuple[int, ...], tmp_path: Path):
    source = save(random_llama("llama-2"), tmp_path / "hf")
    model = from_huggingface(source, tmp_path / "run", stages).model
    assert model.stage_partition(stages) == layers
    with pytest.raises(InputError, match="--num-stages"):
        from_huggingface(source, tmp_path / "more", 6)


def test_files_hold_one_stage_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = OURS
    run = random_run(model, tmp_path / "run")
    to_huggingface(run, tmp_path / "by stage")
    of_stages = sorted((tmp_path / "by stage").glob("*.safetensors"))
    assert [path.name for path in of_stages] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert len(safetensors.numpy.load_file(of_stages[1])) == 2 * 9
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    to_huggingface(run, tmp_path / "smaller")
    for path in (tmp_path / "smaller").glob("*.safetensors"):
        sizes = [array.nbytes for array in safetensors.numpy.load_file(path).values()]
        assert len(sizes) == 1 or sum(sizes) <= 20_000
    assert_same_bits(weights_in(tmp_path / "smaller"), weights_in(tmp_path / "by stage"))
    index = json.loads((tmp_path / "smaller" / huggingface.INDEX).read_text())
    total = sum(array.nbytes for array in weights_in(tmp_path / "smaller").values())
    assert index["metadata"]["total_size"] == total
    LlamaForCausalLM.from_pretrained(tmp_path / "smaller")


@pytest.mark.nightly
def test_no_two_stages_are_held(tmp_path: Path):
    model = OURS
    shapes = stage_shapes(model, STAGES)
    held: list[weakref.ref] = []

    def parameters_of(stage: int) -> Any:
        gc.collect()
        assert not any(reference() is not None for reference in held)
        parameters = jax.device_put(
            jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), shapes[stage])
        )
        held.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(parameters))
        return parameters

    huggingface.write_weights(tmp_path, model, STAGES, parameters_of, "float32")
    read = len(held)
    cut = model.stage_partition(STAGES)
    write_initial_checkpoint(tmp_path, 0, cut, lambda stage: {"parameters": parameters_of(stage)})
    assert len(held) == 2 * read == 2 * len(jax.tree.leaves(shapes))


def test_what_is_there_already_is_left_alone(tmp_path: Path):
    source = save(random_llama("llama-2"), tmp_path / "hf")
    taken, file, empty = tmp_path / "taken", tmp_path / "file", tmp_path / "empty"
    taken.mkdir()
    (taken / "mine").touch()
    file.touch()
    empty.mkdir()
    for path in (taken, file):
        with pytest.raises(InputError, match="already exists"):
            from_huggingface(source, path)
    from_huggingface(source, empty)
    for path in (taken, file):
        with pytest.raises(InputError, match="already exists"):
            to_huggingface(empty, path)
    assert [path.name for path in taken.iterdir()] == ["mine"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path):
    source = save(random_llama("llama-3.2"), tmp_path / "hf")
    arrays = weights_in(source)
    # A head that differs from the embedding shows only when both are read.
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"] + 1
    safetensors.numpy.save_file(arrays, source / huggingface.WEIGHTS)
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        from_huggingface(source, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    safetensors.numpy.save_file(arrays, source / huggingface.WEIGHTS)
    from_huggingface(source, tmp_path / "run")


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(*words: str | Path) -> int:
        return main(["convert", *map(str, words)])

    source = save(random_llama("llama-3.1"), tmp_path / "hf")
    run, back = tmp_path / "run", tmp_path / "back"
    assert command("from-hf", source, "-o", run, "--num-stages", "2") == 0
    assert f"evaluate --run {run}" in capsys.readouterr().out
    assert command("to-hf", "--run", run, "-o", back, "--step", "0", "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"exported step 0 of {run} to {back} in bfloat16 (--dtype)",
        f'load it with AutoModelForCausalLM.from_pretrained("{back}"), or try it: '
        f"skippipe generate --hf {back} --prompt TEXT",
    ]
    assert {str(array.dtype) for array in weights_in(back).values()} == {"bfloat16"}
    assert command("to-hf", "--run", run, "-o", back) == 2
    assert command("to-hf", "--run", run, "-o", tmp_path / "other", "--step", "7") == 2
    assert command("from-hf", tmp_path / "nowhere", "-o", tmp_path / "other") == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in errors] == [True] * 3
