"""The benchmarks run, and report; their figures are for quiet machines."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import overhead
from experiments.benchmarks.churn import __main__ as churn
from experiments.benchmarks.churn import host as churn_host
from experiments.benchmarks.churn import lost_stages, records
from experiments.benchmarks.churn import report as churn_report
from experiments.benchmarks.churn.faults import KINDS, PHASES, draw, links_between
from experiments.benchmarks.gpu import __main__ as gpu
from experiments.benchmarks.harness.turns import (
    Iteration,
    OutOfMemory,
    Taken,
    in_turns_or_apart,
    require_alike,
    within_memory,
)
from experiments.benchmarks.network import regions, wan
from experiments.benchmarks.serving import churn as serving_churn
from skippipe_jax.config import PRESETS
from skippipe_jax.config.parsing import load_config
from tests.harness.pictures import overlapping_texts
from tests.harness.training_runs import SMALL_CASE, virtual_devices


def report_of(folder: Path, module: str, *words: str) -> dict[str, Any]:
    """What a benchmark reports, from a process of its own with one device."""
    file = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.benchmarks.{module}", *words, "--json", file],
        cwd=Path(__file__).parents[1],
        env=os.environ | virtual_devices(1),
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (
            "overhead",
            "--recompute stage --stages 2 --replicas 1 --microbatches-per-data-node 2 "
            "--microbatch-size 1 --sequence-length 16 --warmup 0 --turns 1",
        ),
        (
            "overhead",
            "--causes --stages 2 --replicas 1 --microbatches-per-data-node 2 "
            "--microbatch-size 1 --sequence-length 16 --warmup 0 --turns 1 --records 1",
        ),
        ("gpu", "--small"),
        (
            "planner.settings",
            "--cases gcp20 --settings exact more-in-flight --seeds 1 --budget 0.1",
        ),
        ("planner.settings", "--cases 8b --settings outer-free outer --seeds 1 --budget 0.1"),
        ("network.late", "--iterations 2"),
        ("serving.many_requests", "--slots 2 --requests 2 --turns 1"),
    ],
)
def test_a_small_run_reports_its_results(tmp_path: Path, module: str, arguments: str):
    assert report_of(tmp_path, module, *arguments.split())["results"]


def test_operations_are_of_the_kinds_that_their_names_say():
    kinds = {
        "dot.58": "products",
        "ynn_fusion.14": "products",
        "copy_bitcast_fusion.7": "copies",
        "wrapped_copy": "copies",
        "multiply_bitcast_fusion": "number by number",
        "wrapped_broadcast": "number by number",
        "while.17": None,
    }
    assert {name: overhead.kind_of(name) for name in kinds} == kinds


def test_gpu_measures_a_replica_of_the_recipe():
    given = gpu.Sizes()
    recipe = load_config(Path("experiments/paper/configs/1.5b.yaml"))
    shape = PRESETS[given.preset] | {"layers": 6 * given.layers, "preset": given.preset}
    assert recipe.model == given.model_of(shape)
    assert recipe.data.microbatch_size == given.microbatch_size
    assert recipe.data.sequence_length == given.sequence_length
    case = recipe.plan.case
    assert isinstance(case, dict)
    assert case["memory"] == given.in_flight
    microbatches = case["microbatches_per_data_node"] * case["stages"][0]
    visits = microbatches * (case["path_length"] - 1)
    assert given.microbatches == visits / sum(case["stages"][1:])


def test_what_does_not_fit_into_memory_says_so_and_other_errors_are_raised():
    told = within_memory(lambda: jnp.zeros(2**46, jnp.int8))
    assert isinstance(told, OutOfMemory)
    assert "RESOURCE_EXHAUSTED" in told.told
    for said in (
        "INTERNAL: out of memory",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded",
    ):
        error = jax.errors.JaxRuntimeError(said)
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            within_memory(Mock(side_effect=error))


def test_programs_that_do_not_fit_at_once_run_one_after_the_other():
    on_device: WeakSet[Any] = WeakSet()

    def create(most: int) -> Iteration:
        def iteration(batch: float) -> float:
            if len(on_device) > most:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return batch

        on_device.add(iteration)
        return iteration

    batches = [1.0, 2.0, 3.0]
    one, two, none = (partial(create, most) for most in (1, 2, 0))
    taken, is_paired = in_turns_or_apart({"a": two, "b": two}, batches, 1)
    assert is_paired
    for programs in ({"a": one, "b": one}, {"a": one, "b": one, "c": none}):
        taken, is_paired = in_turns_or_apart(programs, batches, 1)
        assert not is_paired
        for name in ("a", "b"):
            own = taken[name]
            assert isinstance(own, Taken)
            assert (own.losses, len(own.seconds)) == (batches, 2)
    assert isinstance(taken["c"], OutOfMemory)
    require_alike({"a": Taken([], [2.0]), "b": Taken([], [2.0001])}, "float32")
    with pytest.raises(RuntimeError, match="differ in their last losses"):
        require_alike({"a": Taken([], [2.0]), "b": Taken([], [2.001])}, "float32")


@pytest.mark.nightly
def test_attention(tmp_path: Path):
    given = "--lengths", "300", "--turns", "2"
    one, packed = report_of(tmp_path, "attention", *given)["results"]
    assert [one["packed"], packed["packed"]] == [False, True]
    for ways in (one["ways"], packed["ways"]):
        assert ways["xla"]["of_xla"] == 1.0
        assert ways["blockwise"]["seconds"] > 0
        assert ways["blockwise"]["temporary_bytes"] < ways["xla"]["temporary_bytes"]


@pytest.mark.nightly
def test_planner_bounds(tmp_path: Path):
    arguments = ["--only", "bound", "--optima", "2", "--bound-budget", "5"]
    found = report_of(tmp_path, "planner", *arguments)["bound"]
    for own in (*found["optima"], found["gcp20"]):
        assert own["quick_s"] <= own["placements_s"] <= own["best_s"] * (1 + 1e-9)
    assert found["placements"]["mean_gap"] < found["quick"]["mean_gap"]


@pytest.mark.nightly
def test_packing(tmp_path: Path):
    small = ["width=32", "layers=4", "heads=2", "kv_heads=1", "ffn_width=48"]
    words = [f"model.{setting}" for setting in small] + ["data.sequence_length=32"]
    words.append(f"plan.case={json.dumps(SMALL_CASE)}")
    overrides = [word for setting in words for word in ("--set", setting)]
    few = ["--iterations", "2", "--width", "256", "--dtypes", "int8"]
    report = report_of(tmp_path, "network.packing", *few, *overrides)
    kernels, [sent] = report["kernels"], report["sockets"]
    assert kernels["hops_each_way"] == 4
    for own in kernels["formats"]:
        hop_ms = own["pack_ms"] + own["pack_gradient_ms"] + 2 * own["unpack_ms"]
        iteration_ms = 1e3 * kernels["iteration_processor_s"]
        assert own["share"] == pytest.approx(4 * hop_ms / iteration_ms, rel=0.02)
    # Of 4 sequences of 256 tokens, whose 256 channels have two scales.
    assert sent["by_formula"] == 2 * 8 * 4 * 4 * 256 * (256 + 2 * 2)
    assert 1.0 < sent["ratio"] < 1.03


@pytest.mark.nightly
def test_data(tmp_path: Path):
    small = ["--iterations", "2", "--copies", "1", "--turns", "1", "--vocabulary-size", "300"]
    model = ["width=32", "heads=2", "kv_heads=1", "ffn_width=48"]
    overrides = [word for setting in model for word in ("--set", f"model.{setting}")]
    report = report_of(tmp_path, "data", *small, "--files", "40", *overrides)
    loading, tokenizing = report["loading"], report["tokenizing"]
    assert {(own["source"], own["packing"]) for own in loading["results"]} == {
        (source, packing) for source in ("python", "tokens") for packing in ("windows", "documents")
    }
    assert tokenizing["ratio"] == pytest.approx(
        tokenizing["ours_MB_per_s"] / tokenizing["encode_batch_MB_per_s"], abs=0.01
    )


def test_churn_draws_faults_of_all_kinds_at_all_phases_a_third_of_them_on_the_leader():
    faults = draw(5, 6, 72, list(KINDS))
    assert faults == draw(5, 6, 72, list(KINDS)) != draw(6, 6, 72, list(KINDS))
    assert set(Counter(fault.kind for fault in faults).values()) == {72 // len(KINDS)}
    assert set(Counter(fault.phase for fault in faults).values()) == {72 // len(PHASES)}
    assert sum(fault.hits_leader for fault in faults) == 24
    for fault in faults:
        struck = fault.struck(4, range(6))
        assert (struck[0] == 4) == fault.hits_leader
        assert len(set(struck)) == len(struck) < 6 / 2
        if fault.kind == "partition":
            cut = links_between(struck, fault.kind, 6)
            assert len(set(cut)) == 2 * len(struck) * (6 - len(struck))


def counted(generation: int, step: int, host: int, digest: str) -> dict[str, Any]:
    digests = {"0": digest}
    return {"what": "counted", "at": step, "by": host, "generation": generation, "step": step} | {
        "digests": digests
    }


def read(generation: int, step: int, *microbatches: int) -> dict[str, Any]:
    return {"what": "read", "generation": generation, "step": step, "microbatches": microbatches}


def test_churn_sees_replicas_that_differ_and_microbatches_that_are_left_out():
    notes = [counted(1, 1, 0, "a"), counted(1, 1, 1, "a"), counted(1, 2, 0, "b")]
    assert not records.differing_replicas([*notes, counted(2, 2, 1, "c")])
    [told] = records.differing_replicas([*notes, counted(1, 2, 1, "c")])
    assert told == "replicas of stage 0 differ after step 2 in generation 1"
    notes += [read(1, 1, 0, 1), read(1, 1, 2, 3), read(1, 2, 4, 5)]
    assert not records.wrongly_read([*notes, read(1, 2, 6, 7)], 4)
    assert len(records.wrongly_read([*notes, read(2, 2, 6, 7)], 4)) == 1
    assert len(records.wrongly_read([*notes, read(1, 2, 5, 6, 7)], 4)) == 1


def test_churn_sees_what_replicas_that_go_apart_have_read_twice_or_not_learnt():
    notes = [counted(1, step, 0, "a") for step in (1, 2)] + [read(1, 1, 0, 2), read(1, 1, 1, 3)]
    # After a loss a step may read later text, but none that was read for one before.
    assert not records.wrongly_read_apart([*notes, read(1, 2, 8, 9, 10, 11)], 4)
    for wrong in ((3, 4, 5, 6), (8, 9, 10), (8, 9, 10, 12)):
        [told] = records.wrongly_read_apart([*notes, read(1, 2, *wrong)], 4)
        assert told == f"step 2 of generation 1 read {[*wrong]}, after 3"
    # All have gone back to step 1: what counts is what was made after that.
    again = [*notes, read(1, 2, 4, 5, 6, 7), counted(3, 2, 0, "a"), read(3, 2, 4, 5, 6, 7)]
    assert not records.wrongly_read_apart(again, 4)
    lines = [{"step": step, "loss": 5.0 - step / 10} for step in range(1, 9)]
    assert not records.badly_trained(lines)
    assert records.badly_trained([{**line, "loss": 5.0} for line in lines])
    assert records.badly_trained([*lines[:-1], {"step": 8, "loss": float("nan")}])
    assert "from step 3 to 5" in records.badly_trained(lines[:3] + lines[4:])[0]


def test_churn_sees_a_step_that_was_trained_otherwise_or_is_not_there():
    lines = [{"step": step, "loss": 5.0, "tokens": 8, "gradient_norm": 1.0} for step in (1, 2)]
    assert not records.otherwise_trained(lines, lines)
    other = [lines[0], lines[1] | {"gradient_norm": 1.001}]
    assert records.otherwise_trained(other, lines) == [
        "gradient_norm of step 2 is 1.001, undisturbed 1.0"
    ]
    [told] = records.otherwise_trained([*lines, lines[1]], lines)
    assert told == "metrics.jsonl goes from step 2 to 2"
    assert records.otherwise_trained(lines, lines[:1])


def test_churn_measures_from_when_a_loss_is_noticed():
    missed = {"what": "missed", "at": 12.0, "by": 1, "host": 0}
    notes = [counted(1, 9, 1, "a"), missed, counted(1, 13, 1, "a"), counted(2, 14, 1, "a")]
    found = records.recovery(notes, 10.0, 1)
    assert found == {"detected_s": 2.0, "recovered_s": 2.0}
    assert records.recovery(notes[2:], 10.0, 1)["recovered_s"] is None
    assert records.percentile([3.0, 1.0, 2.0], 0.95) == 3.0


def test_lost_stages_counts_steps_until_the_loss_is_as_low_as_before():
    losses = {step: 5.0 - 0.1 * step for step in range(1, 11)}
    # After step 10 it is as after step 4, and falls as before.
    losses |= {step: 5.0 - 0.1 * (step - 6) for step in range(11, 31)}
    lines = [{"step": step, "loss": loss} for step, loss in losses.items()]
    told = {"by": "buddy", "step_before": 10, "step": 10, "steps_old": 6}
    told |= {"loss_before": losses[10], "loss_after": losses[11]}
    others = [5.0 - 0.1 * step for step in range(1, 31)]
    found = lost_stages.judged(lines, [told], 2, others)
    assert found["above_after"] == found["above_end"] == pytest.approx(0.6)
    assert found["steps_until_as_low"] == 6
    assert found["end_loss"] == pytest.approx((losses[29] + losses[30]) / 2)
    # A run that goes back from step 10 to 4 makes six steps again.
    again = {step: 5.0 - 0.1 * step for step in range(1, 31)}
    assert lost_stages.steps_until(again, 4, 10, 2) == 6
    assert lost_stages.steps_until(losses, 10, 10, 2) == 6
    assert lost_stages.steps_until({step: float(step) for step in range(1, 31)}, 10, 10, 2) is None


def committed(name: str) -> dict[str, Any]:
    return json.loads(Path("experiments/results", f"{name}_cores.json").read_text())


def test_committed_reports_are_told_and_drawn():
    lost, served = committed("lost_stages_epyc_2"), committed("serve_churn_epyc_2")
    struck = committed("churn_every_minute_xeon_2")
    generations = committed("regions_epyc_2")["generations"]
    rows = [line.split() for line in lost_stages.table(lost).splitlines()]
    assert rows[1] == ["undisturbed", *"-----", "2.5534", *"--"]
    buddy = ["buddy", "buddy", "16", "2.7833", "2.6581", "10", "steps", "2.5544"]
    assert rows[3] == [*buddy, "+0.0017", "+0.0010"]
    rows = [line.split() for line in regions.table(generations).splitlines()]
    assert rows[2] == ["2", "9", "quick", "8.42", *"--", "1", *"--"]
    assert rows[3] == ["3", "9", "searched", "3.43", "3.50", "1.021", "18", "12.6", "8"]
    told = serving_churn.table(served | {"failures": ["a failure"]})
    assert "another is lost   0 2           8.077    1.058" in told
    assert told.endswith("WRONG: a failure")
    for figure in (
        lost_stages.picture(lost),
        regions.picture(generations, "lost"),
        churn_report.picture(struck),
        serving_churn.picture(served),
    ):
        assert overlapping_texts(figure) == []


@pytest.mark.parametrize(
    ("benchmark", "words", "field"),
    [
        (churn, ["--hosts", "2"], "--hosts"),
        (churn, ["--faults", "0"], "--faults"),
        (churn, ["--heartbeat-timeout-s", "0"], "--heartbeat-timeout-s"),
        (churn, ["--kinds", "kill", "--set", "model.wdth=3"], "model.wdth"),
        (churn, ["--kinds", "cut"], "--kinds"),
        (churn, ["--every-s", "0"], "--every-s"),
        (churn, ["--restart"], "--restart"),
        (lost_stages, ["--at", "195"], "--at"),
        (lost_stages, ["--steps", "1"], "--steps"),
        (lost_stages, ["--set", "recovery.buddy_evry=3"], "recovery.buddy_evry"),
        (regions, ["--iterations", "1"], "--iterations"),
        (wan, ["--hosts", "4", "--shared-connections", "0"], "--shared-connections"),
    ],
)
def test_a_benchmark_says_what_is_wrong_with_its_arguments(
    benchmark: Any,
    words: list[str],
    field: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("sys.argv", ["benchmark", *words])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert benchmark.main() == 2
    assert field in capsys.readouterr().err


def test_churn_watches_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watched: list[tuple[type, str]] = []
    monkeypatch.setattr(
        churn_host, "wrap", lambda owner, name, around: watched.append((owner, name))
    )
    churn_host.wrap_package(churn_host.Witness(tmp_path, 0))
    assert watched
    assert [name for owner, name in watched if not hasattr(owner, name)] == []


def line_of_membership(number: int, cause: str, hosts: int, predicted_s: float) -> dict[str, Any]:
    members = [{"host": host, "nodes": [host]} for host in range(hosts)]
    own = {"generation": number, "cause": cause, "members": members}
    return own | {"predicted_seconds": predicted_s}


def test_regions_holds_each_generation_against_its_plan():
    generations = [
        line_of_membership(1, "", 3, 2.0),
        line_of_membership(2, "host 2 was lost", 2, 4.0),
        line_of_membership(3, regions.FOUND, 2, 2.5),
    ]
    # In the first iteration of each, hosts compile.
    each = {1: [9.0, 2.0, 2.1, 2.1], 2: [9.0, 5.0, 5.0], 3: [9.0, 2.5]}
    lines = [
        {"generation": number, "seconds_per_iteration": own, "compilations": int(place == 0)}
        for number, seconds in each.items()
        for place, own in enumerate(seconds)
    ]
    stages = {1: {0: 0, 1: 1, 2: 1}, 2: {0: 0, 1: 1}, 3: {0: 1, 1: 0}}
    seen_s = {1: 100.0, 2: 203.0, 3: 219.0}
    results = regions.measured_generations(generations, lines, seen_s, stages)
    assert [result["ratio"] for result in results] == [pytest.approx(1.05), 1.25, None]
    assert [result["is_as_predicted"] for result in results] == [True, False, None]
    assert results[2]["arrived_after_s"] == 16.0
    assert results[2]["nodes_moved"] == 2
    slow, late = regions.failures(results)
    assert "generation 2 takes 1.250" in slow
    assert "generation 3 was found after 16.0 s" in late
    assert regions.failures(results[:1]) == ["no better plan was found"]
