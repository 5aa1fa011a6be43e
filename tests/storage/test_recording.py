"""What all hosts record of an iteration, put together again, is that iteration."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Operation, Plan, Predicted
from skippipe_sched.timing.jitter import draw_time_factors
from skippipe_sched.timing.simulate import simulate, simulate_plan
from skippipe_sched.timing.timeline import Averaging, TimedOperation, Timeline

from skippipe_jax.config import Config, DataConfig, TrainConfig, to_yaml
from skippipe_jax.reporting.timelines import draw_recorded
from skippipe_jax.storage.recording import (
    IncompleteRecordingError,
    Recording,
    load_recorded_plan,
    measured_timeline,
    recorded_steps,
    recording_path,
    remove_recordings,
    save_recorded_plan,
)
from tests.sched.examples import case_with, routed_cases, same_place

NOW_S = 1.75e9
# Of seconds since the epoch a float keeps a quarter of a microsecond.
ROUNDING_S = 2e-6


def planned(case: Case, stages, paths) -> Plan:
    stages, paths = tuple(map(tuple, stages)), tuple(map(tuple, paths))
    timeline = simulate(case, stages, paths)
    predicted = Predicted(timeline.iteration_s, timeline.pipeline_s, timeline.averaging_s, 1.0)
    return Plan("example", stages, paths, timeline.order, predicted, case)


def stretched(plan: Plan, draw: int = 0) -> Timeline:
    luck = draw_time_factors(len(plan.microbatches), len(plan.stages), 0.3, 0, draw)
    return simulate_plan(plan, luck)


def pieces(plan: Plan, timeline: Timeline, host_of) -> dict[int, Recording]:
    """What each host sees of a timeline that begins now."""
    recordings = {}
    for host in set(host_of):
        nodes = [node for node in range(timeline.nodes) if host_of[node] == host]
        stages = {plan.stage_of[node] for node in nodes}
        recordings[host] = Recording(
            tuple(
                TimedOperation(
                    run.operation, NOW_S + run.arrived_s, NOW_S + run.start_s, NOW_S + run.end_s
                )
                for run in timeline.runs
                if run.operation.node in nodes
            ),
            tuple(
                Averaging(seen.stage, NOW_S + seen.start_s, NOW_S + seen.end_s)
                for seen in timeline.averagings
                if seen.stage in stages
            ),
        )
    return recordings


def small_plan(**changes: Any) -> Plan:
    """Three nodes: one with the data, and two replicas of stage 1."""
    given = {"nodes": 3, "stages": [1, 2], "stage_bytes": 2**30, "microbatches_per_data_node": 2}
    return planned(case_with(**given | changes), [[0], [1, 2]], [[0, 1], [0, 2]])


@pytest.fixture
def plan() -> Plan:
    return small_plan()


def save_all(folder: Path, plan: Plan, step: int = 7) -> Timeline:
    """Record a stretched iteration, every node a host of its own."""
    timeline = stretched(plan, step)
    for host, recording in pieces(plan, timeline, range(timeline.nodes)).items():
        recording.save(folder, step, host)
    return timeline


def save_run(folder: Path, plan: Plan) -> None:
    """What a run that was planned so leaves in its folder, but for what is recorded."""
    text = DataConfig(source="text", path="text")
    config = Config(run_dir=str(folder), data=text, train=TrainConfig(steps=30))
    (folder / "config.yaml").write_text(to_yaml(config))
    plan.save(folder / "plan.json")


def times(entry) -> tuple[float, ...]:
    return tuple(value for value in vars(entry).values() if isinstance(value, float))


def assert_same(found: Timeline, expected: Timeline) -> None:
    for name, key in (("runs", "operation"), ("transfers", "operation"), ("averagings", "stage")):
        entries = {getattr(entry, key): entry for entry in getattr(found, name)}
        others = {getattr(entry, key): entry for entry in getattr(expected, name)}
        assert entries.keys() == others.keys()
        assert len(entries) == len(getattr(found, name))
        for which, entry in entries.items():
            assert times(entry) == pytest.approx(times(others[which]), abs=ROUNDING_S), which
        starts = [entry.start_s for entry in getattr(found, name)]
        assert starts == sorted(starts)
    sent = {transfer.operation: (transfer.source, transfer.target) for transfer in found.transfers}
    assert sent == {t.operation: (t.source, t.target) for t in expected.transfers}
    assert found.nodes == expected.nodes


@settings(max_examples=25)
@given(routed_cases(contentions=["none", "link"]), st.data())
def test_recordings_of_all_hosts_together_are_the_iteration(routed, data):
    plan = planned(*routed)
    timeline = stretched(plan)
    hosts = st.integers(0, 3)
    host_of = data.draw(st.lists(hosts, min_size=timeline.nodes, max_size=timeline.nodes))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for host, recording in pieces(plan, timeline, host_of).items():
            recording.save(folder, 12, host)
        assert recorded_steps(folder) == [12]
        assert {path.name for path in recording_path(folder, 12, 0).parent.iterdir()} == {
            f"host_{host}.json" for host in set(host_of)
        }
        assert_same(measured_timeline(folder, plan, 12), timeline)


@settings(max_examples=20)
@given(routed_cases(contentions=["node"]))
def test_hops_that_share_a_connection_start_when_it_is_free(routed):
    plan = planned(*routed)
    timeline = simulate_plan(plan)
    # What is ready at the same moment may change places, as clocks are rounded.
    assume(len({sent.ready_s for sent in timeline.transfers}) == len(timeline.transfers))
    with tempfile.TemporaryDirectory() as name:
        for host, recording in pieces(plan, timeline, range(timeline.nodes)).items():
            recording.save(Path(name), 12, host)
        assert_same(measured_timeline(Path(name), plan, 12), timeline)


def test_each_node_runs_what_takes_no_time_in_the_order_of_the_plan(tmp_path):
    plan = small_plan(loss_ratio=0)
    save_all(tmp_path, plan)
    assert measured_timeline(tmp_path, plan, 7).order == plan.order


def test_a_stage_averages_from_the_latest_start_to_the_latest_end_that_was_seen(tmp_path, plan):
    """Where none was seen, it ends with its last operation."""
    recordings = pieces(plan, stretched(plan), range(3))
    seen = {1: (50.0, 62.0), 2: (51.0, 61.0)}
    for host, recording in recordings.items():
        own = [Averaging(1, *(NOW_S + s for s in seen[host]))] if host in seen else []
        replace(recording, averagings=tuple(own)).save(tmp_path, 7, host)
    measured = measured_timeline(tmp_path, plan, 7)
    averagings = {a.stage: times(a) for a in measured.averagings}
    last_s = max(run.end_s for run in measured.runs if run.operation.node == 0)
    assert averagings == {0: (last_s,) * 2, 1: pytest.approx((51.0, 62.0), abs=ROUNDING_S)}


def test_nothing_arrives_before_it_is_sent_where_clocks_differ(tmp_path, plan):
    recordings = pieces(plan, stretched(plan), range(3))
    # Host 1 is 10 s behind: what it receives seems to arrive before it was sent.
    behind = tuple(
        TimedOperation(run.operation, run.arrived_s - 10, run.start_s - 10, run.end_s - 10)
        for run in recordings[1].runs
    )
    recordings[1] = replace(recordings[1], runs=behind)
    for host, recording in recordings.items():
        recording.save(tmp_path, 7, host)
    measured = measured_timeline(tmp_path, plan, 7)
    assert min(run.start_s for run in measured.runs) == 0.0
    for transfer in measured.transfers:
        assert transfer.ready_s <= transfer.start_s <= transfer.end_s
    to_host_1 = next(t for t in measured.transfers if t.operation == Operation("F", 0, 1))
    assert to_host_1.ready_s == to_host_1.end_s


def test_a_missing_host_is_named_by_its_nodes(tmp_path, plan):
    save_all(tmp_path, plan)
    recording_path(tmp_path, 7, 1).unlink()
    with pytest.raises(IncompleteRecordingError, match=r"step 7 .* of nodes 1") as error:
        measured_timeline(tmp_path, plan, 7)
    assert error.value.field == "timelines/00000007"
    with pytest.raises(IncompleteRecordingError, match="of nodes 0, 1, 2"):
        measured_timeline(tmp_path, plan, 8)


RUN = ["F", 0, 1, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ('{"runs": [', ""),
        ("[]", ""),
        ('{"runs": []}', ".averagings"),
        ({"runs": 3, "averagings": []}, ".runs"),
        ({"runs": [RUN[:5]], "averagings": []}, ".runs[0]"),
        ({"runs": [["X", *RUN[1:]]], "averagings": []}, ".runs[0]"),
        ({"runs": [[*RUN[:5], "late"]], "averagings": []}, ".runs[0]"),
        ({"runs": [[*RUN[:5], 0.5]], "averagings": []}, ".runs[0]"),
        ({"runs": [], "averagings": [[2, 1.0, 2.0]]}, ".averagings[0]"),
        ({"runs": [], "averagings": [[1, 2.0, 1.0]]}, ".averagings[0]"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, plan, content, field):
    save_all(tmp_path, plan)
    text = content if isinstance(content, str) else json.dumps(content)
    recording_path(tmp_path, 7, 1).write_text(text)
    with pytest.raises(InputError) as error:
        measured_timeline(tmp_path, plan, 7)
    assert not isinstance(error.value, IncompleteRecordingError)
    assert error.value.field == f"timelines/00000007/host_1.json{field}"


def test_recordings_of_two_runs_are_refused(tmp_path, plan):
    save_all(tmp_path, plan)
    path = recording_path(tmp_path, 7, 1)
    path.with_name("host_3.json").write_text(path.read_text())
    with pytest.raises(InputError, match="recorded twice"):
        measured_timeline(tmp_path, plan, 7)


def test_a_resumed_run_forgets_what_it_will_record_again(tmp_path, plan):
    for step in (10, 20, 30, 123456789):
        save_all(tmp_path, plan, step)
    assert recorded_steps(tmp_path) == [10, 20, 30, 123456789]
    remove_recordings(tmp_path, after=20)
    assert recorded_steps(tmp_path) == [10, 20]
    measured_timeline(tmp_path, plan, 20)


def test_the_plan_of_hosts_that_were_left_goes_with_what_they_recorded(tmp_path, plan):
    save_recorded_plan(tmp_path, 10, plan)
    assert recorded_steps(tmp_path) == []  # Nobody has, yet: the host may be lost.
    kept = load_recorded_plan(tmp_path, 10)
    assert kept is not None
    assert kept.to_json() == plan.to_json()
    remove_recordings(tmp_path, after=9)
    assert load_recorded_plan(tmp_path, 10) is None


def test_recorded_iterations_are_drawn_below_the_prediction_of_their_plan(tmp_path, capsys):
    case = same_place([1, 2], stage_bytes=2**30, microbatches_per_data_node=2)
    plan = planned(case, [[0], [1, 2]], [[0, 1], [0, 2]])
    save_run(tmp_path, plan)
    left = repair_plan(plan, [0, 1])
    save_recorded_plan(tmp_path, 20, left)
    plans = {10: plan, 20: left}
    measured = {step: save_all(tmp_path, own, step) for step, own in plans.items()}
    save_all(tmp_path, plan, 30)
    recording_path(tmp_path, 30, 2).unlink()
    written = draw_recorded(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in written] == [
        f"timelines/{step:08d}.{ending}" for step in plans for ending in ("svg", "trace.json")
    ]
    assert "the recording of step 30 is incomplete" in capsys.readouterr().err
    for step, svg, trace in zip(plans, written[::2], written[1::2], strict=True):
        shown, figures = svg.read_text(), json.loads(trace.read_text())["otherData"]
        assert shown.index("predicted") < shown.index(f"measured, step {step}")
        assert figures["iteration_s"] == pytest.approx(plans[step].predicted.iteration_s)
        assert figures["measured_iteration_s"] == pytest.approx(measured[step].iteration_s)
    # Drawn again, as after a run that was resumed, the pictures are no recordings.
    assert draw_recorded(tmp_path) == written
