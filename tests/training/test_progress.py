"""What a run shows while it trains."""

from __future__ import annotations

from typing import cast

import pytest

from skippipe_jax.config import Config
from skippipe_jax.training.callbacks.base import RunView
from skippipe_jax.training.callbacks.progress import ProgressBar
from tests.step_metrics import metrics_of


@pytest.mark.parametrize(
    ("generation", "hosts", "told"),
    [(None, 4, ""), (1, 4, ""), (3, 2, ", 2 of 4 hosts, generation 3")],
)
def test_hosts_that_are_left_are_told_once_some_were_lost(
    generation: int | None, hosts: int, told: str, capsys: pytest.CaptureFixture[str]
):
    bar, view = ProgressBar(Config(), 4, 4, 0), cast(RunView, None)
    bar.on_step_end(view, metrics_of(5, generation=generation, hosts=hosts))
    bar.on_validation_end(view, 5, None)
    bar.close()
    shown = capsys.readouterr().err
    assert f"100 tokens/s{told}  " in shown
    assert "held-out" not in shown
