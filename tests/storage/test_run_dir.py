"""What a run folder holds stays whole, whoever else still writes there."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.config import parse_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage import records
from skippipe_jax.storage.records import RecordWriter, ValidationMetrics, append_record
from skippipe_jax.storage.run_dir import METRICS, VALIDATION, RunDir
from skippipe_jax.training.setup import _warn_of_missing_links


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_host_that_was_stopped_adds_nothing_where_others_go_on(tmp_path: Path):
    config = parse_config({"run_dir": str(tmp_path)})
    with closing(RecordWriter(tmp_path / METRICS)) as stopped:
        stopped.append({"step": 1})
        stopped.append({"step": 2})
        RunDir(tmp_path).truncate_after(1, config)
        with closing(RecordWriter(tmp_path / METRICS)) as going_on:
            going_on.append({"step": 2})
            stopped.append({"step": 3})
            going_on.append({"step": 3})
    assert steps_of(tmp_path / METRICS) == [1, 2, 3]


def test_who_cannot_find_out_which_of_two_hosts_goes_on_may_try_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    two = Generation(2, (0, 1), (7, 8), 0, 20, placement=((0,), (1,)))
    assert RunDir(tmp_path).supports_links()
    assert RunDir(tmp_path).propose(two) == two

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert not RunDir(tmp_path).supports_links()
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
    with pytest.raises(TemporaryError, match=r"run_dir = .*Operation not permitted"):
        RunDir(tmp_path).propose(replace(two, number=3))


def test_hosts_are_warned_of_a_file_system_on_which_two_of_them_cannot_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _warn_of_missing_links(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(RunDir, "supports_links", lambda run: False)
    _warn_of_missing_links(tmp_path)
    assert "a file system without hard links" in "".join(capsys.readouterr())


@pytest.mark.parametrize("goes_on", [False, True])
def test_metrics_whose_file_has_gone_stale_are_opened_again_unless_others_go_on(
    tmp_path: Path, goes_on: bool, monkeypatch: pytest.MonkeyPatch
):
    """A server that was restarted, or another file in the place of this one, look the same."""
    add_line, stale = records.add_line, []

    def add(descriptor: int, line: dict[str, object]) -> None:
        if descriptor in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        add_line(descriptor, line)

    monkeypatch.setattr(records, "add_line", add)
    with closing(RecordWriter(tmp_path / METRICS)) as metrics:
        metrics.append({"step": 1})
        stale.append(metrics._file.fileno())
        if goes_on:
            RunDir(tmp_path).truncate_after(1, parse_config({"run_dir": str(tmp_path)}))
        metrics.append({"step": 2})
    steps = steps_of(tmp_path / METRICS)
    assert steps == ([1] if goes_on else [1, 2])


def test_validation_losses_of_an_earlier_version_are_kept(tmp_path: Path):
    """They stood among the metrics, and the run continues with a file for them."""
    for step in (1, 2, 3, 4):
        loss = {"validation_loss": 4.0 - step} if step % 2 == 0 else {"validation_loss": None}
        line = {"step": step, "loss": 2.0, "seconds_per_iteration": 1.0, "compilations": 0}
        append_record(tmp_path / METRICS, line | {"tokens_per_second": 10.0} | loss)
    run = RunDir(tmp_path)
    assert run.validation_losses() == {2: 2.0, 4: 0.0}
    run.truncate_after(3, parse_config({"run_dir": str(tmp_path)}))
    append_record(tmp_path / VALIDATION, ValidationMetrics(step=4, validation_loss=1.5))
    assert run.validation_losses() == {2: 2.0, 4: 1.5}
    assert [line.validation_loss for line in run.metrics()] == [None, 2.0, None]
