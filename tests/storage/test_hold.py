"""Who holds a folder, while a run begins and once its hosts lead one after the other."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.storage import hold as hold_module
from skippipe_jax.storage import lease as lease_module
from skippipe_jax.storage.hold import Hold
from skippipe_jax.storage.lease import LEASE

START = 7


@pytest.fixture(params=["locks", "no locks"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a file system whose locks exclude others, or nobody."""
    if request.param == "no locks":
        monkeypatch.setattr(hold_module.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(lease_module, "RENEWED_S", 0.02)
    monkeypatch.setattr(lease_module, "EXPIRED_S", 2.0)
    monkeypatch.setattr(lease_module, "SETTLED_S", 0.05)
    return tmp_path / "run"


def assert_is_held(folder: Path) -> None:
    with Hold(folder) as other, pytest.raises(TemporaryError, match="another training"):
        other.take()


def test_a_folder_is_held_by_one_training_until_it_is_released(folder: Path):
    with Hold(folder) as first:
        first.take()
        assert_is_held(folder)
    assert not folder.exists(), "it was made for the hold, and is empty"
    with Hold(folder) as second:
        second.take()


def test_a_run_holds_its_folder_whoever_of_its_hosts_leads(folder: Path):
    """Also where the first leader is stopped, and keeps what it has."""
    with Hold(folder) as first, Hold(folder) as next_leader:
        first.take()
        (folder / "config.yaml").touch()
        first.share(START)
        assert_is_held(folder)
        next_leader.take(shared_by=START)
        first.release()
        assert_is_held(folder)
        next_leader.take(shared_by=START)  # As it leads once more.
        assert_is_held(folder)
    with Hold(folder) as another:
        another.take()


def test_a_leader_is_refused_where_another_training_has_begun_meanwhile(folder: Path):
    with Hold(folder) as another, Hold(folder) as late:
        another.take()
        with pytest.raises(TemporaryError, match="another training"):
            late.take(shared_by=START)


def test_a_hold_that_is_not_taken_is_not_shared(folder: Path):
    with Hold(folder) as hold:
        hold.share(START)
        assert not folder.exists()


@pytest.mark.parametrize("folder", ["no locks"], indirect=True)
@pytest.mark.parametrize("left", ['{"start": 1, "holder": "dead", "renewed": 3}', "garbage", "[]"])
def test_a_lease_that_nobody_renews_expires(
    folder: Path, left: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease_module, "EXPIRED_S", 0.1)
    folder.mkdir()
    (folder / LEASE).write_text(left)
    with Hold(folder) as hold:
        hold.take()
        assert json.loads((folder / LEASE).read_text())["holder"] != "dead"
    assert not (folder / LEASE).exists()


@pytest.mark.parametrize("folder", ["no locks"], indirect=True)
def test_who_has_lost_its_lease_renews_it_no_more(folder: Path, capsys: pytest.CaptureFixture[str]):
    with Hold(folder) as stopped:
        stopped.take()
        theirs = '{"start": 1, "holder": "other", "renewed": 1}'
        (folder / LEASE).write_text(theirs)
        [thread] = [own for own in threading.enumerate() if own.name == "lease"]
        thread.join(10)
        assert not thread.is_alive()
        assert "another training has taken the folder" in capsys.readouterr().err
    assert (folder / LEASE).read_text() == theirs
