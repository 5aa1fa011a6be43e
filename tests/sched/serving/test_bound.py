from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from skippipe_sched.serving.bound import bounds
from skippipe_sched.serving.case import ServingCase
from skippipe_sched.serving.placing import place
from skippipe_sched.serving.routing import routes
from skippipe_sched.serving.simulate import simulate

from tests.sched.serving.cases import (
    least_s,
    most_tokens_per_s,
    random_service,
    service,
    services,
)


@given(services())
def test_nothing_beats_the_bounds(case: ServingCase):
    """Neither any placement and routes of it, nor those that are found."""
    bound = bounds(case)
    assert bound.tokens_per_s >= most_tokens_per_s(case) * (1 - 1e-9)
    assert bound.seconds_per_token <= least_s(case) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_for_more_hosts_does_not_beat_them_either(seed: int):
    case = random_service(np.random.default_rng(seed), (7, 5), 2 + 2 * seed)
    bound = bounds(case)
    found = simulate(case, routes(case, place(case, tries=20), tries=20))
    assert found.tokens_per_s <= bound.tokens_per_s
    assert found.seconds_per_token >= bound.seconds_per_token * (1 - 1e-9)


def test_bounds_of_a_pipeline_are_met():
    """A step takes 10 s on any way through three hosts; the front is busy for 2 s of it."""
    assert bounds(service(groups=4)).seconds_per_token == 10
    assert bounds(service(groups=4)).tokens_per_s == pytest.approx(4 / 10)
    assert bounds(service(groups=9, slots=3)).tokens_per_s == pytest.approx(3 / 2, rel=1e-5)
