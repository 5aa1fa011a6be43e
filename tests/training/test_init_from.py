"""Training that begins with the weights of a Hugging Face model or of another run: `init_from`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml
from skippipe_sched.errors import InputError

from skippipe_jax import Run
from skippipe_jax.cli.main import main
from skippipe_jax.config import Config, load_config, parse_config, require_same_run, to_tree
from skippipe_jax.config.pretrained import parse_init_from, read_model
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.data.tokenizer import write_byte_tokenizer
from skippipe_jax.inference.model_source import load_model
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.interop.conversion import to_huggingface
from skippipe_jax.interop.huggingface import WEIGHTS
from skippipe_jax.program.schedule import OWN
from skippipe_jax.storage.checkpoint import COMMITTED, committed_steps, step_folder
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training import setup
from skippipe_jax.training.initial_weights import (
    RunWeights,
    WeightSource,
    open_initial_weights,
    open_run_weights,
    require_own_tokens,
)
from skippipe_jax.training.trainer import Trainer
from tests.harness.llama_models import random_llama, save
from tests.harness.messages import refusal
from tests.harness.ports import free_port
from tests.harness.processes import started_processes
from tests.harness.training_runs import (
    MODEL,
    OPTIMIZER,
    SMALL_CASE,
    by_name,
    train_alone,
    write_config,
)

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


def test_a_configuration_that_is_complete_needs_the_weights_no_more(llama: Path, tmp_path: Path):
    """A run saves such a one."""
    config = parse_config({"init_from": f"hf:{llama}", "data": {"sequence_length": 8}})
    assert config.model == read_model(llama)
    gone = to_tree(config) | {"init_from": f"hf:{tmp_path / 'gone'}"}
    assert parse_config(gone).model == config.model


def test_a_model_that_differs_is_refused_before_anything_is_written(
    run_config: Path, monkeypatch: pytest.MonkeyPatch
):
    """A configuration that is complete is compared when the weights are opened."""
    monkeypatch.chdir(run_config.parent)
    config = load_config(run_config)
    changed = dataclasses.replace(config.model, norm_epsilon=1e-6)
    with refusal("model.norm_epsilon = "):
        train_alone(dataclasses.replace(config, model=changed))
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

    told = "data.path = 'plain': ...made with tokenizer bytes, but hf:own uses own"
    with refusal(told):
        train_alone(config("plain"))
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


# Training that begins with the weights of another run: `init_from: run:DIR[@STEP]`.


CHAIN = {**SMALL_CASE, "nodes": 4, "stages": [1, 2, 1], "path_length": 3}


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `seed` of a run of two stages, with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("seed")
    plan = {"case": SMALL_CASE, "method": "balanced"}
    model = MODEL | {"context": 64}
    write_config(folder, plan=plan, model=model, checkpoint={"every": 1}, train={"steps": 2})
    run(load_config(folder / "config.yaml", [f"run_dir={folder / 'seed'}"]))
    return folder / "seed"


@pytest.fixture
def parent(seed: Path, tmp_path: Path) -> Path:
    """A copy of that run, which may be changed."""
    return shutil.copytree(seed, tmp_path / "seed")


def run(config: Config, *, resume: bool = False) -> None:
    Trainer(config, resume=resume).run()


def child(parent: Path, step: int | None = None, **sections: Any) -> Config:
    """A run beside its parent that begins with its weights, on other text, without a shape."""
    (parent.parent / "other").write_bytes(bytes(range(128)) * 80)
    saved = RunDir(parent).config("parent")
    tree = {
        "run_dir": str(parent.parent / "child"),
        "init_from": f"run:{parent}" + ("" if step is None else f"@{step}"),
        "compilation_cache": saved.compilation_cache,
        "plan": {"case": SMALL_CASE, "method": "balanced"},
        "optimizer": OPTIMIZER,
        "data": {
            "source": "text",
            "path": str(parent.parent / "other"),
            "sequence_length": 32,
            "microbatch_size": 2,
        },
        "train": {"steps": 1},
    }
    return parse_config(tree | sections)


@functools.cache
def whole(parent: Path, step: int, dtype: str) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint, of all blocks together, in another dtype."""
    parameters = load_model(parent, step).parameters
    stages = [by_name(stage) for stage in parameters]
    return {
        name: np.concatenate([stage[name] for stage in stages]).astype(dtype)
        if name.startswith("blocks/")
        else stages[0][name].astype(dtype)
        for name in stages[0]
    }


def loss_of(model: StagedModel, config: Config) -> float:
    """The mean loss in the first iteration of a run, whose microbatches visit all of the model."""
    batches = TrainingBatches(config.data)
    microbatches = RunDir(config.run_dir).plan().microbatches
    return float(np.mean([model.loss(batches[number]) for number in range(len(microbatches))]))


def assert_blocks(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], blocks: range
) -> None:
    """A stage has these blocks of a model, and what else it has is the model's."""
    for name, array in found.items():
        own = expected[name]
        own = own[blocks.start : blocks.stop] if name.startswith("blocks/") else own
        assert array.dtype == own.dtype, name
        assert array.tobytes() == own.tobytes(), name


@pytest.mark.parametrize(
    ("case", "cut", "dtype"),
    [
        (CHAIN, [2, 1, 1], "float32"),
        pytest.param(
            {**SMALL_CASE, "stages": [2, 1]}, [1, 3], "bfloat16", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_child_begins_where_its_parent_was(
    case: dict[str, Any], cut: list[int], dtype: str, seed: Path, tmp_path: Path
):
    config = child(
        seed,
        1,
        run_dir=str(tmp_path / "child"),
        model={"context": 32, "stage_layers": cut, "parameter_dtype": dtype},
        plan={"case": case, "method": "balanced"},
    )
    expected = whole(seed, 1, dtype)
    with Trainer(config) as trainer:
        trainer.setup()
        plan = trainer.schedule.plans[OWN]
        assert trainer.step == 0
        for node, state in trainer.runtime.states.items():
            blocks = config.model.stage_partition(len(cut)).blocks(plan.stage_of[node])
            assert_blocks(by_name(state.parameters), expected, blocks)
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.optimizer_state))
        trainer.train_step()
    model = load_model(seed, 1)
    rounded = jax.tree.map(lambda array: array.astype(dtype), model.parameters)
    model = dataclasses.replace(model, parameters=rounded)
    [line] = Run(config.run_dir).metrics
    assert line["loss"] == pytest.approx(loss_of(model, config), abs=1e-5)


# Which checkpoint it was.


def sha1(path: Path) -> str:
    content = path.read_bytes()
    return f"{len(content)} bytes, sha1 {hashlib.sha1(content, usedforsecurity=False).hexdigest()}"


def test_a_run_notes_its_parent_and_those_before(parent: Path):
    folder = parent.parent
    config = child(parent, checkpoint={"copy_to": f"file://{folder}/bucket"})
    run(config)
    told = json.loads((folder / "child" / "parent.json").read_text())
    assert told == {
        "init_from": f"run:{parent}",
        "folder": str(parent.resolve()),
        "step": 2,
        "checkpoint": sha1(step_folder(parent, 2) / COMMITTED),
        "config": sha1(parent / "config.yaml"),
        "parent": None,
    }
    assert json.loads((folder / "bucket" / "parent.json").read_text()) == told
    # The next one needs nothing of the first any more.
    shutil.rmtree(parent)
    own = child(folder / "child", run_dir=str(folder / "grandchild"))
    run(own)
    again = RunDir(folder / "grandchild").parent()
    assert again is not None
    assert (again["step"], again["parent"]) == (1, told)
    # What is noted is of the run that begins, not of one that has not come so far.
    (folder / "grandchild" / "config.yaml").unlink()
    shutil.rmtree(folder / "grandchild" / "checkpoints")
    run(dataclasses.replace(own, init_from=None))
    assert RunDir(folder / "grandchild").parent() is None


def test_a_run_that_has_saved_nothing_keeps_to_its_parents_checkpoint(parent: Path):
    config = child(parent)
    Path(config.run_dir).mkdir()
    noted = open_run_weights(f"run:{parent}@1").provenance() | {"init_from": f"run:{parent}"}
    RunDir(config.run_dir).write_parent(noted)
    found = open_initial_weights(config)
    assert isinstance(found, RunWeights)
    assert (found.checkpoint.step, committed_steps(parent)) == (1, [1, 2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parent: shutil.rmtree(step_folder(parent, 2)), "this checkpoint does not exist"),
        (
            lambda parent: (step_folder(parent, 2) / COMMITTED).open("a").write("\n"),
            "differs from the one",
        ),
        (shutil.rmtree, "does not contain a run"),
    ],
)
def test_a_checkpoint_that_was_noted_and_is_gone_is_not_replaced(
    change: Any, words: str, parent: Path
):
    config = child(parent)
    found = open_initial_weights(config, anew=True)
    assert isinstance(found, RunWeights)
    Path(config.run_dir).mkdir()
    RunDir(config.run_dir).write_parent(found.provenance())
    change(parent)
    with refusal(f"init_from = ...{words}"):
        open_initial_weights(config)


def test_weights_are_opened_once_where_the_cluster_is_measured_and_not_for_a_resumed_run(
    parent: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = list[bool]()

    def open_counted(config: Config, *, anew: bool = False) -> WeightSource | None:
        opened.append(anew)
        return open_initial_weights(config, anew=anew)

    schedule = RunDir(parent).schedule()
    monkeypatch.setattr(setup, "open_initial_weights", open_counted)
    monkeypatch.setattr(setup, "measure", lambda *_: None)
    monkeypatch.setattr(setup, "make_plans", lambda *_: schedule)
    config = child(parent, plan={"measure": True})
    run(config)
    assert opened == [True]
    plan, train = {"measure": True, "budget_s": 1.0}, {"steps": 2}
    run(child(parent, plan=plan, train=train), resume=True)
    assert opened == [True]
    assert Run(config.run_dir).steps == [1, 2]


# Of whose tokens.


def with_tokenizer(run: Path) -> Path:
    """Gives a run a tokenizer of its own, which a test never runs."""
    (run / "tokenizer").mkdir()
    write_byte_tokenizer(run / "tokenizer", "test")
    (run / "tokenizer" / "generation_config.json").write_text("{}")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["tokenizer"] = "gone"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    return run / "tokenizer"


def test_the_tokenizer_is_the_parents_unless_another_is_named(
    parent: Path, capfd: pytest.CaptureFixture[str]
):
    assert child(parent).data.tokenizer is None
    own = with_tokenizer(parent)
    config = child(parent)
    assert config.data.tokenizer == str(own)
    run(config)
    kept = parent.parent / "child" / "tokenizer"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        path.name: path.read_bytes() for path in own.iterdir()
    }
    assert "another tokenizer" not in capfd.readouterr().err
    bytes_only = dataclasses.replace(config.data, tokenizer="bytes")
    run(dataclasses.replace(config, run_dir=str(parent.parent / "bytes"), data=bytes_only))
    [line] = [line for line in capfd.readouterr().err.splitlines() if "another tokenizer" in line]
    assert line.startswith(f"warning: run:{parent} ")
    assert not (parent.parent / "bytes" / "tokenizer").exists()


@pytest.mark.parametrize(
    ("init_from", "folder", "step"),
    [("run:a@b/c", "a@b/c", None), ("run:a@b@0007", "a@b", 7), ("run:a@b/", "a@b", None)],
)
def test_a_folder_may_have_an_at_sign(init_from: str, folder: str, step: int | None):
    origin = parse_init_from(init_from)
    assert (origin.folder, origin.step) == (Path(folder), step)
