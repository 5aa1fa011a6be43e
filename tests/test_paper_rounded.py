"""What 8 bits on the wire, and state in bfloat16, cost in loss: which runs are compared."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.paper import rounded_hops, rounded_state


def test_runs_differ_from_the_campaigns_in_how_hops_travel_alone(tmp_path: Path):
    study = rounded_hops.Study(tmp_path)
    assert {run.arm for run in study.runs} == {"full", "skip33"}
    assert {run.seed for run in study.runs} == set(range(5))
    for run in study.runs:
        rounded, own = study.job(run).config, study.campaign.config(run)
        assert rounded["network"] == own["network"] | {"activation_dtype": "int8"}
        assert {**rounded, "network": None} == {**own, "network": None}
        assert study.job(run).digest != study.campaign.digest(run)


def test_runs_differ_in_how_state_is_held_alone(tmp_path: Path):
    study = rounded_state.Study(tmp_path)
    jobs = study.tasks()
    assert [job.name for job in jobs] == [
        f"{held}-{seed}" for held in ("float32", "bfloat16") for seed in range(5)
    ]
    for exact, rounded in zip(jobs[:5], jobs[5:], strict=True):
        own, other = exact.config, rounded.config
        assert own["train"] == {"steps": 500}
        assert other["model"] == own["model"] | {"parameter_dtype": "bfloat16"}
        assert other["optimizer"] == own["optimizer"] | {"moment_dtype": "bfloat16"}
        rest = {"model": None, "optimizer": None}
        assert {**own, **rest} == {**other, **rest}
        assert exact.digest != rounded.digest


def test_the_committed_studies_are_of_these_runs(tmp_path: Path):
    hops, state = (own.Study(tmp_path) for own in (rounded_hops, rounded_state))
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
    assert of_state.items() >= state.figures().items()
    assert "full     +0.0007 +0.0001 +0.0013" in rounded_hops.table(of_hops)
    assert "-0.0032 (-0.0175 to +0.0112)" in rounded_state.table(of_state)
