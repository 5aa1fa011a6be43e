"""The rules of paths against examples of each and definitions written again from the text."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Rules
from skippipe_sched.problem.plan import Plan, Predicted
from skippipe_sched.problem.rules import require_rules, sequence_problem, violations

from tests.sched.examples import in_order, routed_cases, same_place


def broken(case, stages, paths):
    return {violation.rule for violation in violations(case, stages, paths)}


@pytest.mark.parametrize(
    ("sequence", "rules", "problem"),
    [
        ((), Rules(0, 1, 0), "CC1: the path does not start at stage 0"),
        ((1, 2), Rules(0, 1, 5), "CC1: the path does not start at stage 0"),
        ((0, 2, 2), Rules(0, 1, 5), "CC1: the path visits a stage twice"),
        ((0, 2, 1, 3), Rules(0, 1, 1), "CC2: the path has 1 swaps, more than max_swaps = 0"),
        # Stages 1 and 2 both lie below 3, the highest before them.
        ((0, 3, 1, 2), Rules(1, 2, 2), "CC2: the path has 2 swaps"),
        ((0, 3, 2, 1), Rules(2, 1, 2), "CC2: stage 1 comes after stage 3, at a distance of more"),
        ((0, 1, 5), Rules(0, 1, 2), "CC2: the jump from stage 1 to 5 skips 3 stages"),
    ],
)
def test_a_broken_rule_of_a_sequence_is_named(sequence, rules, problem):
    assert (sequence_problem(sequence, rules) or "").startswith(problem)


def _keeps(sequence, rules):
    """CC1 and CC2, written again."""
    if sequence[0] != 0 or any(sequence.count(stage) > 1 for stage in sequence):
        return False
    back = [
        max(sequence[:i]) - stage
        for i, stage in enumerate(sequence)
        if any(earlier > stage for earlier in sequence[:i])
    ]
    passed = [len(range(a + 1, b)) for a, b in pairwise(sequence)]
    return (
        len(back) <= rules.max_swaps
        and all(distance <= rules.max_swap_distance for distance in back)
        and all(count <= rules.max_jump for count in passed)
    )


@given(
    st.lists(st.integers(0, 6), max_size=6) | st.permutations(range(1, 5)),
    st.builds(Rules, st.integers(0, 3), st.integers(1, 3), st.integers(0, 4)),
)
def test_sequences_are_judged_as_by_the_definition(inner, rules):
    sequence = [0, *inner]
    assert (sequence_problem(sequence, rules) is None) == _keeps(sequence, rules)


def test_placement_has_the_sizes_of_the_case():
    case = same_place([1, 2], path_length=2, microbatches_per_data_node=2)
    assert broken(case, [[0], [1, 2]], [(0, 1), (0, 2)]) == set()
    assert "placement" in broken(case, [[0, 1], [2]], [(0, 2), (0, 2)])
    assert "placement" in broken(case, [[0], [1], [2]], [(0, 1), (0, 2)])


def test_tc1_data_nodes_send_the_microbatches_of_the_case():
    case = same_place([2, 1], path_length=2, microbatches_per_data_node=[1, 2])
    stages = [[0, 1], [2]]
    assert broken(case, stages, [(0, 2), (1, 2), (1, 2)]) == set()
    assert broken(case, stages, [(0, 2), (0, 2), (1, 2)]) == {"TC1"}
    assert broken(case, stages, [(0, 2), (1, 2)]) == {"TC1"}


def test_shares_of_extreme_speeds_are_numbers():
    case = same_place(
        [1, 2],
        nodes=[{}, {"forward_s": 5e-324}, {"forward_s": 1e100}],
        path_length=2,
        microbatches_per_data_node=4,
    )
    assert broken(case, [[0], [1, 2]], [(0, 1)] * 4) == set()


@given(routed_cases())
def test_placement_and_paths_are_judged_as_by_the_definitions(example):
    case, stages, paths = example
    stage_of = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
    visits = {node: sum(node in path for path in paths) for node in stage_of}
    sums = [sum(visits[node] for node in nodes) for nodes in stages]
    expected = set()
    if not all(_keeps([stage_of[node] for node in path], case.rules) for path in paths):
        expected.add("CC2")
    if any(abs(a - b) > 1 for a in sums[1:] for b in sums[1:]):
        expected.add("CC3")
    for stage, nodes in enumerate(stages):
        if stage == 0:
            continue
        speeds = [1 / Fraction(case.nodes[node].forward_s) for node in nodes]
        for node, speed in zip(nodes, speeds, strict=True):
            # A share rounded down or up: less than one visit away, and none from a whole one.
            if abs(visits[node] - sums[stage] * speed / sum(speeds)) >= 1:
                expected.add("TC1")
    assert broken(case, stages, paths) == expected


def test_require_names_the_first_broken_rule():
    case = same_place([1, 2], path_length=2, microbatches_per_data_node=3)
    paths = ((0, 1), (0, 1), (0, 1))
    plan = Plan("example", in_order([1, 2]), paths, (), Predicted(1, 1, 0, 1), case)
    with pytest.raises(InputError, match=r"plan\.microbatches = 3: TC1: node 1 of stage 1 .*more"):
        require_rules(plan)
