"""Scales of residual branches: which they are, which are refused, and who uses them."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from skippipe_sched.errors import InputError
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import skippipe_jax as sp
from skippipe_jax.inference.evaluation import losses_by_order
from skippipe_jax.inference.harness_model import HarnessModel
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.scaling import SHARE, Scale
from skippipe_jax.interop.conversion import from_huggingface
from skippipe_jax.models.branch_scales import BranchScales
from tests.harness.llama_models import random_llama, save
from tests.harness.messages import expect_error
from tests.harness.partial_models import save_run
from tests.harness.training_runs import SMALL_CASE
from tests.inference.conftest import Command, language_model

TIME = 32
CASE = SMALL_CASE | {"nodes": 4, "stages": [1, 1, 1, 1], "microbatches_per_data_node": 8}
SHAPES = {"width": 16, "layers": 5, "heads": 4, "kv_heads": 2, "ffn_width": 24, "context": TIME}
SECTIONS: dict[str, Any] = {
    "model": SHAPES | {"stage_layers": [1, 2, 1, 1]},
    "data": {
        "source": "text",
        "path": "text",
        "sequence_length": TIME,
        "microbatch_size": 2,
        "held_out": 0.25,
    },
}
STAGES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a run along paths of which each visits one of three inner stages."""
    folder = tmp_path_factory.mktemp("scaling")
    letters = np.random.default_rng(0).choice(list(b"aab"), 4000).astype(np.uint8)
    (folder / "text").write_bytes(letters.tobytes())
    save_run(folder / "run", SECTIONS, STAGES)
    make_plan(parse_case(CASE), "balanced").save(folder / "run" / "plan.json")
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def shares_by_hand() -> list[float]:
    plan = sp.load_plan(Path("run/plan.json"))
    visits = Counter(plan.stage_of[node] for path in plan.microbatches for node in path)
    return [visits[stage] / len(plan.microbatches) for stage in range(STAGES)]


def scales_by_hand(scale: Scale, count: int) -> BranchScales:
    """The scales where so many stages run."""
    more = (STAGES - 1) / (count - 1)
    of_shares = [min(more * share, 1.0) for share in shares_by_hand()[1:]]
    stages = [1.0, *(of_shares if scale == SHARE else [float(scale)] * (STAGES - 1))]
    blocks = np.repeat(stages, SECTIONS["model"]["stage_layers"]).tolist()
    return BranchScales(tuple(blocks), tuple(blocks))


def assert_alike(found: BranchScales, expected: BranchScales) -> None:
    assert found.attention == pytest.approx(expected.attention, rel=1e-6)
    assert found.feed_forward == pytest.approx(expected.feed_forward, rel=1e-6)


# Which scales.


def test_shares_are_those_of_the_plan_and_more_where_fewer_run_but_never_above_1():
    shares = shares_by_hand()
    assert shares[0] == 1.0
    assert sum(shares[1:]) == pytest.approx(1.0)
    of_run = sp.Run(Path("run")).scaling(SHARE)
    for count in (4, 3):
        inner = [share * 3 / (count - 1) for share in shares[1:]]
        assert max(inner) < 1
        assert_alike(of_run.scales(count), BranchScales.of_stages([1.0, *inner], of_run.cut))
    assert of_run.scales() == of_run.scales(4)
    # As many as in training, or fewer: what is unequal among the shares is not made greater than 1.
    assert max(shares[1:]) * 3 > 1.0 == max(of_run.scales(2).attention)
    assert min(of_run.scales(2).attention) == pytest.approx(min(shares[1:]) * 3)
    assert of_run.scales(1) == BranchScales.of_stages([1.0] * STAGES, of_run.cut)


def test_a_number_is_the_same_however_many_stages_run():
    of_run = sp.Run(Path("run")).scaling("0.7")
    for count in (4, 3, 2):
        assert of_run.scales(count) == BranchScales((1.0, *[0.7] * 4), (1.0, *[0.7] * 4))


# What is refused.


@pytest.mark.parametrize("given", ["half", "0", "-0.5", "nan", "inf", "", True, None, [1.0]])
def test_what_is_no_scale_is_refused(given: Any):
    with pytest.raises(InputError, match="Write share, or a number above 0") as caught:
        sp.Run(Path("run")).scaling(given)
    assert (caught.value.field, str(caught.value.value)) == ("--scale", str(given))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("evaluate --run run --scale half", "--scale = 'half': must be a number"),
        ("evaluate --run run --scale fit", "--scale = 'fit'...Write share, or a number"),
        ("evaluate --run run --scale 1e90", "--scale = '1e90': must be at most 3.4"),
        ("evaluate --run run --scale 3e38", "--scale = 3e+38: the scaled loss along"),
        ("generate --run run --prompt a --scale 0", "--scale = '0': must be gr"),
        ("convert to-hf --run run -o hf --scale nan", "--scale = 'nan': must be finite"),
    ],
)
def test_commands_refuse_it_in_one_line(words: str, told: str, command: Command):
    expect_error(command(*words.split()), told)
    assert not Path("hf").exists()


def test_where_no_plan_says_who_visited_what_there_is_no_share(tmp_path: Path, command: Command):
    source, run = save(random_llama("llama-2"), tmp_path / "hf"), tmp_path / "run"
    from_huggingface(source, run, 5)
    other = tmp_path / "other"
    shutil.copytree("run", other)
    make_plan(parse_case(CASE | {"nodes": 3, "stages": [1, 1, 1]}), "balanced").save(
        other / "plan.json"
    )
    refused = [
        ("evaluate", ["--hf", source], 5),
        ("evaluate", ["--run", run], 5),
        ("convert", ["to-hf", "--run", run, "-o", tmp_path / "back"], 5),
        ("evaluate", ["--run", other], STAGES),
    ]
    for name, words, stages in refused:
        told = f"--scale = 'share': needs a plan of {stages} stages...Write a number such as 0.7"
        expect_error(command(name, *words, "--scale", "share"), told)


@pytest.mark.parametrize("count", [0, 5, 2.0])
def test_so_many_stages_as_there_are_not_are_refused(count: Any):
    with pytest.raises(InputError) as caught:
        sp.Run(Path("run")).scaling(0.5).scales(count)
    assert (caught.value.field, caught.value.value) == ("kept", count)


# Who uses them.


@pytest.mark.parametrize("scale", [SHARE, "0.7"])
def test_evaluation_shows_both(scale: str, command: Command):
    asked = ["evaluate", "--run", "run", "--sequences", "4", "--keep-fraction", "1,0.5", "--scale"]
    table = command(*asked, scale, "--plot", "shares.svg")[1]
    found = json.loads(command(*asked, scale, "--json")[1])
    plain = json.loads(command(*asked[:-1], "--json")[1])
    scaled = found.pop("scaled")
    assert found == plain
    model, config = open_source(Path("run")).model(), open_source(Path("run")).config
    rows = {tuple(re.split("  +", line)[:2]): line for line in table.splitlines()}
    for answer, of_plain in zip(scaled["keep"], found["keep"], strict=True):
        count = len(answer["each"][0]["stages"])
        scales = scales_by_hand(scale, count)
        shown = scaled["scales"][str(count)]
        assert_alike(BranchScales(shown["attention"], shown["feed_forward"]), scales)
        assert f"scales where {count} of 4 stages run: {scales.scales_text(model.cut)}\n" in table
        orders = [tuple(way["stages"]) for way in answer["each"]]
        losses, _ = losses_by_order(model.scaled(scales), orders, config.data, 4)
        for way, other in zip(answer["each"], of_plain["each"], strict=True):
            assert way["loss"] == pytest.approx(losses[tuple(way["stages"])], rel=1e-5)
            row = rows[f"keep {answer['share']:g}", " ".join(map(str, way["stages"]))].split()
            figures = [f"{one['loss']:.4f} {one['perplexity']:.3f}" for one in (other, way)]
            assert " ".join(row[-4:]) == " ".join(figures)
        mean = re.split(
            "  +", rows[f"keep {answer['share']:g}, mean", f"{len(orders)} of {len(orders)}"]
        )
        assert mean[3] == f"{of_plain['perplexity']:.3f}"
        assert mean[6] == f"{answer['perplexity']:.3f}"
    assert abs(scaled["loss"] - found["loss"]) > 1e-3
    assert f"scaled: loss {scaled['loss']:.4f}, perplexity {scaled['perplexity']:.3f}" in table
    svg = ElementTree.parse("shares.svg").getroot()
    groups = {g.get("class"): g for g in svg.iter("{http://www.w3.org/2000/svg}g")}
    for kind, answers in (("plain", found["keep"]), ("scaled", scaled["keep"])):
        tips = {tip.text for tip in groups[kind].iter() if tip.tag.endswith("title")}
        for answer in answers:
            for way in answer["each"]:
                assert (
                    f"stages {' '.join(map(str, way['stages']))}: {way['perplexity']:.3f}" in tips
                )


@pytest.mark.parametrize("scale", [SHARE, "0.7"])
def test_generation_and_the_harness_use_the_scales_for_so_many_stages(
    scale: str, command: Command, capsys: Any
):
    model, scales = open_source(Path("run")).model(), scales_by_hand(scale, 2)
    words = "--run run --prompt ab --max-new-tokens 12 --keep-fraction 0.5 --temperature 0"
    _, out, told = command("generate", *words.split(), "--scale", scale)
    assert told.splitlines()[0] == f"scales {scales.scales_text(model.cut)}"
    [order] = model.orders(0.5, most=1)
    greedy = sp.SamplingParams(temperature=0)
    assert out == "ab" + model.scaled(scales).generate("ab", 12, order, greedy) + "\n"
    assert out != "ab" + model.generate("ab", 12, order, greedy) + "\n"
    harness = HarnessModel(language_model("--run", "run", "--keep-fraction", 0.5, "--scale", scale))
    assert capsys.readouterr().err.splitlines()[0] == f"scales {scales.scales_text(model.cut)}"
    [(nats, _)] = harness.loglikelihood(
        [Instance(request_type="loglikelihood", doc={}, arguments=("ab", "ab"), idx=0)]
    )
    logits = model.scaled(scales).logits("ab" * 2, order)[2:4].astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    assert nats == pytest.approx(logits[0, ord("a")] + logits[1, ord("b")], abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale", ["share", "0.7"])
def test_what_is_exported_is_scaled(scale: str, tied: bool, tmp_path: Path, command: Command):
    """Transformers has our logits, and the loss that evaluation tells of the scaled model."""
    sections = SECTIONS | {"model": SECTIONS["model"] | {"tied_head": tied}}
    run = tmp_path / "run"
    save_run(run, sections, STAGES)
    shutil.copy("run/plan.json", run)
    told = command("convert", "to-hf", "--run", run, "-o", tmp_path / "hf", "--scale", scale)[1]
    ours = sp.Run(run).model(scale=scale)
    scales = sp.Run(run).scaling(scale).scales()
    assert told.splitlines()[0] == f"scales {scales.scales_text(ours.cut)}"
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    nats = count = 0.0
    for batch in sp.Run(run).held_out_batches(8):
        tokens, targets = (torch.from_numpy(batch[key]).long() for key in ("tokens", "targets"))
        with torch.no_grad():
            logits = theirs(tokens, use_cache=False).logits
        own = ours.logits(batch["tokens"])
        np.testing.assert_allclose(logits.numpy(), own, rtol=0, atol=1e-5 * np.abs(own).max())
        nats += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )
        )
        count += targets.numel()
    asked = ["evaluate", "--run", run, "--sequences", 8, "--scale", scale, "--json"]
    found = json.loads(command(*asked)[1])
    assert nats / count == pytest.approx(found["scaled"]["loss"], abs=1e-5)
    assert abs(nats / count - found["loss"]) > 1e-2
