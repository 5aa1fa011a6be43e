"""How many microbatches a node may hold follows from its bytes, if a case says `memory: auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import parse_plan

from skippipe_jax.config import Config, parse_config
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.models.in_flight import (
    USABLE_SHARE,
    memory_use,
    memory_warnings,
    most_in_flight,
    names,
)
from skippipe_jax.models.node_memory import memory_of_stages
from skippipe_jax.models.planned_case import configured_cases
from skippipe_jax.training.planning import plan_of

MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
CASE: dict[str, Any] = {
    "nodes": 5,
    "locations": ["Belgium", "Iowa"],
    "links": "gcp12",
    "forward_s": 0.1,
    "stages": [2, 3],
    "path_length": 2,
    "microbatches_per_data_node": 6,
    "memory": "auto",
}


def config_of(case: dict[str, Any], **sections: Any) -> Config:
    data = {"sequence_length": 32, "microbatch_size": 2, **sections.pop("data", {})}
    model = MODEL | sections.pop("model", {})
    plan = {"case": case, "method": "balanced"}
    return parse_config({"model": model, "plan": plan, "data": data, **sections})


def memory_of(config: Config) -> list[int]:
    case, *_ = configured_cases(config, Path())
    return [node.memory for node in case.nodes]


def needed(config: Config, memory: int, **changes: Any) -> int:
    """Bytes that a node of the stage that takes most needs, if all may hold so many."""
    sized = CASE | {"activation_bytes": 1, "stage_bytes": 1, "memory": memory}
    return max(held.total for held in memory_of_stages(config, parse_case(sized | changes)))


def for_total(total: int) -> float:
    """The bytes of a device that may hold so many."""
    return total / USABLE_SHARE * (1 + 1e-9)


# What fits.


@st.composite
def small_configs(draw: st.DrawFn) -> Config:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    length = draw(st.integers(2, 24))
    dtypes = st.sampled_from(["float32", "bfloat16"])
    model = {
        "vocabulary_size": draw(st.integers(8, 300)),
        "width": heads * 2 * draw(st.integers(2, 8)),
        "layers": 6,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_width": draw(st.integers(8, 96)),
        "context": length,
        "tied_head": draw(st.booleans()),
        "parameter_dtype": draw(dtypes),
        "compute_dtype": draw(dtypes),
        "recompute": draw(st.sampled_from(RECOMPUTE)),
        "attention": draw(st.sampled_from(["auto", "blockwise"])),
    }
    data = {
        "sequence_length": length,
        "microbatch_size": draw(st.integers(1, 4)),
        "packing": draw(st.sampled_from(["windows", "documents"])),
    }
    travelling = st.sampled_from([None, "float32", "bfloat16", "int8"])
    network = {"activation_dtype": draw(travelling), "gradient_dtype": draw(travelling)}
    return parse_config({"model": model, "data": data, "network": network})


@st.composite
def problems(draw: st.DrawFn) -> tuple[Config, Case, list[int]]:
    """A configuration, a case with sizes of its own for every node, and the nodes left open."""
    config, stages = (
        draw(small_configs()),
        draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)),
    )
    layers = len(stages) + draw(st.integers(0, 3))
    # One block in each stage but the first one, which has the others.
    stage_layers = (layers - len(stages) + 1, *[1] * (len(stages) - 1))
    model = replace(config.model, layers=layers, stage_layers=stage_layers)
    config = replace(config, model=model)
    open_case = {
        "nodes": sum(stages),
        "stages": stages,
        "path_length": len(stages),
        "activation_bytes": 1,
        "stage_bytes": 1,
        "memory": draw(st.integers(1, 8)),
        "microbatches_per_data_node": draw(st.integers(1, 9)),
    }
    case = parse_case(CASE | open_case)
    one, two = (max(h.total for h in memory_of_stages(config, case, n)) for n in (1, 2))
    sizes = st.integers(0, 12).map(lambda more: for_total(one + more * max(two - one, 1)))
    nodes = [replace(node, memory_bytes=draw(sizes)) for node in case.nodes]
    left_open = draw(st.sets(st.sampled_from(range(len(nodes))), min_size=1))
    return config, replace(case, nodes=tuple(nodes)), sorted(left_open)


def with_memory(case: Case, counts: dict[int, int]) -> Case:
    nodes = [replace(n, memory=counts.get(i, n.memory)) for i, n in enumerate(case.nodes)]
    return replace(case, nodes=tuple(nodes))


def short(config: Config, case: Case, nodes: Sequence[int]) -> bool:
    return any(use.is_short for use in memory_use(config, case) if set(use.nodes) & set(nodes))


@settings(max_examples=30)
@given(problems())
def test_what_is_filled_in_fits_and_one_more_anywhere_does_not(
    problem: tuple[Config, Case, list[int]],
):
    config, case, left_open = problem
    found = most_in_flight(config, case, left_open)
    all_of_them = sum(case.microbatches)
    assert found.keys() == set(left_open)
    assert all(0 <= count <= all_of_them for count in found.values())
    with_room = [node for node in left_open if found[node] > 0]
    filled = with_memory(case, {node: max(1, count) for node, count in found.items()})
    assert not short(config, filled, with_room)
    for node in left_open:
        if 0 < found[node] < all_of_them:
            more = with_memory(filled, {node: found[node] + 1})
            assert short(config, more, with_room)
    # And where there is use for none, there is none even if all others hold but one.
    one_each = with_memory(case, dict.fromkeys(left_open, 1))
    for node in set(left_open) - set(with_room):
        assert short(config, one_each, [node])


SIZED = CASE | {"activation_bytes": 1, "stage_bytes": 1}


# What a case may say.


def test_nodes_may_have_bytes_or_a_number_of_their_own():
    config = config_of(CASE)
    small, large = for_total(needed(config, 3)), for_total(needed(config, 12))
    nodes: list[dict[str, Any]] = [{}, {"memory_bytes": large}, {"memory": 2}, {}, {}]
    config = config_of(CASE | {"nodes": nodes, "memory_bytes": small})
    case, *_ = configured_cases(config, Path())
    first, roomy, own, *_ = (node.memory for node in case.nodes)
    assert (roomy, own) == (12, 2)
    # More may wait on the small ones than if all were small.
    assert 1 <= first < 3
    assert parse_case(dict(case.source)).nodes == case.nodes
    assert not any(use.is_short for use in memory_use(config, case))
    # The other way round: one says auto, and all others have a number.
    nodes[1] |= {"memory": "auto"}
    config = config_of(CASE | {"nodes": nodes, "memory": 3, "memory_bytes": small})
    assert memory_of(config) == [3, 12, 2, 3, 3]


def test_stages_may_be_left_open_too_and_the_plan_has_numbers():
    open_stages = {"stages": "auto", "stage_count": 2, "path_length": "auto"}
    config = config_of(CASE)
    size = for_total(needed(config, 3))
    config = config_of(CASE | open_stages | {"memory_bytes": size})
    for case in configured_cases(config, Path()):
        assert most_in_flight(config, case, [0]) == {0: case.nodes[0].memory}
    plan = plan_of(config, Path())
    assert all(isinstance(node.memory, int) and node.memory >= 1 for node in plan.case.nodes)
    assert parse_plan(plan.to_json()).case.nodes == plan.case.nodes


def test_what_some_stages_leave_no_room_for_is_no_candidate():
    """More data nodes let more wait at once, so with three of them not one microbatch fits."""
    open_case = CASE | {"stages": "auto", "stage_count": 2, "microbatches_per_data_node": 1}
    size = for_total(needed(config_of(CASE), 1, stages=[2, 3]))
    all_of_them = configured_cases(config_of(open_case | {"memory_bytes": 1e12}), Path())
    left = configured_cases(config_of(open_case | {"memory_bytes": size}), Path())
    assert {case.stages[0] for case in all_of_them} == {2, 3, 4}
    assert {case.stages[0] for case in left} == {2}


# What is refused.


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({}, "case.memory_bytes", ["is missing", "Set memory_bytes"]),
        (
            {"memory_bytes": 4096},
            "case.memory_bytes",
            ["node 0 cannot hold one microbatch", "0.9 of 4.10 kB", "more stages or a smaller"],
        ),
        (
            {"memory_bytes": 1e9, "nodes": [{}, {}, {"memory_bytes": 5e4}, {}, {}]},
            "case.nodes[2].memory_bytes",
            ["node 2 cannot hold one microbatch", "stage 0 takes", "with 1 in flight", "45.0 kB"],
        ),
        ({"memory_bytes": -1}, "case.memory_bytes", ["greater than 0"]),
        ({"memory_bytes": "all"}, "case.memory_bytes", ["must be a number"]),
        ({"memory": "automatic"}, "case.memory", ["whole number"]),
        ({"nodes": "five"}, "case.nodes", ["whole number"]),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], field: str, words: list[str]):
    with pytest.raises(InputError) as caught:
        configured_cases(config_of(CASE | change), Path())
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


def test_a_way_out_is_named_that_is_one():
    """Recomputing the whole stage takes more while it runs, if there are few microbatches."""
    few = CASE | {"microbatches_per_data_node": 1, "memory_bytes": 4096}
    for recompute in RECOMPUTE:
        config = config_of(few, model={"recompute": recompute})
        with pytest.raises(InputError) as caught:
            configured_cases(config, Path())
        _, named, rest = caught.value.remedy.partition("model.recompute: ")
        taken = {own: needed(config_of(CASE, model={"recompute": own}), 1) for own in RECOMPUTE}
        # Some take as little as another one, and the memory of the host besides.
        best = min(RECOMPUTE, key=lambda own: (taken[own], own))
        assert rest.split(",")[0] == ("" if taken[recompute] == taken[best] else best), named


# What a number of its own is held against.


def test_a_number_that_is_too_great_is_warned_of_where_bytes_are_given():
    config = config_of(CASE)
    size = for_total(needed(config, 3))
    case = parse_case(SIZED | {"memory": 4, "memory_bytes": size})
    [sentence] = memory_warnings(config, case)
    assert sentence.startswith("case.memory = 4 is more than nodes 0-4 can hold: stage 0 takes ")
    assert "Use less, memory: auto, " in sentence
    own = {"memory": 100, "memory_bytes": size}  # More than there are microbatches.
    case = parse_case(SIZED | {"memory": 1, "memory_bytes": 1e18, "nodes": [{}, own, {}, {}, {}]})
    [sentence] = memory_warnings(config, case)
    assert sentence.startswith("case.nodes[1].memory = 100 is more than node 1 can hold: ")
    case = parse_case(SIZED | {"memory": 4, "memory_bytes": size})
    for fine in ({"memory": 3, "memory_bytes": size}, {"memory": 4}):
        assert memory_warnings(config, parse_case(SIZED | fine)) == []
    # A plan may have put small nodes where less is needed.
    nodes = [{"memory_bytes": 1e9}, {"memory_bytes": 1e9}, {}, {}, {}]
    small = max(memory_of_stages(config, case)[1:], key=lambda held: held.total).total
    case = parse_case(SIZED | {"nodes": nodes, "memory": 4, "memory_bytes": for_total(small)})
    assert len(memory_warnings(config, case)) == 1
    assert memory_warnings(config, case, (0, 0, 1, 1, 1)) == []
    assert len(memory_warnings(config, case, (1, 1, 0, 0, 1))) == 1


def test_nodes_are_named_by_their_runs():
    assert names([3]) == "node 3"
    assert names([0, 1, 2, 5, 7, 8]) == "nodes 0-2, 5, 7-8"
