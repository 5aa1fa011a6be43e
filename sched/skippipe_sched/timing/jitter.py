"""Simulation of a plan with random deviations from the planned times."""

from __future__ import annotations

from itertools import chain

import numpy as np
from jaxtyping import Float

from skippipe_sched import fields
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.replay import Work
from skippipe_sched.timing.simulate import require_memory, simulate_plan
from skippipe_sched.timing.steady import successive_s
from skippipe_sched.timing.timeline import TimeFactors


def draw_time_factors(
    microbatches: int, stages: int, jitter: float, seed: int, draw: int
) -> TimeFactors:
    """Draw the factors of one draw: each operation, hop and averaging takes (1 + x) times as long.

    x is exponential with mean `jitter`. It belongs to the microbatch and the position in its chain,
    whatever the node, so that two plans of a case are compared with the same values; another jitter
    only scales the same x.
    """
    random = np.random.default_rng((seed, draw))
    averagings = 1.0 + jitter * random.standard_exponential(stages)
    longest_chain = 2 * stages + 1
    factors = 1.0 + jitter * random.standard_exponential((microbatches, longest_chain, 2))
    return TimeFactors(factors[..., 0], factors[..., 1], averagings)


def replay_with_jitter(
    plan: Plan, jitter: float, draws: int, seed: int = 0
) -> Float[np.ndarray, " draws"]:
    """Simulate `draws` iterations of a plan [s], each with its own factors (`draw_time_factors`).

    Every node keeps the plan's order, whatever the delays. In outer mode, the iterations follow one
    another in one run, after a cycle that is not counted, and each lasts from the end of the
    previous one to its own end.

    Raises:
        InputError: naming an invalid argument; or if the plan's own order cannot run.
    """
    jitter = fields.number(jitter, "--jitter", 0.0)
    fields.integer(draws, "--draws", 1)
    fields.integer(seed, "--seed", 0, fields.MAX_SEED)
    size = len(plan.microbatches), len(plan.stages)
    if plan.case.averaging.is_outer:
        every = plan.case.averaging.every
        factors_of_draws = (
            draw_time_factors(*size, jitter, seed, draw)
            for draw in chain(range(draws, draws + every), range(draws))
        )
        require_memory(plan)
        work = Work(plan.case, plan.stages, plan.microbatches, plan.order)
        return np.array(successive_s(work, factors_of_draws)[every:])
    factors_of_draws = (draw_time_factors(*size, jitter, seed, draw) for draw in range(draws))
    return np.array([simulate_plan(plan, factors).iteration_s for factors in factors_of_draws])
