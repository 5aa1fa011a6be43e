"""What a run shows while it trains."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skippipe_jax.config import Config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.training.callbacks import progress
from skippipe_jax.training.callbacks.base import RunView
from skippipe_jax.training.callbacks.progress import HostStatus, ProgressBar
from tests.harness.step_metrics import metrics_of


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


def test_a_host_that_does_not_lead_says_what_it_serves_and_how_far_the_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    topology = SimpleNamespace(stage_of={0: 0, 1: 1, 2: 3, 3: 2}, nodes=(1, 2))
    view: Any = SimpleNamespace(
        group=SimpleNamespace(
            hosts=(2, 5, 7), index=1, count=3, generation=Generation(1, (2, 5, 7), (0, 0, 0), 2, 0)
        ),
        runtime=SimpleNamespace(topology=topology),
    )
    status = HostStatus(100)
    status.on_train_begin(view)
    status.on_step_end(view, metrics_of(5))
    assert capsys.readouterr().err == "host 5 serves stages 1, 3; 3 hosts train, host 2 leads\n"
    view.group.generation = replace(view.group.generation, cause="host 6 was lost")
    status.on_train_begin(view)
    assert capsys.readouterr().err.startswith("host 6 was lost; host 5 serves stages 1, 3; ")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_STATUS", 0.0)
    status.on_step_end(view, metrics_of(6, 2.5))
    assert capsys.readouterr().err.startswith("host 5: step 6/100  loss 2.500  ")
