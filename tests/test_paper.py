"""The paper's claims measured again: what runs, what of a run is kept, what is drawn."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.paper import (
    calm,
    convergence,
    drawing,
    first_weights,
    intervals,
    jobs,
    plans,
    reproduce,
    robustness,
    trade_off,
)
from experiments.paper.campaign import CONFIGS, SEEDS, Campaign, Run, runs_of, shrunken
from experiments.paper.jobs import REPOSITORY
from experiments.paper.summary import Summary
from skippipe_jax.config import load_config, parse_config, to_tree
from skippipe_jax.runtime.stage_functions import functions_of_stages
from skippipe_jax.storage import run_folder
from skippipe_jax.training.first_weights import find_weights

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
    "skip33_inverse": PATHS | {"recipe.skip_scaling"},
    "skip33_inverse_ends_full": PATHS | {"recipe.skip_scaling", "recipe.phases"},
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
    assert len(plan.microbatches) == 30
    stages = [[plan.stage_of[node] for node in path] for path in plan.microbatches]
    swaps = [sum(a > b for a, b in itertools.pairwise(path)) for path in stages]
    assert max(swaps) <= kind.max_swaps


def test_committed_configurations_do_not_change_with_the_defaults_of_the_optimizer():
    configs = [*CONFIGS.glob("*.yaml"), REPOSITORY / "experiments" / "quickstart.yaml"]
    for path in configs:
        optimizer = yaml.safe_load(path.read_text())["optimizer"]
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
    runs = runs_of(["skip33_inverse", "full"], quick=False)
    names = [run.name for run in runs]
    assert names == [
        "full-0", "skip33_inverse-0", "full-1", "skip33_inverse-1", "full-2", "full-3", "full-4",
    ]  # fmt: skip
    assert runs_of(["skip33_inverse", "full"], quick=True) == runs[:2]


def test_a_quick_run_keeps_its_recipe():
    tree = yaml.safe_load((CONFIGS / "skip33_ends_full.yaml").read_text())
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


def test_a_run_is_summed_up(trained: Campaign):
    run = Run("skip33_ends_full", 0)
    found = trained.summary(run)
    assert found is not None
    steps = trained.config(run)["train"]["steps"]
    assert found.steps == steps == found.curve[-1][0]
    assert found.tokens_per_iteration == 30 * 32
    folder = trained.folder / "runs" / f"{run.name}-{found.digest}"
    lines = run_folder.read_metrics(folder)
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
    assert found.machine["jax"]


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


def test_random_paths_are_others_for_another_seed(trained: Campaign):
    seeds = [trained.config(Run("skip33_random", seed))["plan"]["seed"] for seed in range(3)]
    draws = trained.config(Run("skip33_random", 0))["recipe"]["redraws"]
    assert all(b - a >= draws for a, b in itertools.pairwise(seeds))


def made_up(loss: float, steps: int, stages: int = 6, gain: float = 0.05) -> Summary:
    """What a run might have found, with that loss at the end, and less by `gain` if scaled."""

    def spread(nats: float) -> dict[str, float]:
        own = math.exp(nats)
        return {
            "perplexity": own,
            "deviation": 0.2,
            "least": 0.9 * own,
            "greatest": 1.1 * own,
            "loss": nats,
        }

    counts = range(1, stages + 1)
    return Summary(
        digest="",
        steps=steps,
        tokens_per_iteration=3840,
        curve=[[step, 50.0 * step, loss + 50 / step] for step in range(20, steps + 1, 20)],
        simulated_s=50.0 * steps,
        loss=loss,
        loss_scaled=loss - gain,
        keep={str(n): spread(loss + 0.1 * (stages - n)) for n in counts},
        keep_scaled={str(n): spread(loss - gain + 0.1 * (stages - n)) for n in counts},
        early_exit=[loss + 0.1 * (stages - n) for n in counts],
        swaps=spread(loss + 0.01),
        minutes=5.0,
        command="",
        commit="",
        machine={},
    )


def everything() -> dict[str, list[Summary]]:
    """A whole campaign, in which an arm's seeds do not all move alike."""
    found = {}
    for number, (arm, seeds) in enumerate(SEEDS.items()):
        steps = config_of(arm)["train"]["steps"]
        stages = len(plans.case_of(arm).stages) if arm in plans.KINDS else 6
        losses = [1.5 + 0.01 * number + 0.02 * s + 0.01 * (number * s % 3) for s in range(seeds)]
        gain = 0.05 if arm.startswith("skip") else 0.0
        found[arm] = [made_up(loss, steps, stages, gain) for loss in losses]
    return found


SECONDS = {
    network: {"full": 80.0, "skip25": 55.0, "skip33": 44.0, "skip50": 35.0 - n, "small67": 50.0}
    for n, network in enumerate(plans.NETWORKS)
}


def assert_no_text_overlaps(figure: Any) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    # Labels of ticks that lie beyond an axis are there, but are not drawn.
    beyond = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        if not min(axis.get_view_interval()) <= place <= max(axis.get_view_interval())
    }
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = {text: text.get_window_extent() for text in texts if text not in beyond}
    frame = figure.bbox
    for text, box in boxes.items():
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text.get_text()
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text.get_text()
    for (a, own), (b, other) in itertools.combinations(boxes.items(), 2):
        assert not own.overlaps(other), (a.get_text(), b.get_text())


def test_figures_of_a_whole_campaign_can_be_read(tmp_path: Path):
    found = everything()
    drawn = (
        (convergence, convergence.figures_of(found)),
        (robustness, robustness.figures_of(found)),
        (trade_off, trade_off.figures_of(found, SECONDS)),
    )
    for module, figures in drawn:
        reproduce.write(module, figures, tmp_path)
        assert json.loads((tmp_path / f"{module.NAME}.json").read_text())
        assert (tmp_path / f"{module.NAME}.png").read_bytes().startswith(b"\x89PNG")
        assert_no_text_overlaps(module.draw(figures))


def test_committed_results_are_of_the_committed_configurations(tmp_path: Path):
    campaign, runs = Campaign(tmp_path, quick=False), runs_of(SEEDS, quick=False)
    there = {path.stem for path in campaign.results.glob("*.json")}
    assert there == {run.name for run in runs if campaign.summary(run) is not None}


@pytest.mark.parametrize("module", [convergence, robustness, trade_off])
def test_committed_figures_are_those_of_the_committed_results(module: Any, tmp_path: Path):
    found = Campaign(tmp_path, quick=False).finished(runs_of(SEEDS, quick=False))
    committed = json.loads((reproduce.RESULTS / f"{module.NAME}.json").read_text())
    seconds = [committed["iteration_s"]] if module is trade_off else []
    figures = module.figures_of(found, *seconds)
    assert committed.items() >= json.loads(json.dumps(figures)).items()
    assert_no_text_overlaps(module.draw(committed))


def test_figures_of_one_arm_are_drawn_too(tmp_path: Path):
    found = {"full": everything()["full"]}
    reproduce.write(convergence, convergence.figures_of(found), tmp_path)
    reproduce.write(robustness, robustness.figures_of(found), tmp_path)
    reproduce.write(trade_off, trade_off.figures_of(found, SECONDS), tmp_path)


def test_loss_at_equal_time_lies_between_the_runs_or_beyond_them():
    found = {
        "full": [made_up(1.5, 400)],
        "skip33": [made_up(1.7, 400, gain=0.1)],
        "skip33_equal_time": [made_up(1.6, 800, gain=0.3)],
    }
    seconds = {
        "as trained": {"full": 80.0, "skip33": 40.0},
        "as long as full": {"full": 80.0, "skip33": 80.0},
        "between": {"full": 80.0, "skip33": 80.0 / math.sqrt(2)},
        "beyond": {"full": 80.0, "skip33": 20.0},
    }
    networks = trade_off.figures_of(found, seconds)["equal_time"]
    losses = {name: own["loss"]["skip33"] for name, own in networks.items()}
    scaled = {name: own["loss_scaled"]["skip33"] for name, own in networks.items()}
    expected = {"as trained": 1.6, "as long as full": 1.7, "between": 1.65, "beyond": 1.5}
    assert losses == {name: [pytest.approx(loss)] for name, loss in expected.items()}
    expected = {"as trained": 1.3, "as long as full": 1.6, "between": 1.45, "beyond": 1.0}
    assert scaled == {name: [pytest.approx(loss)] for name, loss in expected.items()}
    beyond = [own["beyond_what_was_trained"]["skip33"] for own in networks.values()]
    assert beyond == [False, False, False, True]


def test_where_skipping_pays_is_judged_over_the_seeds_that_both_have():
    found = {
        "full": [made_up(loss, 400, gain=0.0) for loss in (1.5, 1.6, 1.7, 1.5, 1.6)],
        "skip33": [made_up(loss, 400) for loss in (1.7, 1.8)],
        "skip33_equal_time": [made_up(loss, 800, gain=0.3) for loss in (1.4, 1.52)],
        "small67": [made_up(loss, 400, gain=0.0) for loss in (1.5, 1.55, 1.5)],
        "small67_equal_time": [made_up(loss, 800, gain=0.0) for loss in (1.3, 1.4, 1.3)],
    }
    seconds = {"regions": {"full": 80.0, "skip33": 40.0, "small67": 40.0}}
    figures = trade_off.figures_of(found, seconds)
    [of_regions] = figures["equal_time"].values()
    control, smaller = of_regions["minus_control"], of_regions["minus_smaller"]
    own = control["loss"]["skip33"]
    assert (own["mean"], own["seeds"], own["pooled"]) == (pytest.approx(-0.09), 2, True)
    assert control["loss_scaled"]["skip33"]["mean"] == pytest.approx(-0.39)
    assert smaller["loss"]["skip33"]["mean"] == pytest.approx(0.11)
    assert smaller["loss"]["full"]["seeds"] == 3
    alike = figures["equal_data"]["minus_control"]["loss"]
    assert alike["skip33"]["mean"] == pytest.approx(0.2)
    assert alike["small67"]["mean"] == pytest.approx(-0.25 / 3, abs=1e-5)


def test_robustness_compares_with_all_stages():
    seeds = [made_up(math.log(p), 400, gain=math.log(2)) for p in (4.0, 6.0)]
    figures = robustness.figures_of({"full": seeds})
    keep, scaled = (figures["arms"]["full"][name] for name in ("keep", "keep_scaled"))
    assert keep["6"] == {
        "perplexity": pytest.approx(5.0),
        "deviation": pytest.approx(0.2),
        "least": pytest.approx(3.6),
        "greatest": pytest.approx(6.6),
    }
    assert scaled["3"]["perplexity"] == pytest.approx(2.5 * math.exp(0.3))
    for way in robustness.WAYS:
        worse = figures["compared"][way]["worse_than_all_stages"]
        assert worse["3"]["full"]["mean"] == pytest.approx(math.exp(0.3) - 1, abs=1e-5)


def test_robustness_compares_with_the_control_and_with_smaller_models():
    found = {
        "full": [made_up(math.log(p), 400, gain=0.0) for p in (4.0, 5.0, 6.0)],
        "skip33": [made_up(math.log(p), 400, gain=math.log(2)) for p in (6.0, 8.0)],
        "small67": [made_up(math.log(p), 400, 4, gain=0.0) for p in (4.0, 5.0)],
    }
    compared = robustness.figures_of(found)["compared"]
    minus = compared["plain"]["minus_control"]["6"]["skip33"]
    assert (minus["mean"], minus["seeds"]) == (pytest.approx(2.5), 2)
    # The control as it is, also where the arm is scaled.
    assert compared["scaled"]["minus_control"]["6"]["skip33"]["mean"] == pytest.approx(-1.0)
    of_four = math.exp(0.2)
    smaller = {way: compared[way]["minus_smaller"]["small67"] for way in robustness.WAYS}
    assert smaller["plain"]["skip33"]["mean"] == pytest.approx(7 * of_four - 4.5, abs=1e-4)
    assert smaller["scaled"]["skip33"]["mean"] == pytest.approx(3.5 * of_four - 4.5, abs=1e-4)
    assert smaller["plain"]["full"]["seeds"] == 2


# How sure a difference is.


def test_an_interval_is_that_of_the_paired_differences():
    """By hand: differences 0.1, 0.2, 0.3, 0.2, 0.2 deviate by 0.0707; t(4) is 2.776."""
    control = [1.0, 1.5, 1.2, 1.1, 1.4, 9.9]
    arm = [1.1, 1.7, 1.5, 1.3, 1.6]
    differences = intervals.paired(arm, control)
    assert differences == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.2])
    own = intervals.intervals({"arm": differences})["arm"]
    half = 2.776445 * math.sqrt(0.005) / math.sqrt(5)
    assert (own.mean, own.seeds, own.pooled) == (pytest.approx(0.2), 5, False)
    assert (own.low, own.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))


def test_two_seeds_are_judged_by_the_deviation_of_all_arms():
    """By hand: squares 0.08, 0.5 and 0.02 over 2 + 1 + 1 degrees of freedom."""
    arms = {"three": [0.8, 1.0, 1.2], "two": [1.0, 2.0], "also": [3.0, 3.2], "one": [5.0]}
    found = intervals.intervals(arms)
    deviation = math.sqrt((0.08 + 0.5 + 0.02) / 4)
    for name, mean, seeds in (("two", 1.5, 2), ("also", 3.1, 2), ("one", 5.0, 1)):
        half = 2.776445 * deviation / math.sqrt(seeds)
        own = found[name]
        assert (own.mean, own.seeds, own.pooled) == (pytest.approx(mean), seeds, True)
        assert (own.low, own.high) == (pytest.approx(mean - half), pytest.approx(mean + half))
    own = found["three"]
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert (own.high, own.pooled) == (pytest.approx(1.0 + half), False)


def test_a_single_seed_has_a_mean_and_no_interval():
    own = intervals.figures({"one": [0.1], "other": [0.3]})
    assert own["one"] == {"mean": 0.1, "low": None, "high": None, "seeds": 1, "pooled": True}


@given(
    st.lists(st.floats(-10, 10), min_size=3, max_size=6),
    st.floats(-10, 10),
    st.floats(0.1, 10),
)
def test_an_interval_moves_and_grows_with_its_values(
    values: list[float], moved: float, times: float
):
    own = intervals.intervals({"own": values})["own"]
    other = intervals.intervals({"own": [times * value + moved for value in values]})["own"]
    for before, after in ((own.low, other.low), (own.high, other.high), (own.mean, other.mean)):
        assert before is not None
        assert after == pytest.approx(times * before + moved, abs=1e-6)


def test_differences_in_convergence_pair_arms_with_their_controls():
    found = {
        "full": [made_up(loss, 400, gain=0.0) for loss in (1.5, 1.6, 1.8)],
        "skip33": [made_up(loss, 400, gain=0.1) for loss in (1.7, 1.8, 2.0)],
        "skip33_ends_full": [made_up(loss, 400, gain=-0.1) for loss in (1.6, 1.8)],
    }
    figures = convergence.figures_of(found)
    assert figures["minus"].keys() == {"full", "skip33"}
    plain = figures["minus"]["skip33"]["loss"]
    scaled = figures["minus"]["skip33"]["loss_scaled_at_evaluation"]
    assert plain.keys() == scaled.keys() == {"full", "skip33_ends_full"}
    assert plain["skip33_ends_full"]["mean"] == pytest.approx(-0.05)
    assert scaled["skip33_ends_full"]["mean"] == pytest.approx(0.15)
    assert scaled["full"]["mean"] == pytest.approx(-0.1)
    gains = figures["scaled_minus_plain"]
    assert {arm: own["mean"] for arm, own in gains.items()} == pytest.approx(
        {"skip33": -0.1, "skip33_ends_full": 0.1}
    )


def test_every_difference_that_is_drawn_is_written():
    for control, shown in convergence.PANELS.values():
        assert set(shown) - {control} <= set(convergence.COMPARED[control])
    used = {*convergence.ARMS, *robustness.WHOLE, *robustness.SMALLER, *trade_off.ARMS}
    assert used == SEEDS.keys()


def test_a_seed_without_the_ones_before_it_pairs_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    campaign = Campaign(tmp_path, quick=False)
    there = {"full-0", "full-1", "full-2", "skip33-0", "skip33-2"}
    found = made_up(1.5, 400)
    monkeypatch.setattr(campaign, "summary", lambda run: found if run.name in there else None)
    finished = campaign.finished(runs_of(["full", "skip33"], quick=False))
    assert {arm: len(own) for arm, own in finished.items()} == {"full": 3, "skip33": 1}


# Runs as jobs, and how far chance moves them.


class Started:
    """What would be a process: it has ended well, and a summing up has written what it found."""

    commands: ClassVar[list[list[str]]] = []
    flags: ClassVar[list[str]] = []
    returncode = 0

    def __init__(self, words: list[str], env: dict[str, str], **_: Any):
        command = words[words.index("-m") + 1 :]
        self.commands.append(command)
        self.flags.append(env["XLA_FLAGS"])
        if command[0].endswith("summary"):
            given = dict(itertools.pairwise(command))
            found = replace(made_up(1.5, 400), digest=given["--digest"])
            Path(given["--output"]).write_text(json.dumps(asdict(found)))

    def poll(self) -> int:
        return 0


def test_a_job_is_prepared_trained_and_summed_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(jobs.subprocess, "Popen", Started)
    monkeypatch.setattr(jobs, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(Started, "commands", [])
    monkeypatch.setattr(Started, "flags", [])
    first = ("experiments.paper.first_weights", "CONFIG")
    config = Campaign(tmp_path, quick=True).config(Run("full", 0))
    job = jobs.Job(
        name="one", digest="1", config=config, results=tmp_path, command="", first=first,
        flags="--xla_cpu_max_isa=AVX2",
    )  # fmt: skip
    jobs.train([job], tmp_path)
    names = [command[0] for command in Started.commands]
    assert names == [first[0], "skippipe_jax.train", "experiments.paper.summary"]
    assert all(flags.split()[-1] == job.flags for flags in Started.flags)
    assert jobs.ONE_THREAD["XLA_FLAGS"] in Started.flags[0]
    found = job.summary()
    assert found is not None
    assert found.loss == 1.5
    assert "one: held-out loss 1.5000" in capsys.readouterr().out
    jobs.train([job], tmp_path)
    assert len(Started.commands) == 3
    assert replace(job, digest="2").summary() is None


def test_first_weights_are_those_of_the_run_and_change_by_as_much_as_they_are_told(tmp_path: Path):
    tree = Campaign(tmp_path, quick=True).config(Run("full", 7))
    config = parse_config(tree)
    for name, changed_by, draw in (("as_they_are", 0.0, 1), ("one", 1e-6, 1), ("two", 1e-6, 2)):
        first_weights.write(config, 6, changed_by, draw, tmp_path / name)
    functions = functions_of_stages(6, config.model, config.optimizer, 1, 1)
    drawn = [functions[stage].create(jax.random.key(7), 2 * stage)[0] for stage in range(6)]

    def read(name: str) -> list[np.ndarray]:
        # As a run does that begins from them.
        begun = parse_config(tree | {"init_from": f"hf:{tmp_path / name}"})
        assert begun.model == config.model
        weights = find_weights(begun)
        assert weights is not None
        stages = [weights.read_stage(own, 2 * stage) for stage, own in enumerate(drawn)]
        return jax.tree.leaves(stages)

    as_drawn = jax.tree.leaves(jax.device_get(drawn))
    for own, other in zip(read("as_they_are"), as_drawn, strict=True):
        np.testing.assert_array_equal(own, other)
    one, two, unchanged = (
        np.concatenate([leaf.ravel() for leaf in leaves]).astype(np.float64)
        for leaves in (read("one"), read("two"), as_drawn)
    )
    for changed in (one, two):
        assert np.std(changed / unchanged - 1) == pytest.approx(1e-6, rel=0.05)
    assert np.std(one / two - 1) == pytest.approx(math.sqrt(2) * 1e-6, rel=0.05)


def test_the_study_repeats_the_campaigns_runs(tmp_path: Path):
    study = calm.Study(tmp_path, quick=False, instructions=["AVX2", "SSE4_2"])
    runs = study.jobs()
    assert len(runs) == 5 + 5 + 3 + 2
    assert len({job.name for job in runs}) == len({job.digest for job in runs}) == len(runs)
    control, skipping, former = (study.repetitions(own) for own in calm.REPEATED)
    for arm, repetitions in (("full", control), ("skip33", skipping)):
        run = Run(arm, 0)
        assert repetitions[0].digest == study.campaign.digest(run)
        assert repetitions[0].config == study.campaign.config(run)
        assert not repetitions[0].first
        for job in repetitions[1:]:
            differing = dict(job.config)
            weights = differing.pop("init_from").removeprefix("hf:")
            assert differing == study.campaign.config(run)
            assert weights in job.first
    for job in former:
        model = dict(control[0].config["model"])
        assert job.config["model"] == model | {"initial_deviation": 0.02}
        assert job.config["train"] == control[0].config["train"]
    flags = [job.flags for job in study.on_instructions().values()]
    assert flags == ["--xla_cpu_max_isa=AVX2", "--xla_cpu_max_isa=SSE4_2"]


def test_first_weights_that_are_there_are_not_written_again(tmp_path: Path):
    study = calm.Study(tmp_path, quick=True, instructions=[])
    job = study.repetitions(calm.REPEATED[0])[1]
    Path(job.config["init_from"].removeprefix("hf:")).mkdir(parents=True)
    again = study.repetitions(calm.REPEATED[0])[1]
    assert again.first == ()
    assert again.digest == job.digest


def test_the_spread_of_repetitions():
    campaign = made_up(1.5, 400)
    figures = calm.figures_of(
        {
            "full": [campaign, made_up(1.502, 400), made_up(1.504, 400)],
            "skip33": [made_up(1.6, 400)],
        },
        {"SSE4_2": made_up(1.51, 400), "AVX2": made_up(1.5, 400)},
        {"full": campaign, "skip33": made_up(1.7, 400)},
    )
    own = figures["repetitions"]["full"]
    assert (own["greatest_minus_least"], own["deviation"]) == pytest.approx((0.004, 0.002))
    assert own["curve"]["greatest_minus_least"] == pytest.approx([0.004] * 20)
    assert figures["repetitions"]["skip33"]["deviation"] is None
    assert figures["instructions"]["greatest_minus_least"] == pytest.approx(0.01)
    assert figures["equals_the_campaign"] == {"full": True, "skip33": False}
    text = calm.table(figures)
    assert "1.5000 1.5020 1.5040: 0.0040 from least to greatest, deviation 0.0020" in text
    assert "full with instructions SSE4_2, AVX2" in text
    assert "full unchanged is the campaign's run" in text
    assert "skip33 unchanged is not the campaign's run" in text


def test_instructions_are_those_that_the_processor_has(tmp_path: Path):
    told = tmp_path / "cpuinfo"
    told.write_text("processor : 0\nflags\t\t: fpu sse4_2 avx avx2 avx512\n\nprocessor : 1\n")
    assert calm.available(told) == ["SSE4_2", "AVX2"]
    assert calm.available(tmp_path / "none") == []


def test_the_committed_study_says_that_the_recipe_is_calm(tmp_path: Path):
    committed = json.loads(calm.RESULT.read_text())
    assert committed["digest"] == calm.Study(tmp_path, quick=False).digest()
    repeated = committed["repetitions"]
    assert {name: len(own["loss"]) for name, own in repeated.items()} == {
        own.name: own.times for own in calm.REPEATED
    }
    for own in (repeated["full"], repeated["skip33"], committed["instructions"]):
        losses = [*own["loss"].values()] if isinstance(own["loss"], dict) else own["loss"]
        assert max(losses) - min(losses) == pytest.approx(own["greatest_minus_least"], abs=1e-5)
        assert own["greatest_minus_least"] < 0.01
    assert committed["equals_the_campaign"] == {"full": True, "skip33": True}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", f"experiments.paper.{words[0]}", *words[1:]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_figure_is_made_quickly(tmp_path: Path):
    begun_s = time.monotonic()
    subprocess.run(
        command("reproduce", "--quick", "--folder", str(tmp_path)), cwd=REPOSITORY, check=True
    )
    assert time.monotonic() - begun_s < 15 * 60
    for name in reproduce.MODULES:
        assert json.loads((tmp_path / f"{name}.json").read_text())["commit"]
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_spread_is_printed_quickly(tmp_path: Path):
    arguments = command("calm", "--quick", "--folder", str(tmp_path))
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "deviation" in done.stdout
    figures = json.loads((tmp_path / "calm" / "calm.json").read_text())
    assert all(len(own["loss"]) == 2 for own in figures["repetitions"].values())
    assert figures["instructions"]["loss"].keys() == set(calm.available())


@pytest.mark.slow
def test_a_campaign_that_is_stopped_goes_on(tmp_path: Path):
    arguments = ("reproduce", "--quick", "--folder", str(tmp_path), "--only", "robustness")
    process = subprocess.Popen(command(*arguments), cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    runs = tmp_path / "runs"
    deadline_s = time.monotonic() + 300
    while not any(path.stat().st_size for path in runs.glob("*/metrics.jsonl")):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    assert any(runs.glob("*/checkpoints/*"))
    done = subprocess.run(command(*arguments), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "robustness.json").exists()
    logs = [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert any("stopped by SIGTERM after step" in log for log in logs)


def test_drawing_needs_no_display():
    figure, rows = drawing.panels(2, 3.0, 1.0)
    assert [len(row) for row in rows] == [2, 2]
    assert figure.get_size_inches().tolist() == [drawing.WIDTH, 4.0]
