"""The study of what state in bfloat16 costs in loss: which runs it compares, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.paper.rounded_state import RESULT, Study, figures_of, table


def test_runs_differ_in_how_state_is_held_alone(tmp_path: Path):
    study = Study(tmp_path, quick=False)
    assert [(run.held, run.seed) for run in study.runs] == [
        (held, seed) for held in ("float32", "bfloat16") for seed in range(5)
    ]
    for exact, rounded in zip(study.runs[:5], study.runs[5:], strict=True):
        own, other = study.job(exact).config, study.job(rounded).config
        assert own["train"] == {"steps": 500}
        assert other["model"] == own["model"] | {"parameter_dtype": "bfloat16"}
        assert other["optimizer"] == own["optimizer"] | {"moment_dtype": "bfloat16"}
        rest = {"model": None, "optimizer": None}
        assert {**own, **rest} == {**other, **rest}
        assert study.job(exact).digest != study.job(rounded).digest


def test_differences_are_paired_by_seed():
    figures = figures_of({"float32": [1.0, 2.0, 3.0], "bfloat16": [1.0, 2.1, 2.9]})
    found = figures["difference"]["bfloat16"]
    assert found["mean"] == pytest.approx(0.0, abs=1e-5)
    # Three seeds with a deviation of 0.1: 4.303 standard errors to each side.
    assert found["high"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert "bfloat16 +0.0000 +0.1000 -0.1000: +0.0000" in table(figures)


def test_the_committed_study_is_of_these_runs(tmp_path: Path):
    committed = json.loads(RESULT.read_text())
    study = Study(tmp_path, quick=False)
    assert committed["digest"] == study.digest()
    for held, losses in committed["loss"].items():
        found = [study.job(run).summary() for run in study.runs if run.held == held]
        assert losses == [own and own.loss for own in found]
    assert abs(committed["difference"]["bfloat16"]["mean"]) < 0.01
    assert committed.items() >= figures_of(committed["loss"]).items()
