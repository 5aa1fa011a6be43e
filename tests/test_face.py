"""`import skippipe_jax as sp`: what it offers, what it loads, and what its page shows."""

from __future__ import annotations

import ast
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippipe_jax as sp
from docs.follow import blocks
from tests.harness.training_runs import (
    SMALL_CASE,
    arrays_of_checkpoint,
    assert_same_bits,
    write_config,
)

STEPS = 4


def config_in(folder: Path, *overrides: str, **sections: Any) -> sp.Config:
    given: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "plan": {"case": SMALL_CASE, "method": "balanced"},
        "train": {"steps": STEPS},
        "checkpoint": {"every": 3},
    }
    return sp.load_config(write_config(folder, **given | sections), overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without validation."""
    folder = tmp_path_factory.mktemp("whole")
    sp.Trainer(config_in(folder)).run()
    return folder / "run"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the examples of the page leave behind, run one after the other."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("page"))
        for block in blocks("api_runtime.md"):
            if block.language == "python" and block.runs:
                exec(block.text, names)
        names["metrics"] = names["run"].metrics
        names["saved"] = names["run"].steps
    return names


def test_the_page_trains_evaluates_and_generates_through_sp_alone(page: dict[str, Any]):
    imported = {
        name.name
        for block in blocks("api_runtime.md")
        if block.language == "python" and block.runs
        for statement in ast.walk(ast.parse(block.text))
        if isinstance(statement, ast.Import)
        for name in statement.names
    }
    assert imported == {"skippipe_jax"}
    assert [line["step"] for line in page["metrics"]] == list(range(1, 11))
    assert page["saved"][-1] == 10
    # The model knows bytes, and after ten steps little else.
    model = page["model"]
    loss = np.mean([model.loss(batch) for batch in page["held_out"]])
    assert loss < math.log(model.config.vocabulary_size)
    assert page["model"].generate("def ", 20, sampling=sp.SamplingParams(seed=3)) == page[
        "model"
    ].generate("def ", 20, (0, 1, 2), sp.SamplingParams(seed=3))


def test_the_held_out_loss_is_that_of_validation(page: dict[str, Any]):
    [last] = [line["validation_loss"] for line in page["metrics"] if line["step"] == 9]
    losses = [page["run"].model(9).loss(batch) for batch in page["held_out"]]
    # All batches have equally many targets.
    assert np.mean(losses) == pytest.approx(last, rel=1e-5)


def test_logits_are_those_of_the_loss(page: dict[str, Any]):
    model, tokens = page["model"], [5, 9, 200, 7]
    chances = model.logits(tokens, (0, 2)).astype(np.float64)
    chances -= np.log(np.exp(chances).sum(-1, keepdims=True))
    expected = -np.mean([chances[place, tokens[place + 1]] for place in range(3)])
    assert model.loss(tokens, (0, 2)) == pytest.approx(expected, rel=1e-5)
    assert model.loss([tokens, tokens], (0, 2)) == pytest.approx(expected, rel=1e-5)
    assert model.loss(tokens) != pytest.approx(expected, rel=1e-4)
    # A text has the begin mark in front.
    text = [model.tokenizer.begin, *b"text"]
    np.testing.assert_allclose(model.logits("text"), model.logits(text))
    np.testing.assert_allclose(model.logits([text, text])[1], model.logits(text), atol=1e-6)


@pytest.mark.parametrize("order", [(), (1, 2), (0, 3), (0, 1, 1)])
def test_an_order_that_is_none_is_refused(page: dict[str, Any], order: tuple[int, ...]):
    with pytest.raises(sp.InputError) as caught:
        page["model"].loss([1, 2, 3], order)
    assert caught.value.field == "order"


def test_sequences_that_do_not_fit_are_refused(page: dict[str, Any]):
    model, context = page["model"], page["model"].config.context
    model.loss([1] * (context + 1))
    for tokens in ([1] * (context + 2), [1]):
        with pytest.raises(sp.InputError, match=f"2 to {context + 1} tokens"):
            model.loss(tokens)


# Callbacks.


class Told(sp.Callback):
    """Notes what it is told, in order."""

    def __init__(self, end_at: int | None = None):
        self.end_at = end_at
        self.told: list[Any] = []

    def on_train_begin(self, run: sp.RunView) -> None:
        self.told.append(("begin", run.step))

    def on_step_end(self, run: sp.RunView, metrics: sp.StepMetrics) -> None:
        self.told.append(("step", metrics.step))
        if metrics.step == self.end_at:
            raise OSError("as told")

    def on_validation_end(self, run: sp.RunView, step: int, loss: float | None) -> None:
        assert loss is not None
        self.told.append(("validation", step))

    def on_save(self, run: sp.RunView, step: int) -> None:
        self.told.append(("save", step))

    def on_train_end(self, run: sp.RunView) -> None:
        self.told.append(("end", sp.Run(run.run_dir).steps))

    def close(self) -> None:
        self.told.append("close")


def test_callbacks_are_told_in_order_and_signals_are_the_callers_again(tmp_path: Path):
    callback = Told()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    sp.Trainer(config_in(tmp_path, validation={"every": 2, "sequences": 2}), [callback]).run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    # A step is told of when the next one is under way, or something else is about to come.
    assert callback.told == [
        ("begin", 0),
        ("step", 1),
        ("step", 2),
        ("validation", 2),
        ("step", 3),
        ("save", 3),
        ("step", 4),
        ("validation", 4),
        ("save", 4),
        ("end", [3, 4]),
        "close",
    ]


def test_a_hook_by_a_former_name_is_refused_as_nobody_would_call_it():
    with pytest.raises(TypeError, match=r"Old\.after_step is now on_step_end"):

        class Old(sp.Callback):
            def after_step(self, trainer: Any, metrics: Any) -> None: ...


def test_an_error_of_a_callback_leaves_the_last_checkpoint_and_lets_the_folder_go(tmp_path: Path):
    config, callback = config_in(tmp_path, "train.steps=9"), Told(end_at=5)
    with pytest.raises(OSError, match="as told"):
        sp.Trainer(config, [callback]).run()
    assert callback.told[-2:] == [("step", 5), "close"]
    assert sp.Run(tmp_path / "run").steps == [3]
    ending = sp.Trainer(config_in(tmp_path), resume=True).run()
    assert ending == sp.RunResult(STEPS, None)


def test_a_state_that_is_no_number_is_not_saved_although_its_error_is_caught(tmp_path: Path):
    """The step at which that shows is one that saves."""
    overrides = "optimizer.learning_rate=3e18", "optimizer.warmup_steps=0", "checkpoint.every=1"
    trainer = sp.Trainer(config_in(tmp_path, *overrides, "train.steps=9"))

    def train() -> None:
        while not trainer.finished:
            trainer.train_step()

    # Caught within the block, and at its end, where it would be saved.
    for act in (train, lambda: trainer.__exit__(None)):
        with pytest.raises(sp.InputError, match="loss is"):
            act()
    run = sp.Run(tmp_path / "run")
    assert run.steps[-1] == run.metrics[-1]["step"] < trainer.step


# Step by step.


def test_steps_one_by_one_are_a_run(whole: Path, tmp_path: Path):
    with sp.Trainer(config_in(tmp_path)) as trainer:
        assert [trainer.train_step(), trainer.train_step()] == [1, 2]
    with pytest.raises(RuntimeError, match="resume=True"):
        trainer.train_step()
    with sp.Trainer(config_in(tmp_path), resume=True) as trainer:
        assert not trainer.membership.is_training
        trainer.setup()
        assert trainer.membership.is_training
        assert trainer.step == 2
        while not trainer.finished:
            trainer.train_step()
    for found, expected in zip(
        arrays_of_checkpoint(tmp_path / "run", STEPS),
        arrays_of_checkpoint(whole, STEPS),
        strict=True,
    ):
        assert_same_bits(found, expected)
    lines, others = (sp.Run(folder).metrics for folder in (tmp_path / "run", whole))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]


def test_a_trainer_that_is_closed_saves_nothing_more_and_lets_the_folder_go(tmp_path: Path):
    trainer = sp.Trainer(config_in(tmp_path))
    trainer.train_step()
    with pytest.raises(sp.InputError, match="another training run is writing to it"):
        sp.Trainer(config_in(tmp_path), resume=True).setup()
    trainer.close()
    assert sp.Run(tmp_path / "run").steps == []
    with sp.Trainer(config_in(tmp_path), resume=True) as again:
        again.setup()
        assert again.step == 0


# What is loaded.

LOADED = """
import json, sys
import skippipe_jax as sp
HEAVY = ("jax", "flax", "orbax", "grain", "numba", "numpy")
told = [[name for name in HEAVY if name in sys.modules]]
sp.make_plan({case}, "balanced")
sp.Config.from_dict({{"run_dir": "run"}})
told.append([name for name in HEAVY[:4] if name in sys.modules])
sp.Trainer
told.append([name for name in HEAVY[:1] if name in sys.modules])
print(json.dumps(told))
"""


def test_nothing_is_loaded_before_it_is_used():
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(case=SMALL_CASE)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[], [], ["jax"]]


def test_every_name_is_there():
    assert dir(sp) == sp.__all__
    for name in sp.__all__:
        assert getattr(sp, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        sp.Trainr  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"'parse_config'; it is now Config\.from_dict"):
        sp.parse_config  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_values_tell_of_themselves_in_short(page: dict[str, Any]):
    run, model = page["run"], page["model"]
    assert repr(run) == f"Run({str(run.folder)!r}, step=10, checkpoints={run.steps})"
    assert repr(model) == "Model(width=16, layers=3, stages=(1, 1, 1))"
    assert repr(run.plan).startswith("Plan(method='")
    for picture in (run._repr_svg_(), run.plan._repr_svg_(), run.plot("seconds").svg):
        assert picture.startswith("<svg")
    with pytest.raises(sp.InputError, match="figure = 'speed'"):
        run.plot("speed")


def test_the_best_checkpoint_is_read_by_its_name(page: dict[str, Any], whole: Path):
    run, tokens = page["run"], [5, 9, 200]
    best = json.loads((run.folder / "best.json").read_text())["step"]
    assert run.best == best
    found = sp.load_model(run.folder, "best").logits(tokens)
    np.testing.assert_array_equal(found, run.model(best).logits(tokens))
    np.testing.assert_array_equal(found, run.model("best").logits(tokens))
    with pytest.raises(sp.InputError, match="step = 'newest'"):
        sp.load_model(run.folder, "newest")
    with pytest.raises(sp.InputError, match="was never computed"):
        sp.load_model(whole, "best")
