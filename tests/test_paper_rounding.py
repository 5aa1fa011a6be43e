"""The studies of what 8 bits on the wire, and state in bfloat16, cost in loss."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.paper import rounded_hops, rounded_state


def test_rounded_hops_differ_from_the_campaigns_runs_in_how_hops_travel_alone(tmp_path: Path):
    study = rounded_hops.Study(tmp_path, quick=False)
    assert {run.arm for run in study.runs} == {"full", "skip33"}
    assert {run.seed for run in study.runs} == set(range(5))
    for run in study.runs:
        rounded, own = study.job(run).config, study.campaign.config(run)
        assert rounded["network"] == own["network"] | {"activation_dtype": "int8"}
        assert {**rounded, "network": None} == {**own, "network": None}
        assert study.job(run).digest != study.campaign.digest(run)


def test_runs_of_rounded_state_differ_in_how_state_is_held_alone(tmp_path: Path):
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


def test_the_committed_study_of_rounded_hops_is_of_these_runs(tmp_path: Path):
    study = rounded_hops.Study(tmp_path, quick=False)
    committed = json.loads(study.result.read_text())
    assert committed["digest"] == study.digest()
    losses, text = committed["loss"], rounded_hops.table(committed)
    for arm in rounded_hops.ARMS:
        runs = [run for run in study.runs if run.arm == arm]
        own = [study.campaign.summary(run) for run in runs]
        assert losses["float32"][arm] == [summary and summary.loss for summary in own]
        assert len(losses["int8"][arm]) == 5
        mean = sum(losses["int8"][arm]) / 5 - sum(losses["float32"][arm]) / 5
        assert f"{arm:8s}" in text
        assert f": {mean:+.4f} " in text
        assert abs(mean) < 0.01
    again = rounded_hops.figures_of(losses["int8"], losses["float32"])
    assert committed.items() >= again.items()


def test_the_committed_study_of_rounded_state_is_of_these_runs(tmp_path: Path):
    study = rounded_state.Study(tmp_path, quick=False)
    committed = json.loads(study.result.read_text())
    assert committed["digest"] == study.digest()
    for held, losses in committed["loss"].items():
        found = [study.job(run).summary() for run in study.runs if run.held == held]
        assert losses == [own and own.loss for own in found]
    mean = sum(committed["loss"]["bfloat16"]) / 5 - sum(committed["loss"]["float32"]) / 5
    assert f": {mean:+.4f} " in rounded_state.table(committed)
    assert abs(mean) < 0.01
    assert committed.items() >= rounded_state.figures_of(committed["loss"]).items()
