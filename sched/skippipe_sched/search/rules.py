"""The rules of `skippipe_sched.problem.rules` on arrays, compiled."""

from __future__ import annotations

import numpy as np

from skippipe_sched.problem.rules import SHARE_TOLERANCE
from skippipe_sched.search.compiled import compiled


@compiled
def keeps_rules(problem, path):
    """CC1 and CC2 of one path, as rules.sequence_problem says them."""
    highest = 0
    previous = 0
    swaps = 0
    for i in range(1, path.shape[0]):
        stage = problem.stage_of_slot[path[i]]
        for k in range(i):
            if problem.stage_of_slot[path[k]] == stage:
                return False
        if stage - previous - 1 > problem.rules[2]:
            return False
        if stage < highest:
            swaps += 1
            if highest - stage > problem.rules[1]:
                return False
        else:
            highest = stage
        previous = stage
    return swaps <= problem.rules[0]


@compiled
def keeps_shares(problem, candidate, stage):
    """TC1 of one stage, as rules.violations says it."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    total = 0
    speeds = 0.0
    fastest_s = np.inf
    for slot in range(begin, end):
        total += candidate.visits[slot]
        fastest_s = min(fastest_s, problem.forward_s[candidate.node_of_slot[slot]])
    for slot in range(begin, end):
        speeds += fastest_s / problem.forward_s[candidate.node_of_slot[slot]]
    for slot in range(begin, end):
        share = total * (fastest_s / problem.forward_s[candidate.node_of_slot[slot]]) / speeds
        if candidate.visits[slot] < np.floor(share + SHARE_TOLERANCE):
            return False
        if candidate.visits[slot] > np.ceil(share - SHARE_TOLERANCE):
            return False
    return True


@compiled
def keeps_balance(problem, candidate):
    """CC3, as rules.violations says it."""
    least, most = np.int64(1) << 60, np.int64(0)
    for stage in range(1, problem.ring_bytes.shape[0]):
        total = 0
        for slot in range(problem.first_slot[stage], problem.first_slot[stage + 1]):
            total += candidate.visits[slot]
        least, most = min(least, total), max(most, total)
    return most - least <= 1
