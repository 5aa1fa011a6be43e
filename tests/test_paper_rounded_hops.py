"""The study of what 8 bits on the wire cost in loss: which runs it compares, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.paper.rounded_hops import RESULT, Study, figures_of, table


def test_runs_differ_from_the_campaigns_in_how_hops_travel_alone(tmp_path: Path):
    study = Study(tmp_path, quick=False)
    assert {run.arm for run in study.runs} == {"full", "skip33"}
    assert {run.seed for run in study.runs} == set(range(5))
    for run in study.runs:
        rounded, own = study.job(run).config, study.campaign.config(run)
        assert rounded["network"] == own["network"] | {"activation_dtype": "int8"}
        assert {**rounded, "network": None} == {**own, "network": None}
        assert study.job(run).digest != study.campaign.digest(run)


def test_differences_are_paired_by_seed():
    control = {"full": [1.0, 2.0, 3.0], "skip33": [2.0, 2.0, 2.0]}
    rounded = {"full": [1.1, 2.1, 3.1], "skip33": [2.0, 2.1, 1.9]}
    figures = figures_of(rounded, control)
    full, skipping = (figures["difference"][arm] for arm in ("full", "skip33"))
    assert full["mean"] == pytest.approx(0.1)
    assert full["high"] - full["low"] == pytest.approx(0.0, abs=1e-4)
    assert skipping["mean"] == pytest.approx(0.0, abs=1e-5)
    # Three seeds with a deviation of 0.1: 4.303 standard errors to each side.
    assert skipping["high"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    text = table(figures)
    assert "full     +0.1000 +0.1000 +0.1000: +0.1000" in text


def test_the_committed_study_is_of_these_runs(tmp_path: Path):
    committed = json.loads(RESULT.read_text())
    study = Study(tmp_path, quick=False)
    assert committed["digest"] == study.digest()
    losses = committed["loss"]
    for arm in ("full", "skip33"):
        runs = [run for run in study.runs if run.arm == arm]
        own = [study.campaign.summary(run) for run in runs]
        assert losses["float32"][arm] == [summary and summary.loss for summary in own]
        assert len(losses["int8"][arm]) == 5
        assert abs(committed["difference"][arm]["mean"]) < 0.01
    assert committed.items() >= figures_of(losses["int8"], losses["float32"]).items()
