"""Perplexities of arms, from made-up scores: losses against plain NumPy, means, table, picture."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config.data import FOR_PRIORS, FOR_SCORES
from skippipe_jax.experts import evaluation, work
from skippipe_jax.experts.evaluation import CACHED, OWN, WAYS, results_of, scored_models
from skippipe_jax.experts.members import Arm, Member, MemberFactory
from skippipe_jax.experts.picture import picture
from skippipe_jax.experts.tasks import DONE, TrainingTask, Workspace, data_of
from skippipe_jax.inference.scores import Scores
from skippipe_jax.models.flops import iteration_flops
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.planning import make_plans
from tests.experts.examples import CONFIG, place_in
from tests.harness import ensemble_by_hand as by_hand

DECAY = 0.3
ROWS, LENGTH = {FOR_PRIORS: 5, FOR_SCORES: 4}, 12
ARMS = {
    "equal": {"size": "S", "steps": 4},
    "sizes": {"size": {"easy": "S", "hard": "L"}, "steps": 4},
    "dense": {"kind": "dense", "size": "S", "steps": 12},
    "mean": {"kind": "averaged", "of": "equal"},
}


def made_up(domain: str, part: str, who: str, text: int = 0) -> Scores:
    """Scores of a part of a domain, whose text everyone has; likely ones where names are alike."""
    of_text = np.random.default_rng([*f"{domain} {part}".encode(), text])
    counted = of_text.random((ROWS[part], LENGTH)) < 0.9
    resets = of_text.random((ROWS[part], LENGTH)) < 0.15
    resets[:, 0] = counted[:, 0] = True
    of_model = np.random.default_rng([*f"{domain} {part} {who}".encode(), text])
    log_p = -of_model.gamma(2.0, 3.0, counted.shape) * (0.5 if domain in who else 1)
    log_p = np.where(counted, log_p, 0).astype(np.float32)
    return Scores(log_p, counted, resets, f"{domain} {part} {text}", "bytes", domain, part)


def write_scores(place: Workspace, arms: list[Arm]) -> None:
    for arm in arms:
        for model in scored_models(place, arm).values():
            model.scoring()
            for domain in place.config.names:
                for part in (FOR_PRIORS, FOR_SCORES):
                    own = made_up(domain, part, model.name)
                    own.save(model.folder / f"{domain}-{part}.npz")
            (model.folder / DONE).write_text(json.dumps({"digest": model.digest}))


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    return place_in(tmp_path, arms=ARMS, evaluation={"decay": DECAY})


@pytest.fixture
def arms(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> list[Arm]:
    """All arms, whose models have scores; an iteration takes 100 operations, of size L 120."""
    monkeypatch.setattr(
        evaluation,
        "_own_flops",
        lambda _, own: own.steps * (120.0 if own.size == "L" else 100.0),
    )
    found = MemberFactory(place.config).arms()
    write_scores(place, found)
    return found


def loss_by_hand(place: Workspace, arm: Arm, domain: str, way: str) -> float:
    """In plain NumPy from the files: experts in the order of the arm."""
    each = {
        part: [model.scores(domain, part) for model in scored_models(place, arm).values()]
        for part in (FOR_PRIORS, FOR_SCORES)
    }
    log_p = {
        part: np.stack([one.log_probabilities for one in own]).astype(np.float64)
        for part, own in each.items()
    }
    counted, resets = each[FOR_SCORES][0].counted, each[FOR_SCORES][0].resets
    if len(arm.members) == 1 or arm.averages:
        return -log_p[FOR_SCORES][0][counted].mean()
    if way == OWN:
        return -log_p[FOR_SCORES][list(arm.members).index(domain)][counted].mean()
    experts = len(arm.members)
    if WAYS[way]["prior"] == "cached":
        after = by_hand.priors_of(log_p[FOR_PRIORS], each[FOR_PRIORS][0].resets, DECAY)[-1]
        priors = np.tile(after, (ROWS[FOR_SCORES], 1))
    elif WAYS[way]["prior"] == "decay":
        priors = by_hand.priors_of(log_p[FOR_SCORES], resets, DECAY)
    else:
        priors = np.full((ROWS[FOR_SCORES], experts), 1 / experts)
    mixed = by_hand.mixed(log_p[FOR_SCORES], resets, priors, WAYS[way]["how"])
    return -mixed[counted].mean()


def test_results_have_perplexities_their_means_and_what_they_cost(
    place: Workspace, arms: list[Arm]
):
    results = results_of(place, arms)
    assert list(results) == list(ARMS)
    for arm in arms:
        own = results[arm.name]
        ways = {CACHED: own, **own["ways"]}
        is_single = arm.name in ("dense", "mean")
        assert set(ways) == ({CACHED} if is_single else {*WAYS, OWN})
        for way, found in ways.items():
            expected = {
                domain: math.exp(loss_by_hand(place, arm, domain, way)) for domain in found["loss"]
            }
            assert found["domains"] == pytest.approx(expected, abs=6e-5)
            inside = np.mean([expected[name] for name in ("prose", "code", "tables")])
            assert found["inside"] == pytest.approx(inside, abs=6e-5)
            if way == OWN:
                assert set(expected) == {"prose", "code", "tables"}
                assert found["outside"] is found["mean"] is None
            else:
                assert found["outside"] == pytest.approx(expected["letters"], abs=6e-5)
                assert found["mean"] == pytest.approx(np.mean([*expected.values()]), abs=6e-5)
    equal, sizes, dense, mean = results.values()
    # Twelve iterations, and two of each seed.
    assert equal["training_flops"] == dense["training_flops"] == mean["training_flops"] == 1200
    assert sizes["training_flops"] == 8 * 100 + 4 * 120
    assert equal["training_flops_with_seeds"] == 1400
    assert sizes["training_flops_with_seeds"] == 10 * 100 + 6 * 120
    assert [own["models_asked"] for own in results.values()] == [3, 3, 1, 1]
    assert equal["ways"]
    assert not dense["ways"]
    assert not mean["ways"]
    members = equal["members"]
    assert members["code"]["begins_with"] == arms[0].members["prose"].name
    assert sizes["members"]["tables"] | {"begins_with": ""} == {
        "size": "L", "steps": 4, "begins_with": "",
    }  # fmt: skip


def test_training_takes_the_operations_of_the_plans_that_its_recipe_asks_for(tmp_path: Path):
    """Of five iterations two visit both stages."""
    run = CONFIG["run"] | {"recipe": {"full_every": 2}}
    run["plan"] = {"method": "balanced", "case": run["plan"]["case"] | {"path_length": 1}}
    place = place_in(tmp_path, run=run, seeds={"steps": 5})
    seed = MemberFactory(place.config).seed("S")
    assert isinstance(seed, Member)
    config = seed.config()
    schedule = make_plans(config, tmp_path, None)
    RunDir(place.run_dir(seed)).create(config, schedule)
    each = {
        name: iteration_flops(config.model, plan, 2, 16) for name, plan in schedule.plans.items()
    }
    assert each["full"] > each["plan"]
    expected = 3 * each["plan"] + 2 * each["full"]
    assert evaluation.training_flops(place, [seed]) == expected


def test_a_mean_of_parameters_is_scored_as_a_model_of_its_own(place: Workspace, arms: list[Arm]):
    [averaged] = work.averagings(place, arms)
    assert averaged.is_done()
    experts = {TrainingTask(place, own).name for own in arms[0].members.values()}
    assert set(averaged.needs) == experts
    assert averaged.name not in experts
    # What it needs is among the tasks that it is run with.
    names = {task.name for task in work.trainings(place, arms)}
    assert experts <= names
    asked = json.loads((averaged.folder / "asked.json").read_text())
    assert asked["runs"] == [str(place.run_dir(own)) for own in arms[0].members.values()]


def test_the_mean_of_one_run_is_that_run(tmp_path: Path):
    one = {"equal": ARMS["equal"], "mean": ARMS["mean"]}
    outside = ["code", "tables", "letters"]
    place = place_in(tmp_path, arms=one, outside=outside, lanes={"easy": ["prose"]})
    equal, mean = MemberFactory(place.config).arms()
    assert work.averagings(place, [equal, mean]) == []
    [scored] = scored_models(place, mean).values()
    assert scored == scored_models(place, equal)["prose"]
    assert scored.name in {task.name for task in work.trainings(place, [mean])}


def test_what_is_asked_names_every_domain_and_part(place: Workspace, arms: list[Arm]):
    asked = place.asked()
    names = place.config.names
    assert [tuple(part[:2]) for part in asked["parts"]] == [
        (name, part) for name in names for part in (FOR_PRIORS, FOR_SCORES)
    ]
    member = arms[0].members["prose"]
    data = data_of(member.config().data, asked)
    assert data.domains() == names
    assert data.mixture == place.config.domains
    assert data.held_out == member.config().data.held_out
    assert place.asked("code")["parts"] == [["code", FOR_PRIORS, 100]]


def test_scores_that_are_asked_anew_are_none_until_all_are_there(place: Workspace, arms: list[Arm]):
    [model, *_] = scored_models(place, arms[0]).values()
    assert model.is_done()
    config = replace(place.config, evaluation=replace(place.config.evaluation, sequences=7))
    other = scored_models(Workspace(config, place.folder), arms[0])["prose"]
    assert other.folder == model.folder
    assert not other.is_done()
    other.scoring()  # It is killed then, and the former is asked again.
    assert not model.is_done()


def test_models_that_have_scored_different_texts_are_not_compared(
    place: Workspace, arms: list[Arm]
):
    for who in ("equal", "dense"):
        write_scores(place, arms)
        [arm] = [own for own in arms if own.name == who]
        model = next(iter(scored_models(place, arm).values()))
        made_up("code", FOR_SCORES, model.name, 1).save(model.folder / f"code-{FOR_SCORES}.npz")
        with pytest.raises(InputError, match="another text"):
            results_of(place, arms)


def cells(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell.strip()]


def test_the_table_marks_the_least_of_each_line(place: Workspace, arms: list[Arm]):
    results = results_of(place, arms)
    told = evaluation.table(place.config, results)
    first, ways = told.split("\n\n")
    header, *lines = first.splitlines()
    assert header.split() == ["perplexity", *ARMS]
    by_name = {cells(line)[0].strip(): [c.strip() for c in cells(line)[1:]] for line in lines}
    for name, figures in {
        "prose": [own["domains"]["prose"] for own in results.values()],
        "letters (outside)": [own["domains"]["letters"] for own in results.values()],
        "mean, inside": [own["inside"] for own in results.values()],
        "mean, outside": [own["outside"] for own in results.values()],
        "mean": [own["mean"] for own in results.values()],
    }.items():
        assert by_name[name] == [f"{own:.3f}" + "*" * (own == min(figures)) for own in figures]
    assert by_name["training compute"] == ["1.000", "1.067", "1.000", "1.000"]
    assert by_name["training compute with seeds"] == ["1.000", "1.229", "1.000", "1.000"]
    assert by_name["models evaluated"] == ["3", "3", "1", "1"]
    columns, *ways_lines = ways.splitlines()[1:]
    assert columns.split() == ["equal", "sizes"]
    assert len(ways_lines) == len(WAYS) + 1
    assert ways_lines[0].startswith(CACHED)
    assert ways_lines[-1].rstrip().endswith("/ -")
    # One that has nothing to mix has no second part.
    dense = {"dense": results["dense"]}
    assert "means by mixing" not in evaluation.table(place.config, dense)


def test_the_picture_has_a_dot_for_each_arm_and_domain(place: Workspace, arms: list[Arm]):
    results = results_of(place, arms)
    config = place.config
    for inside, outside, lines in (
        (config.inside, config.outside, 4 + 2),
        (("prose", "tables"), (), 2 + 1),
    ):
        drawn = ElementTree.fromstring(picture(inside, outside, results))
        circles = [one for one in drawn.iter() if one.tag.endswith("circle")]
        tips = [one[0].text or "" for one in circles if len(one)]
        assert len(circles) == len(tips) + len(ARMS)
        assert len(tips) == lines * len(ARMS)
        for name, own in results.items():
            for domain in inside:
                assert f"{domain}, {name}: {own['domains'][domain]:.3f}" in tips
            assert f"mean, inside, {name}: {own['inside']:.3f}" in tips
        width = float(drawn.get("viewBox", "").split()[2])
        places = [float(one.get("cx", "")) for one in circles]
        assert min(places) > 0
        assert max(places) < width
    # Those of the first arm stand on the dashed line, better ones to its left.
    line = next(one for one in drawn.iter() if one.get("class") == "first")
    for one in circles:
        if len(one) and ", equal: " in (one[0].text or ""):
            assert float(one.get("cx", "")) == pytest.approx(float(line.get("x1", "")), abs=0.1)
