"""What a session saves, where hosts are lost or told to stop meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.run import CheckpointConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.errors import GenerationEnded
from skippipe_jax.storage.checkpoint import COMMITTED, step_folder
from skippipe_jax.training import session as session_module
from skippipe_jax.training.callbacks.base import Callback, CallbackList, RunView
from skippipe_jax.training.session import Session


class Told(Callback):
    """Notes of which checkpoints it is told."""

    def __init__(self):
        self.told: list[int] = []

    def on_save(self, run: RunView, step: int) -> None:
        self.told.append(step)


class Opened(Session):
    """A session after a step, of which all metrics have been told."""

    def __init__(self, step: int, folder: Path = Path()):
        self.told, view = Told(), SimpleNamespace()
        callbacks: Any = CallbackList(view, [self.told])  # pyright: ignore[reportArgumentType]
        self.preemption = SimpleNamespace(must_stay=False, received=None)
        self.join_server = SimpleNamespace(has_ended=False)
        self._run: Any = SimpleNamespace(
            callbacks=callbacks,
            run_dir=folder,
            preemption=self.preemption,
            membership=SimpleNamespace(join_server=self.join_server),
        )
        self._config, self.step, self.saved, self.stop_signals = Config(), step, False, None
        self._saved_step, self._copied_step = -1, None
        self._metrics: Any = SimpleNamespace(completed=lambda lag: [], asked_to_stop=False)


def test_all_hosts_agree_on_whether_hosts_before_have_written_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Callbacks are told of it all the same: whoever leads may know only now that it is the best.

    One that is tried again is agreed on by another name, as a host that has not taken the first
    answer yet would wait for the second in vain.
    """
    names: list[str] = []

    def from_host_0(host: object, name: str, make: Callable[[], bool], _: float) -> bool:
        names.append(name)
        return make()

    monkeypatch.setattr(session_module, "from_host_0", from_host_0)
    begun, declared = list[int](), list[int]()
    monkeypatch.setattr(Group, "saved", lambda self, step: declared.append(step))
    session: Any = Opened(20, folder=tmp_path)
    session.group = Membership(ClusterConfig(), 0, 2).group_of(Generation(2, (0,), (0,), 0, 20))
    session._begin_checkpoint = begun.append
    folder = step_folder(tmp_path, 21)
    folder.mkdir(parents=True)
    (folder / COMMITTED).touch()
    for step in (20, 20, 21):
        session._save(step)
    assert (begun, declared, session.told.told) == ([20, 20], [21], [20, 20, 21])
    assert names == ["saves/20/1", "saves/20/2", "saves/21/1"]


def test_the_run_does_not_end_before_its_last_checkpoint_is_copied(monkeypatch: pytest.MonkeyPatch):
    """Where the leader is lost while it copies, those that are left open a session for the rest."""
    copied: list[str] = []

    def from_host_0(host: object, name: str, make: Callable[[], None], _: float) -> None:
        make()
        copied.append(name)
        if len(copied) == 1:
            raise GenerationEnded

    monkeypatch.setattr(session_module, "from_host_0", from_host_0)
    session: Any = Opened(20)
    session._config = Config(checkpoint=CheckpointConfig(copy_to="file:///copy"))
    session.group, session._saved_step, completed = None, 20, list[int]()
    session._checkpointer = SimpleNamespace(
        wait=lambda: True, complete_copy=lambda: completed.append(1)
    )
    with pytest.raises(GenerationEnded):
        session.save_final()
    assert not session.saved
    for _ in range(2):  # As it ends, a run comes here once more.
        session.save_final()
    assert (copied, completed, session.saved) == (["copied/20"] * 2, [1, 1], True)
    assert session.join_server.has_ended, "nobody joins it any more"
    assert session.stop_signals is None
