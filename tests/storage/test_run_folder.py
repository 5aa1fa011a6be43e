"""What a run folder holds stays whole, whoever else still writes there."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from skippipe_jax.config import parse_config
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.run_folder import MetricsWriter


def test_a_host_that_was_stopped_adds_nothing_where_others_go_on(tmp_path: Path):
    config = parse_config({"run_dir": str(tmp_path)})
    with closing(MetricsWriter(tmp_path)) as stopped:
        stopped.append({"step": 1})
        stopped.append({"step": 2})
        run_folder.continue_run(tmp_path, config, 1)
        with closing(MetricsWriter(tmp_path)) as going_on:
            going_on.append({"step": 2})
            stopped.append({"step": 3})
            going_on.append({"step": 3})
    assert [line["step"] for line in run_folder.read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("goes_on", [False, True])
def test_metrics_whose_file_has_gone_stale_are_opened_again_unless_others_go_on(
    tmp_path: Path, goes_on: bool, monkeypatch: pytest.MonkeyPatch
):
    """A server that was restarted, or another file in the place of this one, look the same."""
    add_line, stale = run_folder.add_line, []

    def add(descriptor: int, line: dict[str, object]) -> None:
        if descriptor in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        add_line(descriptor, line)

    monkeypatch.setattr(run_folder, "add_line", add)
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.append({"step": 1})
        stale.append(metrics._file.fileno())
        if goes_on:
            run_folder.continue_run(tmp_path, parse_config({"run_dir": str(tmp_path)}), 1)
        metrics.append({"step": 2})
    steps = [line["step"] for line in run_folder.read_metrics(tmp_path)]
    assert steps == ([1] if goes_on else [1, 2])
