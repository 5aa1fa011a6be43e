"""Evaluation of a real run, against the same numbers computed by hand."""

from __future__ import annotations

import contextlib
import encodings
import functools
import itertools
import json
import math
import re
import shutil
import signal
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
import torch
import yaml
from flax import nnx
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import load_plan
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ModelConfig, Phase, RecipeConfig, load_config, to_tree
from skippipe_jax.data.tokenizer import ByteTokenizer
from skippipe_jax.inference import evaluation
from skippipe_jax.inference.evaluation import Evaluation, losses_by_order
from skippipe_jax.inference.partial import StageOrder, kept, leave_one_out_variants, swapped
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.interop.conversion import to_huggingface
from skippipe_jax.models.llama import DataStage, stage_shapes
from skippipe_jax.program.schedule import OWN, Schedule, stage_shares
from skippipe_jax.storage.checkpoint import open_checkpoint
from skippipe_jax.storage.loading import load_stage
from skippipe_jax.training.metrics import CompilationCounter
from skippipe_jax.training.trainer import Trainer
from tests.harness.messages import expect_error
from tests.harness.partial_models import evaluate_run, random_model, save_checkpoint, save_run
from tests.harness.training_runs import SMALL_CASE
from tests.inference.conftest import Command

STAGES, TIME, MICROBATCH = 3, 32, 2
SHAPES = {"width": 16, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": TIME}
CONFIG: dict[str, Any] = {
    "run_dir": "run",
    "compilation_cache": None,
    "model": SHAPES,
    "plan": {
        "case": SMALL_CASE | {"stages": [1, 1, 1], "microbatches_per_data_node": 8},
        "method": "balanced",
    },
    "data": {
        "source": "text",
        "path": "text",
        "sequence_length": TIME,
        "microbatch_size": MICROBATCH,
        "held_out": 0.25,
    },
    "optimizer": {"learning_rate": 0.03, "warmup_steps": 1},
    "train": {"steps": 6},
    "checkpoint": {"every": 3, "keep": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has been trained; its text is two thirds a and one third b."""
    folder = tmp_path_factory.mktemp("evaluate")
    letters = np.random.default_rng(0).choice(list(b"aab"), 3000).astype(np.uint8)
    (folder / "text").write_bytes(letters.tobytes())
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with contextlib.chdir(folder):
        config = load_config(Path("config.yaml"))
        alone = Membership(config.cluster, index=0, count=1)
        Trainer(config, host=alone, config_folder=folder).run()
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def held_out_windows() -> np.ndarray:
    """The last quarter of the text, marked at both ends, in windows that do not overlap."""
    text = Path("text").read_bytes()[3000 * 3 // 4 :]
    tokens = np.array([ByteTokenizer.begin, *text, ByteTokenizer.end])
    count = len(tokens) // (TIME + 1)
    return tokens[: count * (TIME + 1)].reshape(count, TIME + 1)


def read_parameters(model: ModelConfig, step: int) -> list[dict[str, Any]]:
    checkpoint = open_checkpoint(Path("run"), step)
    return [
        load_stage(checkpoint, checkpoint.record.stage_layers, stage, {"parameters": shapes})[
            "parameters"
        ]
        for stage, shapes in enumerate(stage_shapes(model, STAGES))
    ]


@functools.cache
def loss_by_hand(step: int, order: StageOrder = (0, 1, 2)) -> float:
    """Mean over all held-out targets, by one module that holds the layers of these stages."""
    model = load_config(Path("config.yaml")).model
    stages = read_parameters(model, step)
    layers = [stages[stage]["blocks"] for stage in order]
    whole = stages[0] | {"blocks": jax.tree.map(lambda *own: np.concatenate(own), *layers)}
    windows = held_out_windows()
    structure = nnx.eval_shape(lambda: DataStage(model, len(order), 0, jax.random.key(0)))
    logits = logits_of_whole(nnx.graphdef(structure), whole, windows[:, :-1])
    logits = np.asarray(logits, np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return -np.log(np.take_along_axis(chances, windows[:, 1:, None], axis=-1)).mean()


@functools.partial(jax.jit, static_argnums=0)
def logits_of_whole(structure: Any, parameters: Any, tokens: jax.Array) -> jax.Array:
    module: DataStage = nnx.merge(structure, parameters)
    return module.logits(module(tokens))


def test_loss_is_the_mean_over_the_held_out_text():
    earlier, found = (evaluate_run(Path("run"), step, 256) for step in (3, None))
    assert (earlier.step, found.step, found.tokens) == (3, 6, held_out_windows()[:, 1:].size)
    for own in (earlier, found):
        assert abs(own.loss - loss_by_hand(own.step)) < 1e-5
    assert earlier.loss > found.loss
    assert found.perplexity == math.exp(found.loss)
    # A model that knows the two letters, and no other byte, does better than guessing.
    assert found.loss < 0.7 * math.log(259)


@pytest.fixture
def printed(command: Command) -> Callable[..., str]:
    """What evaluation prints of the run."""

    def run(*words: Any, of: Path = Path("run")) -> str:
        code, out, err = command("evaluate", "--run", of, *words)
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def evaluated(printed: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    return lambda *words, **of: json.loads(printed("--json", *words, **of))


@pytest.mark.parametrize(("sequences", "read"), [(1, 1), (3, 3), (4, 4), (32, 22)])
def test_no_more_sequences_are_read_than_asked_for_and_fewer_are_told_of(
    sequences: int, read: int, command: Command
):
    assert len(held_out_windows()) == 22
    _, out, err = command("evaluate", "--run", "run", "--sequences", sequences, "--json")
    assert json.loads(out)["tokens"] == read * TIME
    said = "reading 22 sequences instead of 32: the held-out text has no more\n"
    assert err == (said if read < sequences else "")


def test_json_is_one_object_and_text_says_the_same(printed: Any, evaluated: Any):
    found = Evaluation(**evaluated("--step", 3))
    assert found == evaluate_run(Path("run"), 3, 256)
    out = printed("--step", 3)
    assert out.startswith("step 3: ")
    for words in (f"{found.loss:.4f}", f"{found.perplexity:.3f}", f"{found.tokens:,} tokens"):
        assert words in out


def test_a_run_that_used_the_attention_of_gpus_can_be_evaluated_without_one():
    config = load_config(
        Path("config.yaml"), ["model.attention=cudnn", "model.compute_dtype=bfloat16"]
    )
    model = StagedModel(config.model, read_parameters(config.model, 6))
    losses, _ = losses_by_order(model, {(0, 1, 2)}, config.data, 256)
    assert abs(losses[0, 1, 2] - loss_by_hand(6)) < 0.02


def test_a_model_that_has_diverged_has_no_perplexity(tmp_path: Path):
    stages = read_parameters(load_config(Path("config.yaml")).model, 6)
    stages[0]["head"]["kernel"] *= 1e6
    shutil.copy("run/config.yaml", tmp_path)
    save_checkpoint(tmp_path, stages, 7)
    with pytest.raises(InputError, match="training had diverged") as caught:
        evaluate_run(tmp_path, None, 256)
    assert (caught.value.field, caught.value.value) == ("--step", 7)


# Partial models.


def check_each(answer: dict[str, Any]) -> np.ndarray:
    """Every loss is that of one module with the layers of these stages; returns perplexities."""
    for way in answer["each"]:
        assert abs(way["loss"] - loss_by_hand(6, tuple(way["stages"]))) < 1e-5
        assert way["perplexity"] == math.exp(way["loss"])
    return np.array([way["perplexity"] for way in answer["each"]])


def test_all_subsets_of_a_share_are_evaluated(evaluated: Any):
    found = evaluated("--keep-fraction", "1.0,0.67,0.3")
    assert [answer["share"] for answer in found["keep"]] == [1.0, 0.67, 0.3]
    orders = [[way["stages"] for way in answer["each"]] for answer in found["keep"]]
    assert orders == [[[0, 1, 2]], [[0, 1], [0, 2]], [[0]]]
    assert found["keep"][0]["perplexity"] == found["perplexity"]
    for answer in found["keep"]:
        perplexities = check_each(answer)
        assert answer["possible"] == len(perplexities)
        assert answer["perplexity"] == pytest.approx(perplexities.mean())
        assert answer["deviation"] == pytest.approx(perplexities.std())
        assert (answer["least"], answer["greatest"]) == (perplexities.min(), perplexities.max())


def test_paths_count_as_often_as_microbatches_take_them(evaluated: Any):
    plan = json.loads(Path("run/plan.json").read_text())
    node_stages = {node: s for s, nodes in enumerate(plan["stages"]) for node in nodes}
    taken = Counter(tuple(node_stages[node] for node in path) for path in plan["microbatches"])
    answer = evaluated("--paths")["paths"]
    assert {tuple(way["stages"]): way["microbatches"] for way in answer["each"]} == taken
    perplexities = check_each(answer)
    weights = [way["microbatches"] for way in answer["each"]]
    assert answer["perplexity"] == pytest.approx(np.average(perplexities, weights=weights))


def test_stages_are_swapped_and_left_out_in_turn(evaluated: Any):
    found = evaluated("--swaps", "--importance")
    swaps, importance = found["swaps"]["each"], found["importance"]["each"]
    assert [(way["stages"], way["swapped"]) for way in swaps] == [([0, 2, 1], [1, 2])]
    assert [(way["stages"], way["left_out"]) for way in importance] == [([0, 2], 1), ([0, 1], 2)]
    check_each(found["swaps"])
    check_each(found["importance"])


def test_one_table_has_all_that_is_asked_for(evaluated: Any, printed: Any):
    asked = ["--keep-fraction", "0.67", "--paths", "--swaps", "--importance"]
    found = evaluated(*asked)
    cells = [re.split("  +", line.strip()) for line in printed(*asked).splitlines()[2:]]
    rows = {row[0]: row for row in cells}
    assert rows["full"] == ["full", "0 1 2", f"{found['loss']:.4f}", f"{found['perplexity']:.3f}"]
    swap = found["swaps"]["each"][0]
    wanted = ["0 2 1", f"{swap['loss']:.4f}", f"{swap['perplexity']:.3f}"]
    assert rows["swapped 1 and 2"][1:] == wanted
    assert rows["without 2"][1] == "0 1"
    kept = found["keep"][0]
    wanted = ["2 of 2", f"{kept['loss']:.4f}", f"{kept['perplexity']:.3f}"]
    assert rows["keep 0.67, mean"][1:4] == wanted
    assert f"± {kept['deviation']:.3f}" in rows["keep 0.67, mean"][4]
    assert sum(row[0].startswith("path, ") for row in cells) == len(found["paths"]["each"])


def test_the_picture_has_every_subset(printed: Any, tmp_path: Path):
    picture = tmp_path / "made" / "shares.svg"
    printed("--keep-fraction", "1,0.67,0.3", "--plot", picture)
    parts = ElementTree.parse(picture).iter()
    dots = [part.get("class") for part in parts if part.tag.endswith("circle")]
    assert (dots.count("each"), dots.count("mean")) == (1 + 2 + 1, 3)


def test_the_text_is_found_from_another_folder_and_named(
    folder: Path, tmp_path: Path, monkeypatch: Any, printed: Any, command: Command
):
    here = printed()
    assert " tokens of the held-out part of text, all stages in order\n" in here
    monkeypatch.chdir(tmp_path)
    elsewhere = printed(of=folder / "run")
    assert elsewhere == here.replace("part of text,", f"part of {folder / 'text'},")
    # What is written here leads from here.
    asked = ["evaluate", "--run", folder / "run", "--set"]
    expect_error(command(*asked, "data.path=text"), f"...cannot read {tmp_path / 'text'}")
    expect_error(command(*asked, "data.held_out=0.5"), "...has trained on")


def test_of_a_model_without_a_run_it_is_said_how_to_name_text(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(Path(encodings.__file__).parent))
    to_huggingface(Path("run"), tmp_path / "hf")
    asked = ["evaluate", "--hf", tmp_path / "hf", "--sequences", "1"]
    hint = "to use your own text, add --set data.source=text --set data.path=PATH\n"
    code, out, err = command(*asked)
    assert "of the held-out part of Python's standard library, all" in out
    assert (code, err.endswith(hint)) == (0, True)
    code, _, err = command(*asked, "--set", "data.source=text", "--set", "data.path=text")
    assert (code, hint in err) == (0, False)


def test_conversations_that_are_too_long_to_be_evaluated_are_counted(
    command: Command, tmp_path: Path
):
    def line(number: int) -> str:
        answer = "ab" if number % 3 else "ab" * TIME
        said = {"user": f"{number:02}", "assistant": answer}
        messages = [{"role": role, "content": text} for role, text in said.items()]
        return json.dumps({"messages": messages}) + "\n"

    file = tmp_path / "chat.jsonl"
    file.write_text("".join(map(line, range(60))))
    given = {"source": "chat", "path": file, "packing": "documents"}
    settings = [word for key in given for word in ("--set", f"data.{key}={given[key]}")]
    code, out, err = command("evaluate", "--run", "run", "--json", *settings)
    # Each answer of two letters and the end mark.
    assert (code, json.loads(out)["tokens"] % 3) == (0, 0)
    assert err.count(f"longer than a sequence of {TIME} tokens, and dropped") == 1


def test_a_sample_of_many_subsets_is_drawn_by_the_seed():
    found = kept(12, 0.5, 20, seed=3)
    orders = [way.stages for way in found.variants]
    assert found.possible == math.comb(11, 5)
    assert len(set(orders)) == len(orders) == 20
    assert all(
        order[0] == 0 and len(order) == 6 and list(order) == sorted(order) for order in orders
    )
    assert found == kept(12, 0.5, 20, seed=3)
    assert found != kept(12, 0.5, 20, seed=4)
    assert kept(12, 0.5, 462, seed=3).possible == len(kept(12, 0.5, 462, seed=3).variants)


@pytest.mark.parametrize(
    ("stages", "share", "count"),
    [(4, 0.75, 3), (6, 0.75, 5), (6, 0.5, 3), (5, 0.1, 1), (1, 0.5, 1)],
)
def test_shares_are_rounded_to_whole_stages(stages: int, share: float, count: int):
    assert {len(way.stages) for way in kept(stages, share, 99, 0).variants} == {count}


def test_shares_of_a_run_are_those_of_all_its_plans():
    full, half = load_plan(Path("run/plan.json")), load_plan(Path("run/plan.json"))
    half = replace(half, microbatches=tuple(path[:1] for path in half.microbatches))
    phase = Phase(from_step=3, path_length=1)
    schedule = Schedule(RecipeConfig(phases=(phase,)), {OWN: full, phase.name: half})
    assert schedule.visited_shares(3).tolist() == stage_shares(full).tolist()
    mixed = (3 * stage_shares(full) + stage_shares(half)) / 4
    assert schedule.visited_shares(4).tolist() == pytest.approx(mixed.tolist())


def test_programs_are_compiled_once_for_all_ways():
    config = load_config(Path("config.yaml"), ["model.width=20", "model.layers=6"])
    model = random_model(config.model, 6)
    orders = {way.stages for share in (0.5, 0.7) for way in kept(6, share, 99, 0).variants}
    with CompilationCounter() as counter:
        losses, _ = losses_by_order(model, orders, config.data, 6)
    # The data stage, any other stage, and the loss.
    assert counter.take().count == 3
    assert len(set(losses.values())) == len(orders) == 10 + 10


def test_losses_equal_those_of_the_export_in_transformers_with_the_layers_removed(
    tmp_path: Path, evaluated: Any
):
    """Stages of different sizes, shared heads of keys, and frequencies of Llama 3."""
    sizes = [1, 2, 1, 2]
    overrides = [
        f"model.layers={sum(sizes)}",
        "model.heads=4",
        "model.kv_heads=2",
        f"model.stage_layers={sizes}",
        "model.rope_scaling.original_context=8",
        "model.norm_epsilon=1e-5",
    ]
    config = to_tree(load_config(Path("config.yaml"), overrides))
    save_run(tmp_path / "run", config, len(sizes))
    asked = ["--sequences", 22, "--keep-fraction", "1.0,0.75,0.5,0.25"]
    found = evaluated(*asked, of=tmp_path / "run")
    windows = held_out_windows()
    assert found["tokens"] == windows[:, 1:].size
    ways = [way for answer in found["keep"] for way in answer["each"]]
    assert len(ways) == 8

    to_huggingface(tmp_path / "run", tmp_path / "hf")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    layers, ends = list(theirs.model.layers), list(itertools.accumulate(sizes, initial=0))
    for way in ways:
        kept_layers = [layers[ends[stage] : ends[stage + 1]] for stage in way["stages"]]
        theirs.model.layers = torch.nn.ModuleList(itertools.chain(*kept_layers))
        theirs.config.num_hidden_layers = len(theirs.model.layers)
        assert abs(way["loss"] - loss_of_transformers(theirs, windows)) < 1e-4, way["stages"]


def loss_of_transformers(model: LlamaForCausalLM, windows: np.ndarray) -> float:
    """The mean loss over all targets."""
    with torch.no_grad():
        logits = model(torch.tensor(windows[:, :-1]), use_cache=False).logits
    targets = torch.tensor(windows[:, 1:])
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--keep-fraction 0.5,half", "--keep-fraction = 'half'...must be a number"),
        ("--keep-fraction 0", "--keep-fraction = 0...must be above 0"),
        ("--keep-fraction 1.5", "--keep-fraction = 1.5...at most 1"),
        ("--keep-fraction 0.5 --subsets 0", "--subsets = 0...at least 1"),
        ("--plot a.svg", "--plot = 'a.svg'...Add --keep-fraction"),
        ("--keep-fraction 1 --plot text/a.svg", "--plot = 'text/a.svg'...is not a writable folder"),
        ("--num-stages 3", "--num-stages = 3...the plan of a run sets"),
        ("--set data.path=nowhere", "data.path"),
        ("--set data.held_out=0.5", "data.held_out = 0.5...has trained on"),
        ("--set data.shuffle_seed=1", "data.shuffle_seed = 1...has trained on"),
        ("--set model.width=32", "...the configured model has"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: str, told: str, command: Command):
    expect_error(command("evaluate", "--run", "run", *words.split()), told)


def test_too_few_stages_have_no_neighbours():
    for question in (swapped, leave_one_out_variants):
        with pytest.raises(InputError, match="Leave it out"):
            question(1)
    with pytest.raises(InputError, match="no two inner stages"):
        swapped(2)


def test_an_interrupted_evaluation_ends_at_once(monkeypatch: Any, command: Command):
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    done = command("evaluate", "--run", "run", "--keep-fraction", "1,0.67,0.3")
    assert done == (130, "", "interrupted; nothing was saved\n")
