"""The run folder fails for a while, or for good, while a run trains."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from skippipe_sched.errors import TEMPORARY_EXIT_CODE, InputError, TemporaryError

from skippipe_jax import Run
from skippipe_jax.config import Config, load_config
from skippipe_jax.errors import PeerTimeout
from skippipe_jax.storage import checkpointer as checkpointer_module
from skippipe_jax.storage import files, records
from skippipe_jax.storage.checkpoint import committed_steps
from skippipe_jax.storage.files import retry, temporary_failures
from skippipe_jax.storage.run_dir import BEST, RunDir
from skippipe_jax.training.trainer import Trainer
from tests.harness.training_runs import SMALL_CASE, write_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = write_config(
        tmp_path,
        run_dir=str(tmp_path / "run"),
        plan={"case": SMALL_CASE, "method": "balanced"},
        train={"steps": 4},
        checkpoint={"every": 2},
        validation={"every": 2, "sequences": 2},
    )
    return load_config(path)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that are made, which take no time."""
    made: list[float] = []
    for module in (files, checkpointer_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=made.append))
    return made


def failing(real: Callable[..., Any], *numbers: int) -> Callable[..., Any]:
    """A function that fails with these errors, and then no more."""
    left = [*numbers]

    def fails(*given: Any) -> Any:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return real(*given)

    return fails


def test_a_run_goes_on_when_its_folder_can_be_used_again(
    config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for module, name in (
        (records, "add_line"),
        (RunDir, "write_best"),
        (checkpointer_module, "commit"),
        # Of checkpoints what cannot be repeated: the first is left out, the last is saved again.
        (checkpointer_module, "synchronize"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, failing(real, errno.EIO, errno.ESTALE))
    Trainer(config).run()
    folder = Path(config.run_dir)
    assert [line["step"] for line in Run(folder).metrics] == [1, 2, 3, 4]
    assert json.loads((folder / BEST).read_text())["step"] in (2, 4)
    assert committed_steps(folder)[-1] == 4
    assert "retrying in" in capfd.readouterr().err


def test_a_folder_that_stays_unusable_ends_a_run_with_the_code_to_start_it_again(
    tmp_path: Path, pauses: list[float]
):
    """Not with that of wrong input, by which all hosts would end."""
    with pytest.raises(TemporaryError, match=r"run_dir = .*Input/output error") as caught:
        retry(tmp_path, failing(print, *[errno.EIO] * 100))
    assert caught.value.exit_code == TEMPORARY_EXIT_CODE
    assert pauses == [*files.RETRY_PAUSES_S]


def test_what_is_no_fault_of_the_folder_is_not_tried_again(tmp_path: Path, pauses: list[float]):
    for error in (
        InputError("run_dir", "x", "is wrong", "Change it"),
        PeerTimeout("nothing came"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ):
        with pytest.raises(type(error)):
            retry(tmp_path, failing_with(error))
        assert ends_by(tmp_path, error) is error
    assert pauses == []


def ends_by(folder: Path, error: Exception) -> BaseException:
    """By which error training ends in which this one is raised."""
    with pytest.raises(Exception) as caught, temporary_failures(folder):  # noqa: PT011
        raise error
    return caught.value


def failing_with(error: Exception) -> Callable[[], None]:
    def fails() -> None:
        raise error

    return fails


def test_only_what_lies_in_the_folder_of_the_run_counts_as_its_fault(tmp_path: Path):
    run = tmp_path / "run"
    own, other = (OSError(errno.EIO, "fails", str(path)) for path in (run / "a", tmp_path / "b"))
    assert isinstance(ends_by(run, own), TemporaryError)
    assert ends_by(run, other) is other
    told = InputError("run_dir", str(run), "cannot be used", "Mend it")
    told.__cause__ = OSError(errno.EACCES, "denied")
    assert isinstance(ends_by(run, told), TemporaryError)
