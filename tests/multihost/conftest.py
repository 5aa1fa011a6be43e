"""Processes that end with a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.processes import Processes, started_processes
from tests.harness.training_hosts import TrainingHosts


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """What the test starts; its output goes into a folder of its own."""
    with started_processes(tmp_path / "outputs") as processes:
        yield processes


@pytest.fixture
def begin(processes: Processes, config: Path, tmp_path: Path) -> Callable[..., TrainingHosts]:
    """Begin the run of the module's configuration, or of another, with options of the hosts."""
    return lambda *more, config=config, **options: TrainingHosts(
        processes, config, tmp_path / "run", more, **options
    )
