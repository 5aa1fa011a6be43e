"""Which hosts serve what once others are lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skippipe_jax.config import Config
from skippipe_jax.training.elastic.membership_change import elastic_rules
from tests.sched.examples import plan_of

PLAN = plan_of([[0, 1], [2, 3]], [[0, 2], [0, 3], [1, 2], [1, 3]], path_length=2)


def test_who_may_lack_the_text_does_not_move_to_the_data_stage(tmp_path: Path):
    settled: Any = SimpleNamespace(host_of=(0, 1, 2, 3), plan=PLAN)
    rules = elastic_rules(Config(run_dir=str(tmp_path)), settled)
    left = frozenset({2, 3})
    assert rules.placed(PLAN.stages, left, (), ()) == ((0, 1, 2), (3,))
    assert rules.placed(PLAN.stages, left, (2,), ()) == ((0, 1, 3), (2,))
    assert rules.placed(PLAN.stages, left, (2, 3), ()) is None
    # Who has served it has the text.
    moved = ((0, 1, 2), (3,))
    assert rules.placed(moved, frozenset({0, 1, 2}), (0, 1, 2), ()) is not None
    assert rules.placed(moved, left, (2, 3), ()) == moved
