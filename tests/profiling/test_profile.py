"""Cases from what was measured: of links, of stages; what a template may say; the command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.problem.open_case import candidates, load_cases

from skippipe_jax.cli.main import main
from skippipe_jax.config import Config, parse_config
from skippipe_jax.models.planned_case import configured_cases
from skippipe_jax.profiling import cluster, links
from skippipe_jax.profiling.case import (
    HostReport,
    case_of,
    check_template,
    ignored_keys_text,
    profile_from_measured,
    profile_of,
    read_measured,
)
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.profiling.links import (
    MeasuredLink,
    SimultaneousTransfer,
    measure_copy,
    measuring_rounds,
)
from skippipe_jax.profiling.stages import (
    BACKWARD,
    FORWARD,
    LOSS,
    UPDATE,
    Timing,
    fit_costs,
    measure_stage,
)
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.training.planning import make_plan
from tests.harness.training_runs import write_config

MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
DATA = {"sequence_length": 32, "microbatch_size": 2}


def config_of(**sections: Any) -> Config:
    return parse_config({"model": MODEL, "data": DATA, "plan": "auto"} | sections)


def timings_of(forward_s: float, backward_s: float, loss_s: float) -> dict[str, Timing]:
    seconds = {FORWARD: forward_s, BACKWARD: backward_s, LOSS: loss_s}
    return {name: Timing(value, value, value, 3) for name, value in seconds.items()}


# Of the devices of hosts, for as many microbatches as the number of the host and one.
BYTES = [800_499.5, 1_020_000.0, 1_300_000.0, 1_600_000.0]


def report(host: int, hosts: int, nodes: int = 1, **changes: Any) -> HostReport:
    """One whose links, seconds and memory tell its host; host 1 is twice as fast as host 0."""
    speed = 1 / (host + 1)
    whole = HostReport(
        name=f"machine {host}",
        links=[
            MeasuredLink(
                source, host, 0.01 * source + 0.001 * host, 1e6 * (host + 1), 0.002, [], []
            )
            for source in range(hosts)
            if source != host
        ],
        copy_s=(1e-5, 3e-5) if nodes > 1 else None,
        memory_bytes=[BYTES[min(host, 3)]] * nodes,
        processors=[f"processor {host}"] * nodes,
        timings={
            f"processor {host}": [
                timings_of(0.3 * speed, 0.6 * speed, 0.06 * speed),
                timings_of(0.1 * speed, 0.2 * speed, 0.0),
            ]
        },
    )
    return dataclasses.replace(whole, **changes)


# What is measured.


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 20])
def test_rounds_cover_every_ordered_pair_and_disturb_none(hosts: int):
    schedules = [list(measuring_rounds(host, hosts)) for host in range(hosts)]
    measured = []
    for of_round in zip(*schedules, strict=True):
        for host, (source, target) in enumerate(of_round):
            if source is not None:
                measured.append((source, host))
                # The other one serves in the same round, and does not ask back in it.
                assert of_round[source][1] == host
                assert of_round[source][0] != host
            if target is not None:
                assert of_round[target][0] == host
    assert sorted(measured) == [(a, b) for a in range(hosts) for b in range(hosts) if a != b]


def test_costs_are_those_that_seconds_were_made_of():
    forward_s, stage_cost = np.array([0.2, 0.1, 0.4]), np.array([1.5, 0.5, 1.0, 1.0])
    forward = np.outer(forward_s, stage_cost)
    timings = [[timings_of(f, 1.75 * f, 0.3 * row[0]) for f in row] for row in forward]
    costs = fit_costs(timings)
    np.testing.assert_allclose(costs.forward_s, forward_s)
    np.testing.assert_allclose(costs.stage_cost, stage_cost)
    assert costs.backward_ratio == pytest.approx(1.75)
    assert costs.loss_ratio == pytest.approx(0.3)
    assert costs.largest_error == pytest.approx(0.0, abs=1e-9)
    timings[1][2] = timings_of(0.15, 0.15 * 1.75, 0.0)
    assert 0.1 < fit_costs(timings).largest_error < 0.5


@pytest.mark.nightly
def test_stages_are_timed_with_a_loss_where_there_is_one():
    config, here = config_of(), NodeSharding((jax.devices()[1],))
    compiling = measure_stage(config, (True, 2), here, 0.0)
    assert {timing.repetitions for timing in compiling.values()} == {3}
    of_data = measure_stage(config, (True, 2), here, 0.5)
    assert set(of_data) == {FORWARD, LOSS, BACKWARD, UPDATE}
    for operation, timing in of_data.items():
        assert 0 < timing.least_s <= timing.median_s <= timing.most_s
        assert timing.repetitions > 3
        assert timing.median_s < compiling[operation].most_s
    assert set(measure_stage(config, (False, 2), here, 0.0)) == {FORWARD, BACKWARD, UPDATE}


def test_memory_of_the_machine_is_shared_out():
    device = jax.devices()[0]
    alone, shared = available_bytes(device, 1, 1), available_bytes(device, 1, 4)
    assert 2**20 < shared < 0.5 * alone


def test_copies_are_timed_between_devices():
    byte_s, copy_s = measure_copy(jax.devices()[:2], 2**24)
    assert 0 < byte_s < copy_s < 1.0


# The case.


def test_case_holds_what_hosts_reported():
    config = config_of(plan={"measure": True, "case": {"stages": [1, 2]}})
    case = case_of(config, (0, 1, 2), [report(host, 3) for host in range(3)])
    [path_2, *_] = candidates(case)
    assert path_2.path_length == 2
    assert [node["forward_s"] for node in case["nodes"]] == [0.2, 0.1, pytest.approx(0.2 / 3)]
    assert [node["memory"] for node in case["nodes"]] == [1, 3, 4]
    assert [node["memory_bytes"] for node in case["nodes"]] == [800_000, 1_020_000, 1_300_000]
    assert case["memory"] == 1
    assert case["stage_cost"] == [1.5, 0.5]
    assert (case["backward_ratio"], case["loss_ratio"]) == (2.0, pytest.approx(0.2))
    assert case["hop_overhead_s"] == 0.002
    assert case["activation_bytes"] == 2 * 32 * 16 * 4
    assert case["microbatches"] == 6
    assert len(case["links"]) == 6
    latency_ms, bandwidth = next(
        row[2:] for row in case["links"] if row[:2] == ["host 2", "host 1"]
    )
    assert latency_ms == 21.0
    assert bandwidth * GIBIBYTE == pytest.approx(2e6, rel=1e-5)
    assert "same_location" not in case
    averaged = case_of(
        config_of(plan=to_measure(stages=[1, 2]), network={"averaging_dtype": "bfloat16"}),
        (0, 1, 2),
        [report(host, 3) for host in range(3)],
    )
    assert averaged["stage_bytes"] == [size / 2 for size in case["stage_bytes"]]


def to_measure(**template: Any) -> dict[str, Any]:
    return {"measure": True, "case": template}


def test_nodes_of_one_host_share_its_connection():
    slow = [
        SimultaneousTransfer(2, 1, tested=2, bytes=1_000_000, seconds=[2.0, 1.5]),
        SimultaneousTransfer(2, 0, tested=2, bytes=500_000, seconds=[2.0, 1.0]),
    ]
    reports = [report(0, 3), report(1, 3, simultaneous=slow), report(2, 3, nodes=2)]
    case = case_of(config_of(), (0, 1, 2, 2), reports)
    assert case["contention"] == "node"
    uplinks = [node.get("uplink_GiB_per_s") for node in case["nodes"]]
    # Half of 1.5 MB in 1.5 s.
    assert uplinks == [None, None, *[pytest.approx(0.5e6 / GIBIBYTE, rel=1e-5)] * 2]
    assert not any("downlink_GiB_per_s" in node for node in case["nodes"])
    profile = profile_of(config_of(), (0, 1, 2, 2), reports)
    assert "shared connection: host 2 sends at most 1.000 MB/s" in profile.summary()


def test_nodes_of_one_host_share_its_location_and_copy_there():
    config = config_of(cluster={"host_of_node": [1, 0, 1]}, plan=to_measure(stages=[1, 2]))
    case = case_of(config, (1, 0, 1), [report(0, 2), report(1, 2, nodes=2)])
    assert [node["location"] for node in case["nodes"]] == ["host 1", "host 0", "host 1"]
    assert [node["memory"] for node in case["nodes"]] == [3, 1, 3]
    assert case["same_location"]["latency_ms"] == 0.01
    copy_s = case["activation_bytes"] / (case["same_location"]["bandwidth_GiB_per_s"] * GIBIBYTE)
    assert copy_s == pytest.approx(2e-5, rel=1e-4)
    candidates(case)


def test_template_says_what_is_not_measured():
    template = {
        "locations": ["Belgium", "Iowa"],
        "stages": "auto",
        "stage_count": 2,
        "path_length": 1,
        "microbatches_per_data_node": 5,
        "rules": {"max_swaps": 0},
        "memory": 2,
    }
    case = case_of(config_of(plan=to_measure(**template)), (0, 1, 2, 3), reports_of(4))
    names = ["Belgium", "Iowa", "Belgium 2", "Iowa 2"]
    assert [node["location"] for node in case["nodes"]] == names
    assert [node["memory"] for node in case["nodes"]] == [1, 2, 2, 2]
    assert "skip_ratio" not in case
    assert "microbatches" not in case
    assert case["rules"] == {"max_swaps": 0}
    assert {found.path_length for found in candidates(case)} == {1}


def reports_of(hosts: int) -> list[HostReport]:
    return [report(host, hosts) for host in range(hosts)]


@pytest.mark.parametrize(
    ("memory", "numbers", "head"),
    [
        (None, [1, 3, 4], "holds with model.recompute: none"),
        (2, [1, 2, 2], "holds with model.recompute: none, but no more than 2 (plan.case.memory)"),
        ("auto", [None] * 3, "auto: as many microbatches"),
    ],
)
def test_the_written_case_says_why_it_has_so_much_memory(
    tmp_path: Path, memory: Any, numbers: list[Any], head: str
):
    template = {"stages": [1, 2]} | ({} if memory is None else {"memory": memory})
    config = config_of(plan=to_measure(**template))
    found = profile_of(config, (0, 1, 2), reports_of(3))
    found.save(tmp_path / "case.yaml")
    text = (tmp_path / "case.yaml").read_text()
    written = yaml.safe_load(text)
    assert [node.get("memory") for node in written["nodes"]] == numbers
    assert head in text.splitlines()[3]
    assert found.warnings == []
    assert "microbatches in flight, memory 800 kB to 1.30 MB" in found.summary()
    if memory != "auto":
        assert [n.memory for n in load_cases(tmp_path / "case.yaml")[0].nodes] == numbers
    else:
        with pytest.raises(InputError, match=r"case\.memory = 'auto'"):
            load_cases(tmp_path / "case.yaml")
    # A configuration that names it may say that stages are computed again, and has room for more.
    given = {"plan": {"case": str(tmp_path / "case.yaml")}}
    for recompute in ("none", "stage"):
        named = parse_config(
            {"model": MODEL | {"recompute": recompute}, "data": DATA, "plan": given["plan"]}
        )
        [case, *_] = configured_cases(named, tmp_path)
        own = [node.memory for node in case.nodes]
        if memory == "auto":
            assert own == ([1, 3, 4] if recompute == "none" else [6, 6, 6])
        else:
            assert own == numbers


def test_a_node_with_room_for_none_is_warned_of_and_the_case_is_written():
    config = config_of(plan=to_measure(stages=[1, 2]))
    reports = [dataclasses.replace(r, memory_bytes=[1e5]) for r in reports_of(3)]
    found = profile_of(config, (0, 1, 2), reports)
    assert [node["memory"] for node in found.case["nodes"]] == [1, 1, 1]
    [warning] = found.warnings
    assert warning.startswith("case.memory = 1 is more than nodes 0-2 can hold: stage 0 takes ")
    assert "Use more stages or " in warning or "Use model.recompute: " in warning
    assert found.summary().endswith(f"warning: {warning}")
    asked = config_of(plan=to_measure(stages=[1, 2], memory="auto"))
    assert len(profile_of(asked, (0, 1, 2), reports).warnings) == 1


def test_what_was_measured_gives_the_same_case_again_or_one_for_another_template(tmp_path: Path):
    config, path = config_of(plan=to_measure(stages=[1, 2])), tmp_path / "case.yaml"
    assert read_measured(path) is None
    profile_of(config, (0, 1, 2), reports_of(3)).save(path)
    first, measured = path.read_text(), read_measured(path)
    assert measured is not None
    again = profile_from_measured(config, measured, 3)
    assert again is not None
    again.save(path)
    assert (path.read_text(), read_measured(path)) == (first, measured)

    longer = profile_from_measured(
        config_of(plan=to_measure(stages=[2, 1], path_length=1)), measured, 3
    )
    assert longer is not None
    assert (longer.case["stages"], longer.case["path_length"]) == ([2, 1], 1)
    assert longer.case["links"] == again.case["links"]
    for other in (
        config_of(plan=to_measure(stages=[3])),
        config_of(plan=to_measure(stages=[1, 2]), model=MODEL | {"recompute": "stage"}),
        config_of(plan=to_measure(stages=[1, 2]), node={"fsdp": 2}),
    ):
        assert profile_from_measured(other, measured, 3) is None
    assert profile_from_measured(config, measured, 2) is None


@pytest.mark.parametrize(
    ("hosts", "layers", "stages"),
    [(1, 4, 1), (2, 4, 2), (3, 4, 2), (5, 4, 2), (9, 4, 4), (20, 6, 6)],
)
def test_as_many_stages_as_have_two_replicas(hosts: int, layers: int, stages: int):
    config = config_of(model=MODEL | {"layers": layers})
    shapes = [timings_of(0.1, 0.2, 0.01)] * stages
    reports = [
        dataclasses.replace(r, timings={of: shapes for of in r.timings}) for r in reports_of(hosts)
    ]
    assert check_template(config, hosts) == tuple(range(hosts))
    case = case_of(config, tuple(range(hosts)), reports)
    assert case["stage_count"] == stages
    assert all(len(found.stages) == stages for found in candidates(case))


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (to_measure(speed=3), "plan.case.speed"),
        (to_measure(memory=0), "plan.case.memory"),
        (to_measure(memory=None), "plan.case.memory"),
        (to_measure(memory="much"), "plan.case.memory"),
        (to_measure(memory="auto", stages=[1, 1]), "case.stages"),
        (to_measure(stages=[1, 1]), "case.stages"),
        (to_measure(stages=7), "plan.case.stages"),
        (to_measure(stages=[2, 1], stage_count=2), "case.stage_count"),
        (to_measure(stage_count=3), "model.layers"),
        (to_measure(locations=[]), "plan.case.locations"),
        (to_measure(skip_ratio=[0.9, 0.95]), "case.skip_ratio"),
        (to_measure(rules={"max_swops": 1}), "case.rules.max_swops"),
        (to_measure(nodes=2), "--hosts"),
        ({"case": "missing.yaml"}, "case"),
        ({"file": "missing.json"}, "plan"),
    ],
)
def test_templates_are_refused_before_anything_is_measured(plan: dict[str, Any], field: str):
    with pytest.raises(InputError) as refused:
        check_template(config_of(plan=plan), 3)
    assert refused.value.field == field


COMPLETE = {
    "nodes": 4,
    "locations": ["Oslo", "Paris", "Lima"],
    "links": [["Oslo", "Paris", 20, 0.5], ["Oslo", "Lima", 20, 0.5], ["Paris", "Lima", 9, 0.5]],
    "activation_bytes": 1e6,
    "stage_bytes": 1e6,
    "forward_s": 0.1,
    "stages": [2, 2],
    "path_length": 2,
    "microbatches_per_data_node": 3,
    "memory": 2,
}


@pytest.mark.parametrize("form", ["mapping", "case", "plan"])
def test_of_a_complete_case_what_cannot_be_measured_is_kept(form: str, tmp_path: Path):
    given: dict[str, Any] = {"case": COMPLETE, "measure": True}
    if form == "case":
        given["case"] = str(tmp_path / "case.yaml")
        (tmp_path / "case.yaml").write_text(yaml.safe_dump(COMPLETE))
    elif form == "plan":
        given = {"file": str(tmp_path / "plan.json"), "measure": True}
        make_plan(COMPLETE, "balanced").save(tmp_path / "plan.json")
    config = config_of(plan=given)
    assert check_template(config, 2) == (0, 0, 1, 1)
    case = case_of(config, (0, 0, 1, 1), [report(0, 2, nodes=2), report(1, 2, nodes=2)])
    assert case["locations"] == ["Oslo", "Paris"]
    assert [node["location"] for node in case["nodes"]] == ["Oslo", "Oslo", "Paris", "Paris"]
    assert case["stages"] == [2, 2]
    assert case["microbatches_per_data_node"] == 3
    assert case["forward_s"] != COMPLETE["forward_s"]
    said = ignored_keys_text(config)
    assert "links" in said
    assert "forward_s" in said
    assert "stages" not in said
    assert not ignored_keys_text(config_of(plan=to_measure(stages=[1, 1])))


# The command.


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Measures in this process, and in a moment; returns the exit code."""
    monkeypatch.setattr(cluster, "STAGE_S", 0.05)
    return lambda *words: main(["measure", *map(str, words)])


def test_one_host_alone_needs_no_links(
    tmp_path: Path, measured: Callable[..., int], capfd: pytest.CaptureFixture[str]
):
    config, output = write_config(tmp_path, plan="auto"), tmp_path / "new" / "case.yaml"
    assert measured("--config", config, "-o", output) == 0
    [case] = load_cases(output)
    assert len(case.nodes) == 1
    assert case.nodes[0].forward_s > 0
    assert case.nodes[0].memory == sum(case.microbatches)
    assert (case.nodes[0].memory_bytes or 0) > 2**20
    figures = json.loads((tmp_path / "new" / "case.measured.json").read_text())
    assert figures["hosts"][0]["timings"]
    assert "forward" in capfd.readouterr().out
    head = output.read_text().splitlines()[:3]
    assert all(line.startswith("# ") for line in head)
    assert '"width": 16' in head[2]


@pytest.mark.nightly
def test_nodes_on_devices_of_one_process_have_one_location(
    tmp_path: Path, measured: Callable[..., int]
):
    config = write_config(tmp_path, plan="auto", cluster={"host_of_node": [0, 0, 0, 0]})
    assert measured("--config", config, "-o", tmp_path / "case.yaml") == 0
    case = yaml.safe_load((tmp_path / "case.yaml").read_text())
    assert {node["location"] for node in case["nodes"]} == {"host 0"}
    assert len(case["nodes"]) == 4
    assert case["same_location"]["bandwidth_GiB_per_s"] > 0
    assert all(len(found.stages) == 2 for found in load_cases(tmp_path / "case.yaml"))


@pytest.mark.parametrize(
    ("plan", "output", "problem"),
    [
        (to_measure(speed=3), "case.yaml", "plan.case.speed"),
        ("auto", ".", "--output"),
        ("auto", "text/case.yaml", "--output"),
    ],
)
def test_bad_input_is_said_before_measuring(
    plan: Any,
    output: str,
    problem: str,
    tmp_path: Path,
    measured: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
):
    config = write_config(tmp_path, plan=plan)
    assert measured("--config", config, "-o", tmp_path / output) == 2
    told = capfd.readouterr()
    assert told.err.startswith(f"error: {problem}")
    assert "compiling" not in told.out


# What is made of transfers over one link, and of simultaneous ones over a connection.


# Seconds of a link of 52 kB/s, on which some bytes pass at once after a rest.
AN_ACTIVATION, ITS_SECONDS = 101376, 1.927


class Way:
    """That link; `late_s` is how late the host notices the first marker before an activation."""

    other, host = 1, 0

    def __init__(self, late_s: float = 0.0):
        self.late_s = late_s

    def ask(self, size: int) -> tuple[float, float]:
        quick = 8192 / 0.143 if size == links.SMALLEST_BYTES else 59.26e3
        if size != AN_ACTIVATION:
            return 0.0, size / quick
        late_s, self.late_s = self.late_s, 0.0
        return late_s, ITS_SECONDS - late_s


@pytest.mark.parametrize("late_s", [0.0, 0.6])
def test_a_link_is_as_quick_as_its_activations_are(late_s: float):
    """Small transfers agree on more, and a marker that was noticed late makes one look quicker."""
    way = cast(Any, Way(late_s))
    link = links._measure(way, [0.0], AN_ACTIVATION, links.TRANSFER_S)
    assert link.bandwidth == pytest.approx(AN_ACTIVATION / ITS_SECONDS)
    assert link.overhead_s == pytest.approx(0.0, abs=1e-9)


NETWORKS = st.lists(st.integers(0, 5), min_size=1, max_size=9).map(lambda own: [*map(str, own)])


@given(NETWORKS, st.integers(0, 2**32 - 1))
def test_a_connection_is_tested_by_its_fastest_links_to_distinct_networks(
    networks: list[str], seed: int
):
    bandwidth = np.random.default_rng(seed).uniform(1e6, 4e6, 2 * (len(networks),))
    tests = links.connection_tests(bandwidth, networks)
    is_tested = len(set(networks)) > 2
    expected = [(host, sends) for host in range(len(networks)) for sends in (False, True)]
    assert sorted((test.tested, test.sends) for test in tests) == (expected if is_tested else [])
    for test in tests:
        names = [networks[host] for host in (test.tested, *test.partners)]
        assert len(set(names)) == len(names) == 1 + min(3, len(set(networks)) - 1)
        rates = bandwidth[test.tested] if test.sends else bandwidth[:, test.tested]
        slowest = min(rates[partner] for partner in test.partners)
        for other, network in enumerate(networks):
            assert rates[other] <= slowest or network in names
        assert all(test.tested == pair[not test.sends] for pair in test.pairs)


def test_a_much_faster_link_and_much_slower_ones_are_left_out_of_a_test():
    bandwidth = np.full((5, 5), 1e5)
    bandwidth[0] = [0, 1e9, 1e8, 2e7, 8e6]
    networks = [*"abcde"]
    [sends] = [
        test for test in links.connection_tests(bandwidth, networks) if test[::2] == (0, True)
    ]
    assert sends.partners == (3, 4)
    bandwidth[0, 4] = 1e6
    tests = links.connection_tests(bandwidth, networks)
    assert not any(test[::2] == (0, True) for test in tests)


def test_transfers_of_links_with_different_rates_end_together():
    bandwidth = np.array([[0, 1e6, 4e6], [0, 0, 0], [0, 0, 0]])
    test = links.ConnectionTest(0, (1, 2), sends=True)
    sizes = links.transfer_sizes(test, bandwidth, 0.5)
    assert sizes == {(0, 1): 500_000, (0, 2): 2_000_000}
    sizes = links.transfer_sizes(test, 1000 * bandwidth, 0.5)
    assert sizes == {(0, 1): links.LARGEST_BYTES // 4, (0, 2): links.LARGEST_BYTES}


@pytest.mark.parametrize(
    ("sent_s", "received_s", "expected"),
    [
        # Of two repetitions the faster one counts, and in it the slower transfer.
        ((1.1, 1.2), (1.0, 1.0), [np.inf, np.inf]),
        ((5.0, 1.2), (5.0, 1.1), [np.inf, np.inf]),
        ((3.1, 2.5), (2.0, 2.4), [5e6 / 2.5, np.inf]),
    ],
)
def test_links_that_are_slower_together_share_a_connection(
    sent_s: tuple[float, float], received_s: tuple[float, float], expected: list[float]
):
    measured = [
        links.MeasuredLink(source, target, 0.0, rate, None, [], [])
        for source, target, rate in [(0, 1, 1e6), (0, 2, 4e6), (1, 0, 2e6), (2, 0, 2e6)]
    ]
    transfers = [
        links.SimultaneousTransfer(0, 1, 0, 1_000_000, sent_s),
        links.SimultaneousTransfer(0, 2, 0, 4_000_000, received_s),
        links.SimultaneousTransfer(1, 0, 0, 2_000_000, (1.0, 1.0)),
        links.SimultaneousTransfer(2, 0, 0, 2_000_000, (1.0, 1.1)),
    ]
    rates = links.connection_rates(measured, transfers, 3)
    np.testing.assert_allclose(rates, [expected, [np.inf] * 2, [np.inf] * 2])
