"""Training that begins with the weights of a Hugging Face model: `init_from`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import yaml
from skippipe_sched.errors import InputError

from skippipe_jax.cli.main import main
from skippipe_jax.config import Config, load_config, parse_config, require_same_run, to_tree
from skippipe_jax.config.pretrained import read_model
from skippipe_jax.data.tokenizer import write_byte_tokenizer
from skippipe_jax.interop.conversion import to_huggingface
from skippipe_jax.interop.huggingface import WEIGHTS
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.initial_weights import require_own_tokens
from tests.harness.llama_models import random_llama, save
from tests.harness.ports import free_port
from tests.harness.processes import started_processes
from tests.harness.training_runs import SMALL_CASE, train_alone

CASE = SMALL_CASE | {"nodes": 4, "stages": [1, 2, 1], "microbatches_per_data_node": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama 3.1 in one file."""
    return save(random_llama("llama-3.1"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run_config(llama: Path, tmp_path: Path) -> Path:
    """A configuration that leaves the model to the weights; one step that changes nothing."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    tree = {
        "run_dir": "run",
        "compilation_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "init_from": "hf:model",
        "plan": {"case": CASE, "method": "balanced"},
        "data": {
            "source": "text",
            "path": str(tmp_path / "text"),
            "sequence_length": 32,
            "microbatch_size": 2,
        },
        "model": {"stage_layers": [1, 2, 2]},
        "optimizer": {"learning_rate": 0.0},
        "train": {"steps": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "model").symlink_to(llama)
    return tmp_path / "config.yaml"


def assert_same_weights(found: Path, expected: Path) -> None:
    arrays, others = (safetensors.numpy.load_file(path / WEIGHTS) for path in (found, expected))
    assert arrays.keys() == others.keys()
    assert all(arrays[name].tobytes() == others[name].tobytes() for name in others)


def merged(folder: Path, target: Path) -> Path:
    """The tensors of all files of a folder, in one file."""
    arrays: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        arrays |= safetensors.numpy.load_file(path)
    target.mkdir()
    safetensors.numpy.save_file(arrays, target / WEIGHTS)
    return target


def test_the_model_section_may_be_left_out(llama: Path, tmp_path: Path):
    config = parse_config({"init_from": f"hf:{llama}", "data": {"sequence_length": 8}})
    assert config.model == read_model(llama)
    chosen = {"compute_dtype": "bfloat16", "recompute": "block"}
    config = parse_config(
        {"init_from": f"hf:{llama}", "model": chosen, "data": {"sequence_length": 8}}
    )
    assert (config.model.compute_dtype, config.model.width) == ("bfloat16", 32)
    # A configuration that is complete, as a run saves it, needs the weights no more.
    gone = to_tree(config) | {"init_from": f"hf:{tmp_path / 'gone'}"}
    assert parse_config(gone).model == config.model


@pytest.mark.parametrize(
    "value",
    [
        *("model", "hf:", "gguf:model", ":", 3, ""),
        *("run:", "run:@3", "run:seed@", "run:seed@last", "run:seed@-1", "run:seed@1.5", "ru:x"),
    ],
)
def test_an_init_from_that_names_no_weights_is_refused(value: Any):
    with pytest.raises(InputError) as caught:
        parse_config({"init_from": value})
    assert caught.value.field == "init_from"


def test_a_model_that_differs_is_refused_before_anything_is_written(
    run_config: Path, monkeypatch: pytest.MonkeyPatch
):
    """A configuration that is complete is compared when the weights are opened."""
    monkeypatch.chdir(run_config.parent)
    config = load_config(run_config)
    changed = dataclasses.replace(config.model, norm_epsilon=1e-6)
    with pytest.raises(InputError) as caught:
        train_alone(dataclasses.replace(config, model=changed))
    assert caught.value.field == "model.norm_epsilon"
    assert not Path("run").exists()


def test_training_begins_with_the_weights(
    llama: Path, run_config: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run_config.parent)
    config = load_config(run_config)
    train_alone(config)
    assert RunDir("run").config("run") == config
    assert Path("run/tokenizer/config.json").read_bytes() == (llama / "config.json").read_bytes()
    to_huggingface(Path("run"), Path("after"))
    assert_same_weights(merged(Path("after"), Path("merged")), llama)
    # From here on the run has weights of its own.
    Path("model").unlink()
    train_alone(config, resume=True)
    with pytest.raises(InputError, match="init_from"):
        require_same_run(dataclasses.replace(config, init_from=None), config)


def test_tokens_of_another_tokenizer_than_that_of_the_model_are_refused(
    llama: Path, run_config: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run_config.parent)
    shutil.copytree(llama, "own")
    write_byte_tokenizer(Path("own"), "test")
    Path("text").write_text("text " * 2000)
    for tokenizer, folder in (("bytes", "plain"), ("own", "fit")):
        words = ["text", "-o", folder, "--tokenizer", tokenizer, "--num-workers", "1"]
        assert main(["tokenize", *words]) == 0

    def config(folder: str, *overrides: str) -> Config:
        tokens = [f"data.path={folder}", "data.source=tokens", "init_from=hf:own"]
        return load_config(run_config, [*tokens, *overrides])

    with pytest.raises(InputError) as refused:
        train_alone(config("plain"))
    assert (refused.value.field, refused.value.value) == ("data.path", "plain")
    assert "made with tokenizer bytes, but hf:own uses own" in refused.value.problem
    assert not Path("run").exists()
    # It is as well what the user says, or the model has no tokenizer, or has the same.
    require_own_tokens(config("plain", "data.tokenizer=bytes"))
    require_own_tokens(config("plain", "init_from=hf:model"))
    require_own_tokens(config("fit"))


@pytest.mark.nightly
def test_hosts_read_the_same_weights_of_their_own_stages(llama: Path, run_config: Path):
    """Stage 1 has replicas on both hosts; at last, the second finds another model in its folder."""
    folder = run_config.parent
    (folder / "elsewhere" / "model").mkdir(parents=True)
    arrays = safetensors.numpy.load_file(llama / WEIGHTS)
    arrays["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    safetensors.numpy.save_file(arrays, folder / "elsewhere" / "model" / WEIGHTS)
    description = (llama / "config.json").read_bytes()
    (folder / "elsewhere" / "model" / "config.json").write_bytes(description)

    def outputs(run: str, *places: Path, init_from: str = "hf:model") -> list[str]:
        coordinator = f"127.0.0.1:{free_port()}"
        with started_processes(folder / f"output of {run}") as processes:
            for host, place in enumerate(places):
                processes.start(
                    *("-m", "skippipe_jax.train", "--config", str(run_config)),
                    *("--set", f"run_dir={folder / run}", "--coordinator", coordinator),
                    *("--set", f"init_from={init_from}"),
                    *("--set", "cluster.host_of_node=[0, 0, 1, 1]"),
                    *("--hosts", str(len(places)), "--host-id", str(host)),
                    folder=place,
                )
            codes = processes.exit_codes(120)
            return [f"exit code {code}\n{processes.output(i)}" for i, code in enumerate(codes)]

    alike = outputs("run", folder, folder)
    assert all(output.startswith("exit code 0\n") for output in alike), alike
    with contextlib.chdir(folder):
        to_huggingface(Path("run"), Path("after"))
        assert_same_weights(merged(Path("after"), Path("merged")), llama)
        alike = outputs("child", folder, folder, init_from="run:run")
        assert all(output.startswith("exit code 0\n") for output in alike), alike
        to_huggingface(Path("child"), Path("later"))
        assert_same_weights(merged(Path("later"), Path("merged later")), llama)
    different = outputs("differing", folder, folder / "elsewhere")[1]
    assert different.startswith("exit code 2\n"), different
    assert "the weights of stage 1 differ between host 1 and host 0" in different
