"""The benchmarks run, and print one JSON object last; their figures are for quiet machines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.processes import Processes, started_processes
from tests.training_runs import SMALL_CASE, virtual_devices


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with started_processes(tmp_path) as processes:
        yield processes


def last_line_of(processes: Processes, module: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark prints last on its standard output; warnings may follow it."""
    command = ("-m", f"experiments.benchmarks.{module}", *arguments)
    processes.start(*command, **virtual_devices(1))
    assert processes.exit_code(0, 550.0) == 0, processes.output(0)
    return json.loads([line for line in processes.output(0).splitlines() if line[:1] == "{"][-1])


def test_overhead(processes: Processes):
    sizes = ["--stages", "2", "--replicas", "1", "--microbatches-per-data-node", "2"]
    sizes += ["--microbatch-size", "1", "--sequence-length", "16", "--warmup", "1", "--turns", "2"]
    report = last_line_of(processes, "overhead", "--recompute", "stage", *sizes)
    [result] = report["results"]
    pipeline = result["programs"]["pipeline"]
    quickest = result["programs"][result["ratio_to"]]
    assert result["ratio"] == quickest["pipeline_takes_times"] > 0
    assert pipeline["pipeline_takes_times"] == 1
    tokens = 2 * 16
    assert abs(pipeline["tokens_per_second"] * pipeline["seconds_per_iteration"] / tokens - 1) < 0.1
    assert report["machine"]["jax"]


def test_gpu_on_any_machine(processes: Processes):
    results = last_line_of(processes, "gpu", "--small")["results"]
    assert results["model_flops_per_second"] > 0
    ratio = results["model_flops_per_second"] / results["product_flops_per_second"]
    assert abs(results["utilisation"] - ratio) < 0.01
    assert results["peak_memory_bytes"] > 0


def test_planner(processes: Processes):
    report = last_line_of(processes, "planner", "--only", "compiled")
    figures = report["compiled"]
    rates = figures["compiled_plans_per_s"] / figures["simulator_plans_per_s"]
    assert abs(figures["ratio"] / rates - 1) < 0.1
    assert figures["ratio"] > 1


def test_late(processes: Processes):
    report = last_line_of(processes, "late", "--iterations", "2")
    strict, ready_first = report["results"]
    assert report["ratio"] == pytest.approx(ready_first["median_s"] / strict["median_s"], abs=0.01)
    assert len(strict["losses"]) == 2
    assert report["largest_difference_of_losses"] < 1e-5


def test_wire(processes: Processes):
    small = ["width=32", "layers=4", "heads=2", "kv_heads=1", "ffn_width=48"]
    settings = [*(f"model.{setting}" for setting in small), "data.sequence_length=32"]
    settings.append(f"plan.case={json.dumps(SMALL_CASE)}")
    overrides = [word for setting in settings for word in ("--set", setting)]
    results = last_line_of(processes, "wire", "--iterations", "3", *overrides)["results"]
    nothing, activations, averaging, both = (own["bytes_per_iteration"] for own in results)
    assert both == pytest.approx(nothing / 2, abs=9)
    assert activations + averaging == pytest.approx(1.5 * nothing, abs=9)
    assert all(abs(own["difference"]) < 0.01 for own in results)
    assert len({tuple(own["losses"]) for own in results}) == 4


def test_data(processes: Processes):
    small = ["--iterations", "2", "--copies", "1", "--turns", "1", "--vocabulary-size", "300"]
    model = ["width=32", "heads=2", "kv_heads=1", "ffn_width=48"]
    overrides = [word for setting in model for word in ("--set", f"model.{setting}")]
    report = last_line_of(processes, "data", *small, "--files", "40", *overrides)
    loading, tokenizing = report["loading"], report["tokenizing"]
    trained = loading["trainer_tokens_per_second"]
    assert {(own["source"], own["packing"]) for own in loading["results"]} == {
        (source, packing) for source in ("python", "tokens") for packing in ("windows", "documents")
    }
    for own in loading["results"]:
        assert own["ratio"] == pytest.approx(own["tokens_per_second"] / trained, rel=0.01)
    assert tokenizing["ratio"] == pytest.approx(
        tokenizing["ours_MB_per_s"] / tokenizing["encode_batch_MB_per_s"], abs=0.01
    )
