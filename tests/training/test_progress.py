"""What a run shows while it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.config import Config
from skippipe_jax.training.progress import ProgressBar


def line(generation: int | None, hosts: int) -> dict[str, Any]:
    return {
        "step": 5,
        "loss": 2.0,
        "validation_loss": None,
        "skipped_updates": 0,
        "network": "real",
        "tokens_per_second": 100.0,
        "seconds_per_iteration": 1.0,
        "compilations": 0,
        "generation": generation,
        "hosts": hosts,
    }


@pytest.mark.parametrize(
    ("generation", "hosts", "told"),
    [(None, 4, ""), (1, 4, ""), (3, 2, ", 2 of 4 hosts, generation 3")],
)
def test_hosts_that_are_left_are_told_once_some_were_lost(
    generation: int | None, hosts: int, told: str, capsys: pytest.CaptureFixture[str]
):
    bar = ProgressBar(Config(), 4, 0)
    trainer: Any = SimpleNamespace(membership=SimpleNamespace(count=4))
    bar.after_step(trainer, line(generation, hosts))
    bar.close()
    assert f"100 tokens/s{told}  " in capsys.readouterr().err
