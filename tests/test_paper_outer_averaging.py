"""The study of what averaging behind the iterations costs in loss: its runs, and what it says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from experiments.paper import plans
from experiments.paper.campaign import RESULTS as CAMPAIGN
from experiments.paper.campaign import Run
from experiments.paper.jobs import Job
from experiments.paper.outer_averaging import (
    EXACT,
    PLANNED_EVERY,
    SEEDS,
    TRIED,
    OuterRun,
    Setting,
    Study,
    clock_s,
    iteration_s,
    table,
)
from experiments.paper.summary import Summary
from skippipe_jax.config import parse_config

BEST, PLANNED = Setting(2, 0, 1.0, 0.5), Setting(20, 99, 1.0, 0.0)


def test_runs_differ_from_the_campaigns_in_how_replicas_average_alone(tmp_path: Path):
    study = _study(tmp_path)
    equal_data = [run for run in study.runs() if not run.equal_time]
    assert {(run.setting, run.arm, run.seed) for run in equal_data} == {
        (setting, arm, seed)
        for setting in (BEST, PLANNED)
        for arm in ("full", "skip33")
        for seed in range(5)
    }
    for run in equal_data:
        config = study.config(run)
        averaging = parse_config(config | {"run_dir": "run"}).averaging
        assert averaging.is_outer
        del config["averaging"]
        assert config == study.campaign.config(run.exact)
    digests = [study.job(run).digest for run in study.runs()]
    assert len(set(digests)) == len(digests)


def test_runs_of_equal_time_take_as_long_as_the_control(tmp_path: Path):
    study = _study(tmp_path)
    limit_s = 300 * iteration_s("full")
    equal_time = [run for run in study.runs() if run.equal_time]
    assert {run.setting for run in equal_time} == {BEST}
    for run in equal_time:
        config = study.config(run)
        averaging, steps = config["averaging"], config["train"]["steps"]
        cycle_s = averaging["every"] * iteration_s(run.arm, averaging["every"])
        assert limit_s - cycle_s < clock_s(run.arm, averaging, steps) <= limit_s
        # The last fragment is applied as the run ends.
        own = parse_config(config | {"run_dir": "run"}).averaging
        assert own.fragment_sent_after(steps - own.delay) == 1


def test_the_clock_is_the_planners():
    for arm in ("full", "skip33"):
        exact, outer = iteration_s(arm), iteration_s(arm, 20)
        predicted = plans.plan_of(arm).predicted
        assert exact == pytest.approx(predicted.iteration_s)
        # Nobody waits for averaging, and iterations may overlap besides.
        assert predicted.pipeline_s / 1.1 < outer <= predicted.pipeline_s + 1e-6
        section = {"every": 20, "exact_steps": 30}
        assert clock_s(arm, section, 100) == pytest.approx(30 * exact + 70 * outer)
        assert clock_s(arm, section, 20) == pytest.approx(20 * exact)


def test_settings_are_tried_on_text_that_no_reported_run_reads(tmp_path: Path):
    study = Study(tmp_path, quick=False)
    trials = study.trials.jobs()
    assert set(trials) == {EXACT, *(setting.name for setting in TRIED)}
    for name, job in trials.items():
        config = parse_config({**job.config, "run_dir": "run"})
        assert config.averaging.is_outer == (name != EXACT)
        # The campaign's source leaves this folder out.
        assert config.data.source == "text"
        assert config.data.path is not None
        assert Path(config.data.path).parent.name == "test"
        assert config.seed not in range(SEEDS)


def test_the_best_is_chosen_and_the_best_with_the_planners_cycle(tmp_path: Path):
    study = _study(tmp_path)
    assert study.trials.chosen() == (BEST, PLANNED)
    minus_exact = study.trials.figures()["minus_exact"]
    assert minus_exact[BEST.name] == pytest.approx(0.01)
    assert minus_exact[PLANNED.name] == pytest.approx(0.02)
    other = next(own for own in TRIED if own.every == PLANNED_EVERY and own != PLANNED)
    _write(study.trials.jobs()[other.name], 1.75)
    assert study.trials.chosen() == (other,)
    assert {run.setting for run in study.runs()} == {other}
    assert Study(tmp_path / "nothing", quick=True).runs() == []


def test_few_iterations_have_outer_ones_too():
    section = Setting(20, 99, 1.0, 0.0).section(25)
    assert section["exact_steps"] == 12
    assert section["exact_steps"] + 2 * section["every"] <= 25


def test_differences_are_paired_by_seed_as_far_as_runs_are_there(tmp_path: Path):
    study = _study(tmp_path)
    setting = PLANNED
    missing = OuterRun(setting, "full", 2, equal_time=False)
    for run in study.runs():
        if run.setting == setting and run != missing:
            more = 0.01 if run.arm == "full" else 0.02
            _write(study.job(run), _loss_of_campaign(study, run) + more)
    figures = study.figures()
    full, skipping = (figures["equal_data"][setting.name][arm] for arm in ("full", "skip33"))
    assert len(full["loss"]["outer"]) == 2
    assert full["minus_exact"]["mean"] == pytest.approx(0.01)
    assert skipping["minus_exact"]["seeds"] == 5
    assert skipping["minus_exact"]["low"] == pytest.approx(0.02)
    assert missing.name in figures["not_trained"]
    text = table(figures)
    assert f"{setting.name} full     300 iterations: +0.0100 +0.0100; minus exact +0.0100" in text
    assert f"{len(figures['not_trained'])} runs have not been trained" in text


def test_at_equal_time_arms_are_compared_with_the_control_too(tmp_path: Path):
    study = _study(tmp_path)
    run = OuterRun(BEST, "skip33", 0, equal_time=True)
    _write(study.job(run), 1.5)
    own = study.figures()["equal_time"][run.setting.name]["skip33"]
    control = study.campaign.summary(Run("full", 0))
    assert control is not None
    assert own["minus_full_exact"]["mean"] == pytest.approx(1.5 - control.loss)
    assert own["minus_exact"]["mean"] == pytest.approx(1.5 - _loss_of_campaign(study, run))


def test_a_run_that_the_campaign_lacks_is_named(tmp_path: Path):
    study = _study(tmp_path)
    study.campaign.results = tmp_path
    _write(study.job(study.runs()[0]), 1.5)
    with pytest.raises(InputError, match="has not been trained by the campaign"):
        study.figures()


def test_the_committed_study_is_of_these_runs(tmp_path: Path):
    study = Study(tmp_path, quick=False)
    committed = json.loads(study.result.read_text())
    assert committed["digest"] == study.digest()
    assert committed.items() >= json.loads(json.dumps(study.figures())).items()


def _loss_of_campaign(study: Study, run: OuterRun) -> float:
    summary = study.campaign.summary(run.exact)
    assert summary is not None
    return summary.loss


def _study(folder: Path) -> Study:
    """A study of which two settings have been tried."""
    study = Study(folder, quick=False)
    study.summaries = study.trials.results = folder
    jobs = study.trials.jobs()
    for name, loss in ((EXACT, 1.8), (BEST.name, 1.81), (PLANNED.name, 1.82)):
        _write(jobs[name], loss)
    return study


def _write(job: Job, loss: float) -> None:
    """Leave a summary as if this run had been trained, and ended with this loss."""
    other = Summary(**json.loads((CAMPAIGN / "full-0.json").read_text()))
    summary = replace(other, digest=job.digest, loss=loss, curve=[[300, 0.0, loss]])
    job.output.write_text(json.dumps(asdict(summary)))
