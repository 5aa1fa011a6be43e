"""The paper's claims measured again: what runs, what of a run is kept, what is drawn."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import skippipe_jax as sp
from experiments.paper import (
    convergence,
    plans,
    reproduce,
    robustness,
    trade_off,
)
from experiments.paper.campaign import CONFIGS, SEEDS, Campaign, Run, runs_of, shrunken
from experiments.paper.jobs import REPOSITORY
from experiments.paper.study_command import RESULTS, write
from skippipe_jax.config import load_config, to_tree
from skippipe_jax.config.parsing import read_files
from tests.harness.pictures import overlapping_texts

PLAN, PATHS = {"plan.file"}, {"plan.file", "plan.method"}
REDRAWN = {"recipe.redraw_every", "recipe.redraws", "recipe.longest_redraw"}
# What an arm is about: all in which its configuration differs from the control's.
ABOUT = {
    "full": set(),
    "full_higher_rate": {"optimizer.learning_rate"},
    "skip25": PATHS,
    "skip25_equal_time": PATHS | {"train.steps"},
    "skip25_random": PATHS | REDRAWN,
    "skip33": PATHS,
    "skip33_equal_time": PATHS | {"train.steps"},
    "skip33_random": PATHS | REDRAWN,
    "skip33_random_swaps": PATHS | REDRAWN,
    "skip33_skippipe": PATHS,
    "skip33_swaps": PATHS,
    "skip33_full_every_10": PATHS | {"recipe.full_every"},
    "skip33_ends_full": PATHS | {"recipe.phases"},
    "skip33_ends_full_equal_time": PATHS | {"recipe.phases", "train.steps"},
    "skip33_higher_rate": PATHS | {"optimizer.learning_rate"},
    "skip50": PATHS,
    "skip50_equal_time": PATHS | {"train.steps"},
    "skip50_random": PATHS | REDRAWN,
    "small50": PLAN | {"model.layers"},
    "small67": PLAN | {"model.layers"},
    "small67_equal_time": PLAN | {"model.layers", "train.steps"},
}


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """The values of a configuration by their keys, a list being one value."""
    if not isinstance(tree, dict):
        return {name: tree}
    return {
        key: value
        for part, own in tree.items()
        for key, value in leaves(own, f"{name}.{part}".lstrip(".")).items()
    }


def config_of(arm: str) -> dict[str, Any]:
    return to_tree(load_config(CONFIGS / f"{arm}.yaml"))


def test_every_arm_is_the_control_but_for_what_it_is_about():
    assert ABOUT.keys() == SEEDS.keys()
    control = leaves(config_of("full"))
    for arm, about in ABOUT.items():
        config = leaves(config_of(arm))
        differing = {key for key in control if config[key] != control[key]} - {"run_dir"}
        assert differing == about, arm


@pytest.mark.parametrize("name", plans.KINDS)
def test_a_committed_plan_is_one_of_its_case(name: str):
    plan, kind = plans.plan_of(name), plans.KINDS[name]
    case = plans.case_of(name)
    assert plan.case.source == case.source
    assert plan.method == kind.method
    visited = len(case.stages) if "full" in kind.method else case.path_length
    assert {len(path) for path in plan.microbatches} == {visited}
    assert len(plan.microbatches) == (8 if name.endswith("_few") else 30)
    stages = [[plan.stage_of[node] for node in path] for path in plan.microbatches]
    swaps = [sum(a > b for a, b in itertools.pairwise(path)) for path in stages]
    assert max(swaps) <= kind.max_swaps


def test_committed_configurations_do_not_change_with_the_defaults_of_the_optimizer():
    configs = [*CONFIGS.glob("*.yaml"), REPOSITORY / "experiments" / "quickstart.yaml"]
    for path in configs:
        optimizer = read_files(path, "config").tree["optimizer"]
        assert {"learning_rate", "beta2", "weight_decay"} <= optimizer.keys(), path


def test_equal_time_is_that_of_the_control():
    steps = config_of("full")["train"]["steps"]
    time_of_control = steps * plans.plan_of("full").predicted.iteration_s
    for name in (*trade_off.SKIPPED, trade_off.SMALLER):
        config = config_of(f"{name}_equal_time")
        time_taken = config["train"]["steps"] * plans.plan_of(name).predicted.iteration_s
        assert time_taken == pytest.approx(time_of_control, rel=0.002)


def test_recipes_that_end_full_do_so_for_a_fifth():
    for arm, about in ABOUT.items():
        if "recipe.phases" in about:
            config = config_of(arm)
            [phase] = config["recipe"]["phases"]
            assert phase["from_step"] == round(0.8 * config["train"]["steps"])
            assert (phase["path_length"], phase["max_swaps"]) == (6, 0)


def test_first_seeds_are_trained_first():
    runs = runs_of(["skip25", "full"], quick=False)
    names = [run.name for run in runs]
    assert names == [
        "full-0", "skip25-0", "full-1", "skip25-1", "full-2", "full-3", "full-4",
    ]  # fmt: skip
    assert runs_of(["skip25", "full"], quick=True) == runs[:2]


def test_a_quick_run_keeps_its_recipe():
    tree = read_files(CONFIGS / "skip33_ends_full.yaml", "config").tree
    small = shrunken(tree)
    assert small["recipe"]["phases"][0]["from_step"] == round(0.8 * small["train"]["steps"])
    assert small["plan"]["file"] == tree["plan"]["file"]
    assert tree["recipe"]["phases"][0]["from_step"] == round(0.8 * tree["train"]["steps"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """A quick campaign in which one run has been trained."""
    campaign = Campaign(tmp_path_factory.mktemp("campaign"), quick=True)
    campaign.train([Run("skip33_ends_full", 0)])
    return campaign


@pytest.mark.nightly
def test_a_run_is_summed_up(trained: Campaign):
    run = Run("skip33_ends_full", 0)
    found = trained.summary(run)
    assert found is not None
    steps = trained.config(run)["train"]["steps"]
    assert found.steps == steps == found.curve[-1][0]
    assert found.tokens_per_iteration == 30 * 32
    folder = trained.folder / "runs" / f"{run.name}-{found.digest}"
    lines = sp.Run(folder).metrics
    assert [line["plan"] for line in lines] == ["plan"] * 20 + ["from_20"] * 5
    assert found.simulated_s == pytest.approx(
        sum(line["predicted_seconds"] for line in lines), abs=0.1
    )
    assert found.curve[-1][1] == found.simulated_s
    assert math.exp(found.loss) == pytest.approx(found.keep["6"]["perplexity"], rel=1e-3)
    assert found.keep["6"]["deviation"] == 0
    assert found.early_exit[-1] == pytest.approx(found.loss, abs=1e-4)
    assert found.early_exit[0] == pytest.approx(found.keep["1"]["loss"], abs=1e-4)
    assert found.keep.keys() == set("123456")
    # After so few steps, two of them may agree to four digits.
    assert len({spread["loss"] for spread in found.keep.values()}) >= 5
    assert found.loss_scaled != found.loss
    assert math.exp(found.loss_scaled) == pytest.approx(
        found.keep_scaled["6"]["perplexity"], rel=1e-3
    )
    assert found.keep_scaled.keys() == found.keep.keys()
    # The data stage alone has nothing that is scaled.
    assert found.keep_scaled["1"] == found.keep["1"]
    # A path visits 4.4 of 6 stages on average: with fewer than that nothing is scaled up.
    assert found.keep_scaled["5"] != found.keep["5"]
    assert found.keep_scaled["3"] == found.keep["3"]
    assert found.command == "python -m experiments.paper.campaign --only skip33_ends_full"
    assert found.machine["jax"]


@pytest.mark.nightly
def test_what_is_trained_is_not_trained_again(
    trained: Campaign, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = Run("skip33_ends_full", 0)
    monkeypatch.setenv("PATH", "")  # nothing can be started
    assert trained.train([run]).keys() == {"skip33_ends_full"}
    assert capsys.readouterr().out == ""
    assert trained.summary(Run("skip33_ends_full", 1)) is None
    with monkeypatch.context() as changed:
        changed.setattr(trained, "quick", False)
        assert trained.summary(run) is None


def test_random_paths_are_others_for_another_seed(tmp_path: Path):
    campaign = Campaign(tmp_path, quick=True)
    seeds = [campaign.config(Run("skip33_random", seed))["plan"]["seed"] for seed in range(3)]
    draws = campaign.config(Run("skip33_random", 0))["recipe"]["redraws"]
    assert all(b - a >= draws for a, b in itertools.pairwise(seeds))


def test_committed_results_and_figures_are_of_the_committed_configurations(tmp_path: Path):
    campaign, runs = Campaign(tmp_path, quick=False), runs_of(SEEDS, quick=False)
    assert {path.stem for path in campaign.results.glob("*.json")} == {run.name for run in runs}
    found = campaign.finished(runs)
    for module in (convergence, robustness, trade_off):
        committed = json.loads((RESULTS / f"{module.NAME}.json").read_text())
        seconds = [committed["iteration_s"]] if module is trade_off else []
        figures = module.figures_of(found, *seconds)
        assert nine_digits({name: committed[name] for name in figures}) == nine_digits(figures)


def nine_digits(figures: dict[str, Any]) -> Any:
    """Figures as they are written, but for their last digits, which depend on the processor."""
    return json.loads(json.dumps(figures), parse_float=lambda text: f"{float(text):.9g}")


@pytest.mark.nightly
@pytest.mark.parametrize("module", [convergence, robustness, trade_off])
def test_committed_figures_are_drawn(module: Any, tmp_path: Path):
    committed = json.loads((RESULTS / f"{module.NAME}.json").read_text())
    assert overlapping_texts(module.draw(committed)) == []
    path = tmp_path / "figures.json"
    write(path, committed, module.draw)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_every_difference_that_is_drawn_is_written():
    for control, shown in convergence.PANELS.values():
        assert set(shown) - {control} <= set(convergence.COMPARED[control])
    used = {*convergence.ARMS, *robustness.WHOLE, *robustness.SMALLER, *trade_off.ARMS}
    assert used == SEEDS.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_figure_is_made_quickly(tmp_path: Path):
    begun_s = time.monotonic()
    words = ["-m", "experiments.paper.reproduce", "--quick", "--folder", str(tmp_path)]
    subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True)
    assert time.monotonic() - begun_s < 15 * 60
    for name in reproduce.MODULES:
        assert json.loads((tmp_path / f"{name}.json").read_text())["commit"]
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
