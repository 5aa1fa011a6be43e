"""The benchmarks run, and what they print adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import gpu, overhead
from skippipe_jax.model import PRESETS, ModelConfig, parameter_count, stage_shapes

REPOSITORY = Path(__file__).parents[1]


def benchmark(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON in the last line that a benchmark prints."""
    finished = subprocess.run(
        [sys.executable, "-m", f"experiments.benchmarks.{name}", *arguments],
        cwd=REPOSITORY,
        env=os.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(finished.stdout.splitlines()[-1])


def test_all_programs_train_alike():
    model = ModelConfig(
        vocabulary_size=11, width=8, layers=4, heads=2, kv_heads=1, ffn_width=12,
        recompute="stage",
    )  # fmt: skip
    workload = overhead.Workload(model, 2, 2, 2, 3, 8)

    seconds = overhead.time_in_turns(workload, warmup=2, turns=1)

    assert set(seconds) == set(overhead.PROGRAMS)
    assert all(len(own) == 1 for own in seconds.values())


def test_overhead(tmp_path: Path):
    file = tmp_path / "overhead.json"
    sizes = "--stages 2 --replicas 1 --microbatches-per-data-node 2 --microbatch-size 1"
    report = benchmark(
        "overhead",
        *f"{sizes} --sequence-length 8 --turns 2 --warmup 1 --recompute none --json {file}".split(),
    )

    assert json.loads(file.read_text()) == report
    [result] = report["results"]
    programs = result["programs"]
    assert set(programs) == set(overhead.PROGRAMS)
    pipeline, plain = programs["pipeline"], programs[result["ratio_to"]]
    assert result["ratio_to"] in overhead.PLAIN
    assert result["ratio"] == plain["pipeline_takes_times"]
    first, second = (a / b for a, b in zip(pipeline["seconds"], plain["seconds"], strict=True))
    assert result["ratio"] == pytest.approx((first + second) / 2, rel=0.01)
    assert pipeline["tokens_per_second"] == pytest.approx(
        16 / pipeline["seconds_per_iteration"], rel=0.01
    )
    # Parameters, two moments and gradients at least.
    shapes = stage_shapes(ModelConfig(**PRESETS["tiny"]), 2)
    assert pipeline["peak_memory_bytes"] > 4 * 4 * parameter_count(shapes)


def test_gpu(tmp_path: Path):
    file = tmp_path / "gpu.json"
    report = benchmark("gpu", "--small", "--recompute", "block", "--json", str(file))

    assert json.loads(file.read_text()) == report
    results = report["results"]
    tokens = 3 * 32
    seconds = results["seconds_per_iteration"]
    assert results["tokens_per_second"] == pytest.approx(tokens / seconds, rel=0.01)
    flops = tokens * (6 * results["parameters"] + 6 * 32 * 256)
    assert results["model_flops_per_second"] == pytest.approx(flops / seconds, rel=0.01)
    reached = results["model_flops_per_second"] / results["product_flops_per_second"]
    assert results["utilisation"] == pytest.approx(reached, abs=1e-4)
    assert results["peak_memory_bytes"] > 0
    assert report["workload"]["model"]["recompute"] == "block"


def test_flops_are_six_for_a_parameter_and_half_a_square_of_attention():
    model = ModelConfig(width=8, layers=3, heads=2, kv_heads=2, ffn_width=12)
    workload = gpu.Workload(
        model, microbatches=2, in_flight=1, microbatch_size=5, sequence_length=7
    )
    # Two products of 2 * width operations for each of the 7 * 7 / 2 pairs of positions, three
    # times: once in the forward pass, twice in the backward pass.
    attention = 3 * 2 * 5 * 3 * (2 * 2 * 8 * 7 * 7 // 2)
    assert workload.flops(parameters=100) == 6 * 100 * 2 * 5 * 7 + attention
