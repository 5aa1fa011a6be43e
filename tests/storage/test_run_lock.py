"""Who holds a folder, while a run begins and once its hosts lead one after the other."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.storage import run_lock
from skippipe_jax.storage.run_lock import LEASE, RunLock

START = 7


@pytest.fixture(params=["locks", "no locks"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a file system whose locks exclude others, or nobody."""
    if request.param == "no locks":
        monkeypatch.setattr(run_lock.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(run_lock, "RENEWED_S", 0.02)
    monkeypatch.setattr(run_lock, "EXPIRED_S", 2.0)
    monkeypatch.setattr(run_lock, "SETTLED_S", 0.05)
    return tmp_path / "run"


def assert_is_held(folder: Path) -> None:
    with RunLock(folder) as other, pytest.raises(TemporaryError, match="another training"):
        other.acquire()


def test_a_folder_is_held_by_one_training_until_it_is_released(folder: Path):
    with RunLock(folder) as first:
        first.acquire()
        assert_is_held(folder)
    assert not folder.exists(), "it was made for the hold, and is empty"
    with RunLock(folder) as second:
        second.acquire()


def test_a_run_holds_its_folder_whoever_of_its_hosts_leads(folder: Path):
    """Also where the first leader is stopped, and keeps what it has."""
    with RunLock(folder) as first, RunLock(folder) as next_leader:
        first.acquire()
        (folder / "config.yaml").touch()
        first.share(START)
        assert_is_held(folder)
        next_leader.acquire(START)
        first.release()
        assert_is_held(folder)
        next_leader.acquire(START)  # As it leads once more.
        assert_is_held(folder)
    with RunLock(folder) as another:
        another.acquire()


def test_a_leader_is_refused_where_another_training_has_begun_meanwhile(folder: Path):
    with RunLock(folder) as another, RunLock(folder) as late:
        another.acquire()
        with pytest.raises(TemporaryError, match="another training"):
            late.acquire(START)


def test_a_hold_that_is_not_taken_is_not_shared(folder: Path):
    with RunLock(folder) as lock:
        lock.share(START)
        assert not folder.exists()


@pytest.mark.parametrize("folder", ["no locks"], indirect=True)
@pytest.mark.parametrize("left", ['{"start": 1, "holder": "dead", "renewed": 3}', "garbage", "[]"])
def test_a_lease_that_nobody_renews_expires(
    folder: Path, left: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_lock, "EXPIRED_S", 0.1)
    folder.mkdir()
    (folder / LEASE).write_text(left)
    with RunLock(folder) as lock:
        lock.acquire()
        assert json.loads((folder / LEASE).read_text())["holder"] != "dead"
    assert not (folder / LEASE).exists()


@pytest.mark.parametrize("folder", ["no locks"], indirect=True)
def test_who_has_lost_its_lease_renews_it_no_more(folder: Path, capsys: pytest.CaptureFixture[str]):
    with RunLock(folder) as stopped:
        stopped.acquire()
        theirs = '{"start": 1, "holder": "other", "renewed": 1}'
        (folder / LEASE).write_text(theirs)
        [thread] = [own for own in threading.enumerate() if own.name == "lease"]
        thread.join(10)
        assert not thread.is_alive()
        assert "another training run took over the folder" in capsys.readouterr().err
    assert (folder / LEASE).read_text() == theirs
