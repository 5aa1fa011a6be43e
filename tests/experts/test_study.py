"""The study of experts and the benchmarks beside it: what they compare, and what they say."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from experiments.benchmarks import side_by_side
from experiments.experts import study
from skippipe_jax.experts.config import load_experts

INSIDE, OUTSIDE = ("tables", "code"), ("manual",)


def made_up(seed: int, lower: dict[str, float]) -> dict[str, Any]:
    """Results of a seed: losses of an arm are 1 + 0.1 seed, and less by what `lower` says."""
    arms = {}
    for arm in load_experts(study.CONFIG).arms:
        loss = {name: 1 + 0.1 * seed - lower.get(arm, 0.0) for name in (*INSIDE, *OUTSIDE)}
        way = {"loss": loss}
        arms[arm] = {
            "loss": loss,
            "members": {name: {} for name in INSIDE},
            "lanes": {"easy": list(INSIDE)},
            "ways": {study.MAIN: way} | {own[3]: way for own in study.COMPARED.values()},
            "training_flops": 1.0,
            "training_flops_with_seeds": 2.0,
            **dict.fromkeys(study.MEANS, math.exp(1.0)),
        }
    return {"seed": seed, "difficulty": {}, "arms": arms}


def test_what_is_compared_is_paired_by_seed_and_inside_and_outside_are_apart():
    results = [made_up(seed, {"heterogeneous_steps": 0.01 * (1 + seed)}) for seed in range(3)]
    figures = study.figures_of(results)
    for where, domains in (("inside", INSIDE), ("outside", OUTSIDE)):
        found = figures["compared"][where]["heterogeneous steps minus homogeneous"]
        assert found["by_seed"] == [-0.01, -0.02, -0.03]
        assert found["mean"] == pytest.approx(-0.02)
        # Three seeds with a deviation of 0.01: 4.303 standard errors to each side.
        assert found["high"] + 0.02 == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
        assert found["domains_better"] == found["domains"] == len(domains)
        assert figures["compared"][where]["measured minus random lanes, sizes"]["mean"] == 0
        assert set(figures["best"][where].values()) == {"heterogeneous_steps"}
    only_inside = "homogeneous minus each domain's own expert"
    assert only_inside in figures["compared"]["inside"]
    assert only_inside not in figures["compared"]["outside"]
    told = study.table(figures)
    assert "lowest of the three arms: heterogeneous_steps in 3 of 3 domains" in told


def test_the_committed_study_is_of_this_configuration():
    committed = json.loads(study.RESULT.read_text())
    assert committed["digest"] == study.digest()
    assert committed["seeds"] == list(study.SEEDS)
    assert study.table(committed).count("\n") > len(study.COMPARED)


def test_how_far_apart_lanes_end_is_a_share_of_the_first():
    lanes = {
        name: {"nodes": 1, "steps": 1, "planned_s": 10.0, "measured_s": end}
        for name, end in (("a", 10.0), ("b", 10.8))
    }
    figures = side_by_side.figures_of(lanes)
    assert figures["apart"] == pytest.approx(0.08)
    assert "the last lane ends 8.0% after the first" in side_by_side.table(figures)
