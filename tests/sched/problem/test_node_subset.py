"""A case of some of its nodes."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.node_subset import with_nodes

from tests.sched.examples import case_with, cases

# What a case reckons from its fields when it is asked.
RECKONED = {
    *("forward_hop_s", "backward_hop_s", "round_trip_s", "visit_load_s"),
    *("link_matrices", "pair_matrices", "location_matrices", "connection_rates"),
}
CHANGED = {"nodes", "stages", "microbatches", "source", *RECKONED}


@given(case=cases(), data=st.data())
@settings(max_examples=20)
def test_nodes_that_are_kept_stay_what_they_are(case, data):
    everyone = range(len(case.nodes))
    others = len(case.stages) - 1
    kept = data.draw(st.lists(st.sampled_from(everyone), min_size=others + 1, unique=True))
    sizes = [len(kept) - others] + [1] * others
    counts = data.draw(st.lists(st.integers(1, 4), min_size=sizes[0], max_size=sizes[0]))

    fewer = with_nodes(case, kept, sizes, counts)
    nodes = sorted(kept)
    assert fewer.nodes == tuple(case.nodes[node] for node in nodes)
    for table in ("forward_hop_s", "backward_hop_s"):
        assert np.array_equal(getattr(fewer, table), getattr(case, table)[np.ix_(nodes, nodes)])
    assert (fewer.stages, fewer.microbatches) == (tuple(sizes), tuple(counts))
    for name in vars(case).keys() - CHANGED:
        assert getattr(fewer, name) == getattr(case, name)

    again = parse_case(json.loads(json.dumps(dict(fewer.source))))
    for name in vars(fewer).keys() - RECKONED:
        assert getattr(again, name) == getattr(fewer, name)


def test_a_total_of_microbatches_becomes_what_each_data_node_sends():
    given = case_with(nodes=3, stages=[2, 1], microbatches_per_data_node=1).source
    given = {key: value for key, value in given.items() if key != "microbatches_per_data_node"}
    case = parse_case({**given, "microbatches": 5})
    assert with_nodes(case, [0, 1, 2], [2, 1], [1, 4]).microbatches == (1, 4)


def test_a_node_that_is_none_of_the_case_is_refused():
    with pytest.raises(InputError, match=r"nodes = \[0, 2\]: the case has no node 2"):
        with_nodes(case_with(), [2, 0], [1, 1], [1])
