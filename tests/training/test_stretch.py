"""What callbacks are told of a step after which hosts are lost, or come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.checkpoint import CheckpointConfig
from skippipe_jax.config.run import ValidationConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import COMMITTED, step_folder
from skippipe_jax.training import stretch as stretch_module
from skippipe_jax.training.callbacks import KeptLines
from skippipe_jax.training.stretch import Stretch

CONFIG = Config(validation=ValidationConfig(every=20))


class Ends(Stretch):
    """A stretch that has made steps up to one, and has looked after all before some step."""

    def __init__(self, *steps: int, looked_after: int):
        self.told = KeptLines()
        self._trainer: Any = SimpleNamespace(callbacks=[self.told], is_over=False)
        self._config, self.looked_after, self.awaiting = CONFIG, looked_after, None
        self._validated_step, self._ahead = looked_after, 1
        self._validation: Any = SimpleNamespace(loss=lambda step: float(step))
        self.metrics: Any = SimpleNamespace(
            lines=lambda leave: self._lines([*steps], leave),
            validated=lambda step, loss: None,
            asked_to_stop=False,
        )

    def _lines(self, steps: list[int], leave: int) -> Iterator[Mapping[str, Any]]:
        yield from ({"step": n, "loss": 1.0} for n in steps[: len(steps) - leave])


def test_the_line_of_a_step_waits_until_that_is_validated_by_those_that_go_on():
    before = Ends(19, 20, looked_after=19)
    before.report()
    assert [line["step"] for line in before.told.lines] == [19]
    after = Ends(looked_after=19)
    after.awaiting = before.awaiting
    after.look_after(20)
    assert list(after.told.lines) == [{"step": 20, "loss": 1.0, "validation_loss": 20.0}]
    assert after.awaiting is None


def test_a_step_that_was_validated_is_told_of_at_once():
    stretch = Ends(20, 21, looked_after=20)
    stretch.report()
    assert [line["step"] for line in stretch.told.lines] == [20, 21]


def test_callbacks_are_told_of_a_checkpoint_that_hosts_before_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whoever leads now may know only now that it is the best."""
    monkeypatch.setattr(stretch_module, "from_host_0", lambda host, name, make, _: make())
    declared: list[int] = []
    monkeypatch.setattr(Team, "saved", lambda self, step: declared.append(step))
    stretch = Ends(looked_after=19)
    stretch.host = Team(Membership(ClusterConfig(), 0, 2), Generation(2, (0,), (0,), 0, 20))
    stretch._folder, told = tmp_path, list[int]()
    stretch._trainer.callbacks = [SimpleNamespace(after_save=lambda _, step: told.append(step))]
    folder = step_folder(tmp_path, 20)
    folder.mkdir(parents=True)
    (folder / COMMITTED).touch()
    stretch._save(20)
    assert (declared, told) == ([20], [20])


def test_the_run_does_not_end_before_its_last_checkpoint_is_copied(
    monkeypatch: pytest.MonkeyPatch,
):
    """Where the leader is lost while it copies, those that are left open a stretch for the rest."""
    copied: list[str] = []

    def from_host_0(host: object, name: str, make: Callable[[], None], _: float) -> None:
        make()
        copied.append(name)
        if len(copied) == 1:
            raise TeamEnded

    monkeypatch.setattr(stretch_module, "from_host_0", from_host_0)
    stretch: Any = Ends(looked_after=20)
    stretch._config = replace(CONFIG, checkpoint=CheckpointConfig(copy_to="file:///copy"))
    stretch.host, stretch._saved_step, completed = None, 20, list[int]()
    stretch._copied_step = None
    stretch._writer = SimpleNamespace(wait=lambda: True, complete_copy=lambda: completed.append(1))
    with pytest.raises(TeamEnded):
        stretch.save_the_last(20)
    for _ in range(2):  # As it ends, a run comes here once more.
        stretch.save_the_last(20)
    assert (copied, completed) == (["copied/20"] * 2, [1, 1])


def test_a_line_that_waits_is_forgotten_with_its_step_and_not_written_twice(tmp_path: Path):
    lines = KeptLines()
    lines.awaiting = {"step": 20, "loss": 0.5}
    run_folder.append_metrics(tmp_path, {"step": 19, "loss": 0.5})
    lines.forget(after=20)
    lines.write_the_missing(tmp_path)
    assert lines.awaiting is not None
    assert lines.last_loss == 0.5
    run_folder.append_metrics(tmp_path, {"step": 20, "loss": 0.5})
    lines.write_the_missing(tmp_path)
    assert lines.awaiting is None, "whoever was lost has written it"
    lines.awaiting = {"step": 20, "loss": 0.5}
    lines.forget(after=19)
    assert lines.awaiting is None
