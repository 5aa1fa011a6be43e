"""What 8 bits on the wire, and state in bfloat16, cost in loss: which runs are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.paper import rounded_hops, rounded_state


def test_runs_differ_from_the_campaigns_in_how_hops_travel_alone(tmp_path: Path):
    study = rounded_hops.Study(tmp_path, quick=False)
    assert {run.arm for run in study.runs} == {"full", "skip33"}
    assert {run.seed for run in study.runs} == set(range(5))
    for run in study.runs:
        rounded, own = study.job(run).config, study.campaign.config(run)
        assert rounded["network"] == own["network"] | {"activation_dtype": "int8"}
        assert {**rounded, "network": None} == {**own, "network": None}
        assert study.job(run).digest != study.campaign.digest(run)


def test_runs_differ_in_how_state_is_held_alone(tmp_path: Path):
    study = rounded_state.Study(tmp_path, quick=False)
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
    control = {"full": [1.0, 2.0, 3.0], "skip33": [2.0, 2.0, 2.0]}
    rounded = {"full": [1.1, 2.1, 3.1], "skip33": [2.0, 2.1, 1.9]}
    hops = rounded_hops.figures_of(rounded, control)
    state = rounded_state.figures_of({"float32": control["full"], "bfloat16": [1.0, 2.1, 2.9]})
    full = hops["difference"]["full"]
    assert full["mean"] == pytest.approx(0.1)
    assert full["high"] - full["low"] == pytest.approx(0.0, abs=1e-4)
    for found in (hops["difference"]["skip33"], state["difference"]["bfloat16"]):
        assert found["mean"] == pytest.approx(0.0, abs=1e-5)
        # Three seeds with a deviation of 0.1: 4.303 standard errors to each side.
        assert found["high"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert "full     +0.1000 +0.1000 +0.1000: +0.1000" in rounded_hops.table(hops)
    assert "bfloat16 +0.0000 +0.1000 -0.1000: +0.0000" in rounded_state.table(state)


def test_the_committed_studies_are_of_these_runs(tmp_path: Path):
    hops, state = (own.Study(tmp_path, quick=False) for own in (rounded_hops, rounded_state))
    of_hops, of_state = (json.loads(study.result.read_text()) for study in (hops, state))
    for study, committed in ((hops, of_hops), (state, of_state)):
        assert committed["digest"] == study.digest()
        assert all(abs(found["mean"]) < 0.01 for found in committed["difference"].values())
    losses = of_hops["loss"]
    for arm in ("full", "skip33"):
        own = [hops.campaign.trained(run).loss for run in hops.runs if run.arm == arm]
        assert losses["float32"][arm] == own
        assert len(losses["int8"][arm]) == 5
    assert of_hops.items() >= rounded_hops.figures_of(losses["int8"], losses["float32"]).items()
    for held, own in of_state["loss"].items():
        assert own == [state.job(run).trained().loss for run in state.runs if run.held == held]
    assert of_state.items() >= rounded_state.figures_of(of_state["loss"]).items()
