"""The simulator against a naive reference, hand-computed examples and what must always hold."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import load_case, parse_case
from skippipe_sched.problem.plan import Operation
from skippipe_sched.problem.rules import violations
from skippipe_sched.timing.averaging import averaging_s, best_ring
from skippipe_sched.timing.simulate import simulate, simulate_plan
from skippipe_sched.timing.timeline import Averaging

from tests.harness.messages import refusal
from tests.sched.examples import (
    PAPER,
    PUBLISHED,
    case_with,
    drawn_order,
    planned,
    routed_cases,
    same_place,
)
from tests.sched.timing.reference import Locked, Reference


def test_the_published_figures():
    case = load_case(Path(PAPER))
    timeline = simulate(case, PUBLISHED.stages, PUBLISHED.microbatches)
    assert timeline.pipeline_s == pytest.approx(32.92, abs=0.01)
    assert timeline.averaging_s == pytest.approx(36.52, abs=0.01)
    assert timeline.iteration_s == pytest.approx(69.44, abs=0.01)
    assert violations(case, PUBLISHED.stages, PUBLISHED.microbatches) == []


def test_one_microbatch_goes_there_and_back():
    """By hand: F takes 1 s, L half a second, B 2 s, and a hop 1 s each way."""
    timeline = simulate(case_with(), [[0], [1]], [(0, 1)])
    starts = [(run.operation.kind, run.operation.node, run.start_s) for run in timeline.runs]
    assert starts == [("F", 0, 0), ("F", 1, 2), ("L", 0, 4), ("B", 1, 5.5), ("B", 0, 8.5)]
    assert [(t.source, t.target, t.start_s, t.end_s) for t in timeline.transfers] == [
        *((0, 1, 1.0, 2.0), (1, 0, 3.0, 4.0), (0, 1, 4.5, 5.5), (1, 0, 7.5, 8.5))
    ]
    assert timeline.pipeline_s == timeline.iteration_s == 10.5
    assert timeline.busy_s == (3.5, 3.0)
    assert timeline.averagings == (Averaging(1, 7.5, 7.5), Averaging(0, 10.5, 10.5))


@given(st.data(), st.integers(2, 5))
@settings(max_examples=20)
def test_the_ring_is_the_quickest_of_all(data, replicas):
    figure = st.integers(1, 30)
    names = [f"place {index}" for index in range(replicas)]
    links = [
        [a, b, data.draw(figure), data.draw(figure) / 10] for a in names for b in names if a != b
    ]
    case = same_place([replicas], path_length=1).source
    case = parse_case({**case, "locations": names, "links": links, "stage_bytes": 2**28})

    def published(ring):
        """The ring's formula, link by link."""
        pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
        slowest = min(case.link_table.link(names[a], names[b]).bandwidth for a, b in pairs)
        latency = max(case.link_table.link(names[a], names[b]).latency_s for a, b in pairs)
        return 2 * (replicas - 1) / replicas * 2**28 / slowest + 2 * (replicas - 1) * latency

    rings = list(permutations(range(replicas)))
    assert averaging_s(case, 0, best_ring(case, 0, range(replicas))) == pytest.approx(
        min(map(published, rings))
    )
    for ring in rings[:3]:
        assert averaging_s(case, 0, ring) == pytest.approx(published(ring))


def test_a_large_ring_keeps_off_the_slow_links():
    """Ten nodes whose only quick links form a ring, in a scattered order."""
    ring = [0, 4, 8, 2, 6, 1, 5, 9, 3, 7]
    names = [f"place {index}" for index in range(10)]
    quick = {frozenset(pair) for pair in zip(ring, ring[1:] + ring[:1], strict=True)}
    pairs = [(a, b) for b in range(10) for a in range(b)]
    links = [[names[a], names[b], 10, 1 if {a, b} in quick else 0.01] for a, b in pairs]
    case = same_place([10], path_length=1, stage_bytes=2**30).source
    case = parse_case({**case, "locations": names, "links": links})
    found = best_ring(case, 0, range(10))
    assert sorted(found) == list(range(10))
    assert averaging_s(case, 0, found) == averaging_s(case, 0, ring)


# The reference, and what holds for every timeline.


@given(routed_cases(), st.randoms(use_true_random=False), st.sampled_from([0, 0, 1, 2]))
def test_an_order_runs_as_the_reference_or_is_refused_as_it_locks(example, chance, swaps):
    """Any order that extends the chains can run, and starts everything as early as it can."""
    case, stages, paths = example
    order = drawn_order(case, paths, chance)
    for node in order:
        for _ in range(swaps if len(node) > 1 else 0):
            place = chance.randrange(len(node) - 1)
            node[place : place + 2] = node[place + 1], node[place]
    reference = Reference(case, stages, paths, order)
    try:
        for node in range(len(case.nodes)):
            reference.own_end(1, node)
    except Locked:
        assert swaps
        with pytest.raises(InputError, match="these operations deadlock"):
            simulate(case, stages, paths, order)
        return
    timeline = simulate(case, stages, paths, order)
    reference.require(1, timeline.runs, timeline.transfers)
    assert timeline.order == tuple(map(tuple, order))
    for sent in timeline.transfers:
        least_s = case.hop_duration(sent.operation.kind, sent.source, sent.target)
        assert sent.end_s - sent.ready_s >= least_s - 1e-9
    assert timeline.pipeline_s == max(run.end_s for run in timeline.runs)
    starts = [averaging.start_s for averaging in timeline.averagings]
    assert starts == sorted(starts)
    for averaging in timeline.averagings:
        nodes = stages[averaging.stage]
        ready_s = [reference.own_end(1, node) for node in nodes]
        if case.contention == "node" and len({case.nodes[node].location for node in nodes}) > 1:
            results = [own for node in nodes for own in order[node] if own in reference.after]
            ready_s += [reference.left(1, own) for own in results if reference.is_far(own)]
        assert averaging.start_s == pytest.approx(max(ready_s))
    assert timeline.iteration_s == max(averaging.end_s for averaging in timeline.averagings)


@given(routed_cases(swaps=False))
def test_without_swaps_a_node_takes_the_right_operation_and_never_idles(example):
    """Backward first, then first come first served, a forward within memory: at every moment."""
    case, stages, paths = example
    assume(case.loss_ratio > 0)  # What follows on nothing arrives at the moment of its cause.
    timeline = simulate(case, stages, paths)
    for node, order in enumerate(timeline.order):
        runs = [run for run in timeline.runs if run.operation.node == node]
        assert [run.operation for run in runs] == list(order)
        free_s = 0.0
        in_flight = 0
        for position, run in enumerate(runs):
            full = in_flight == case.nodes[node].memory
            left = [r for r in runs[position:] if r.operation.kind != "F" or not full]
            assert run in left
            assert run.start_s == max(free_s, min(r.arrived_s for r in left))
            there = [r for r in left if r.arrived_s <= run.start_s]
            backward = [r for r in there if r.operation.kind == "B"]
            assert run.arrived_s == min(r.arrived_s for r in backward or there)
            assert (run.operation.kind == "B") == bool(backward)
            free_s = run.end_s
            in_flight += {"F": 1, "L": 0, "B": -1}[run.operation.kind]


# Swaps and memory limits.


def _can_all_end(paths, holds, limits):
    """Whether microbatches that hold memory on nodes can end one after the other: by trying all."""
    if not holds:
        return True
    for microbatch in holds:
        others = {m: held for m, held in holds.items() if m != microbatch}
        taken = [node for held in others.values() for node in held]
        to_go = holds[microbatch] | set(paths[microbatch])
        if all(taken.count(n) < limits[n] for n in to_go) and _can_all_end(paths, others, limits):
            return True
    return False


@given(routed_cases())
def test_with_swaps_a_forward_waits_only_where_nodes_could_lock(example):
    case, stages, paths = example
    timeline = simulate(case, stages, paths)
    limits = [node.memory for node in case.nodes]
    runs = {run.operation: run for run in timeline.runs}

    def held(now):
        """After all that starts at `now`: the nodes that each microbatch holds, or may yet need."""
        holds = {}
        for microbatch, path in enumerate(paths):
            nodes = {
                node
                for node in path
                if runs[Operation("F", microbatch, node)].start_s <= now
                and now < runs[Operation("B", microbatch, node)].end_s
            }
            if nodes:
                holds[microbatch] = nodes
        return holds

    for now in sorted({run.end_s for run in timeline.runs} | {0.0}):
        holds = held(now)
        to_go = {
            m: [n for n in paths[m] if runs[Operation("B", m, n)].end_s > now]
            for m in range(len(paths))
        }
        assert _can_all_end(to_go, holds, limits)
        for node in range(len(case.nodes)):
            here = [run for run in timeline.runs if run.operation.node == node]
            taken = sum(node in nodes for nodes in holds.values())
            busy = any(run.start_s <= now < run.end_s for run in here)
            if busy or taken == limits[node]:
                continue
            for run in here:
                if run.operation.kind == "F" and run.arrived_s <= now < run.start_s:
                    microbatch = run.operation.microbatch
                    started = holds | {microbatch: holds.get(microbatch, set()) | {node}}
                    assert not _can_all_end(to_go, started, limits)


# Orders that cannot run.


def test_an_order_that_locks_is_refused_and_names_the_operations():
    """Two inner stages on one node each, visited in opposite order by two microbatches."""
    case = same_place([1, 1, 1], microbatches_per_data_node=2, rules={"max_swaps": 1})
    plan, _ = planned(case, [[0], [1], [2]], [(0, 1, 2), (0, 2, 1)])
    order = [list(own) for own in plan.order]
    order[1] = [Operation("F", 1, 1), Operation("F", 0, 1), *order[1][2:]]
    order[2] = [Operation("F", 0, 2), Operation("F", 1, 2), *order[2][2:]]
    locked = (
        "the F of microbatch 1 on node 1 waits for the F of microbatch 1 on node 2; "
        "the F of microbatch 0 on node 2 waits for the F of microbatch 0 on node 1"
    )
    with refusal(f"plan.order = ...{locked}"):
        simulate_plan(replace(plan, order=tuple(map(tuple, order))))
