"""A new user's first steps: a configuration that `init` writes, or text alone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.cli.init import NEXT, TEMPLATES
from skippipe_jax.cli.main import parser
from skippipe_jax.config import load_config
from tests.commands.examples import Command, expect_one_error, given, write_inputs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALL = ("model.width=16", "model.layers=1", "model.heads=2", "model.kv_heads=1")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text, and nothing else, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    (tmp_path / "config.yaml").unlink()
    return tmp_path / "text"


def test_every_kind_is_written_once_and_says_a_command_that_there_is(text: Path, command: Command):
    assert {path.stem for path in TEMPLATES.iterdir()} == NEXT.keys()
    for kind in NEXT:
        written = command("init", "--kind", kind, "--output", f"{kind}.yaml")
        assert written.code == 0
        commands = [line.split("skippipe ")[1] for line in written.out.splitlines() if "  " in line]
        for line in commands:
            words = shlex.split(line.replace(" N ", " 2 ").replace(" I", " 0"))
            parsed = parser([words[0]]).parse_args(words)
            assert words[0] != "train" or parsed.config == Path(f"{kind}.yaml")
        assert commands[-1].startswith("train ")
        before = Path(f"{kind}.yaml").read_text()
        expect_one_error(command("init", "--output", f"{kind}.yaml"), "already exists")
        assert Path(f"{kind}.yaml").read_text() == before


@pytest.mark.parametrize("kind", NEXT)
def test_a_dry_run_takes_what_is_written(kind: str, text: Path, command: Command):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(LLAMA))
    assert command("init", "--kind", kind).code == 0
    hosts = "3" if kind == "several-machines" else "1"
    shown = command("train", "--dry-run", "--hosts", hosts)
    if kind == "given-model":  # All but the weights is there.
        expect_one_error(shown, "model.safetensors.index.json do not exist")
    else:
        assert (shown.code, shown.err) == (0, "")
        assert "the run measures the cluster and makes a plan when it starts" in shown.out
    assert load_config(Path("train.yaml")).data.path == "text"


def test_text_alone_is_trained_on_and_shown(
    text: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skippipe_jax.profiling.cluster.STAGE_S", 0.05)
    of_run = ("train.steps=2", "optimizer.decay_steps=100", "data.sequence_length=32")
    small = given(*SMALL, *of_run, "compilation_cache=null")
    trained = command("train", "--data", "text", *small)
    assert trained.code == 0
    assert "by the timing model, all 2 iterations take" in trained.out, "is measured"
    assert re.search(r"the text has [\d,]+ sequences; 2 steps read \S+ times that", trained.out)
    assert "planning for" not in trained.err + trained.out, "a single node has one plan"
    assert "</html>" in Path("runs/default/report.html").read_text()
    expect_one_error(command("train", "--data", "text", *small), "already contains a run")

    # Resumed, it goes on by what was measured, also under another plan. On another device it keeps
    # its plan, and is measured anew for another.
    def measured(*_: object) -> None:
        raise InputError("test", "", "it is measured", "Stop here")

    monkeypatch.setattr("skippipe_jax.training.setup.measure", measured)
    again = ("train", "--data", "text", *small, "--resume", "--set", "train.steps=3")
    resumed = command(*again)
    assert resumed.code == 0, resumed.err
    assert "not measured again: the run keeps its plan, measured at 20" in resumed.out
    replanned = command(*again, "--set", "plan.budget_s=3")
    assert replanned.code == 0, replanned.err
    assert "not measured again: making a new plan from the measurement of 20" in replanned.out
    expect_one_error(
        command(*again, *given("model.recompute=stage", "plan.budget_s=4")), "it is measured"
    )
    figures = Path("runs/default/case.measured.json")
    recorded = json.loads(figures.read_text())
    recorded["hosts"][0]["devices"] = ["abacus"]
    figures.write_text(json.dumps(recorded))
    kept = command(*again, "--set", "plan.budget_s=3")
    assert kept.code == 0, kept.err
    assert "the run keeps its plan" in kept.out
    other = command(*again, "--set", "plan.budget_s=4")
    assert "measuring again: hosts or devices differ from those measured at 20" in other.out
    expect_one_error(other, "it is measured")


def test_text_that_is_missing_is_told_before_the_machine_is_measured(
    text: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skippipe_jax.training.setup.measure", lambda *_: pytest.fail("measured"))
    expect_one_error(command("train", "--data", "nowhere"), "nowhere", "No such file")


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ({"messages": []}, "source: chat"),
        ({"conversations": []}, "source: chat"),
        ({"text": "told"}, "source: jsonl"),
    ],
)
def test_conversations_are_known_by_their_first_line(
    text: Path, command: Command, line: dict[str, Any], source: str
):
    Path("lines.jsonl").write_text(json.dumps(line) + "\n")
    shown = command("train", "--data", "*.jsonl", "--dry-run", "--hosts", "2", "--set", "plan=auto")
    assert source in shown.out
    assert ("packing: documents" in shown.out) == (source == "source: chat")


def test_models_are_named_by_preset_or_folder(text: Path, command: Command):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(LLAMA))
    preset = command("train", "--data", "text", "--model", "500m", "--dry-run")
    assert "preset: 500m" in preset.out
    named = command("train", "--data", "text", "--model", "hf:model", "--dry-run")
    assert "init_from: hf:model" in named.out
    assert "vocabulary_size: 300" in named.out
    wrong = command("train", "--data", "text", "--model", "huge", "--dry-run")
    expect_one_error(wrong, "model.preset = 'huge'", "tiny")


def test_without_a_configuration_or_a_plan_a_way_to_begin_is_said(text: Path, command: Command):
    missing = command("train")
    expect_one_error(missing, "--config = 'train.yaml'", "skippipe init", "--data PATH")
    expect_one_error(command("train", "--config", "other.yaml"), "other.yaml", "No such file")
    refused = command("train", "--data", "text", "--dry-run", "--hosts", "2")
    expect_one_error(refused, "plan = None", "several hosts", "plan: auto", "skippipe measure")
