"""What a run folder holds stays whole, whoever else still writes there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

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
