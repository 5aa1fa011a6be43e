"""The study of what averaging behind the iterations costs in loss: its runs, and what it says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from experiments.paper import plans
from experiments.paper.outer_averaging import (
    EXACT,
    SEEDS,
    TRIED,
    Study,
    clock_s,
    iteration_s,
    table,
)
from skippipe_jax.config import parse_config


def test_runs_differ_from_the_campaigns_in_how_replicas_average_alone(tmp_path: Path):
    study = Study(tmp_path)
    runs = study.runs()
    assert {(run.arm, run.seed, run.equal_time) for run in runs} == {
        *itertools.product(("full", "skip33"), range(SEEDS), (False, True))
    }
    for run in runs:
        config = study.config(run)
        averaging = parse_config(config | {"run_dir": "run"}).averaging
        assert averaging.is_outer
        if run.equal_time:
            # The last fragment is applied as the run ends.
            assert averaging.fragment_sent_after(config["train"]["steps"] - averaging.delay) == 1
        else:
            assert {**config, "averaging": None} == {
                **study.campaign.config(run.exact),
                "averaging": None,
            }
    assert len({study.job(run).digest for run in runs}) == len(runs)


def test_runs_of_equal_time_take_as_long_as_the_control(tmp_path: Path):
    study = Study(tmp_path)
    limit_s = 300 * iteration_s("full")
    for run in study.runs():
        if run.equal_time:
            config = study.config(run)
            averaging, steps = config["averaging"], config["train"]["steps"]
            cycle_s = averaging["every"] * iteration_s(run.arm, averaging["every"])
            assert limit_s - cycle_s < clock_s(run.arm, averaging, steps) <= limit_s


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
    study = Study(tmp_path)
    trials = study.trials()
    assert set(trials) == {EXACT, *(setting.name for setting in TRIED)}
    for name, job in trials.items():
        config = parse_config({**job.config, "run_dir": "run"})
        assert config.averaging.is_outer == (name != EXACT)
        # The campaign's source leaves this folder out.
        assert config.data.source == "text"
        assert config.data.path is not None
        assert Path(config.data.path).parent.name == "test"
        assert config.seed not in range(SEEDS)


def test_the_committed_study_is_of_these_runs(tmp_path: Path):
    """And its setting is the one with the lowest loss; three runs of equal time are missing."""
    study = Study(tmp_path)
    committed = json.loads(study.result.read_text())
    assert committed["digest"] == study.digest()
    assert committed.items() >= json.loads(json.dumps(study.figures())).items()
    text = table(committed)
    assert "every20-exact150-1-0.7 full     300 iterations: +0.0094 +0.0104 +0.0093" in text
    assert "-0.0323; minus exact -0.0295 (-0.0356 to -0.0233), minus full exact -0.1056" in text
    assert text.endswith("3 runs have not been trained")
    study.campaign.results = tmp_path
    with pytest.raises(InputError, match="has not been trained by the campaign"):
        study.figures()


def test_no_run_is_named_before_a_setting_has_been_tried(tmp_path: Path):
    study = Study(tmp_path)
    study.summaries = tmp_path
    assert study.runs() == []
