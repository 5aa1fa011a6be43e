"""What a run folder holds stays whole, whoever else still writes there."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.config import parse_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.run_folder import MetricsWriter
from skippipe_jax.training.setup import _warn_of_missing_links


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


def test_who_cannot_find_out_which_of_two_hosts_goes_on_may_try_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    two = Generation(2, (0, 1), (7, 8), 0, 20, placement=((0,), (1,)))
    assert run_folder.makes_links(tmp_path)
    assert run_folder.first_to_write(tmp_path, two) == two

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert not run_folder.makes_links(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
    with pytest.raises(TemporaryError, match=r"run_dir = .*Operation not permitted"):
        run_folder.first_to_write(tmp_path, replace(two, number=3))


def test_hosts_are_warned_of_a_file_system_on_which_two_of_them_cannot_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _warn_of_missing_links(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(run_folder, "makes_links", lambda folder: False)
    _warn_of_missing_links(tmp_path)
    assert "a file system without hard links" in "".join(capsys.readouterr())


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
