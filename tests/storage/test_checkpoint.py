"""Which checkpoints of a run are there, and what counts as none."""

from __future__ import annotations

import json

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.storage.checkpoint import open_checkpoint, steps_named
from tests.harness.thread_hosts import ThreadHost
from tests.storage.checkpoints import prepare_run


def test_a_run_goes_on_from_a_clean_folder(run_dir):
    unfinished = run_dir / "checkpoints" / "00000030" / "stage_0.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    checkpoint = prepare_run(run_dir, ThreadHost())
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert not unfinished.parent.exists()


def test_a_new_run_is_prepared_by_host_0_alone(tmp_path):
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    host = ThreadHost(count=2)
    with pytest.raises(TimeoutError):
        prepare_run(tmp_path, host.peer(1), timeout_s=0.1)
    assert prepare_run(tmp_path, host) is None
    assert prepare_run(tmp_path, host.peer(1)) is None
    assert not list((tmp_path / "checkpoints").iterdir())


def test_no_checkpoint(two_checkpoints, tmp_path):
    with pytest.raises(InputError, match="Name a run that has checkpoints"):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"= 15: .*Choose one of the steps \[10, 20\]"):
        open_checkpoint(two_checkpoints, 15)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00garbage",
        b'{"format": "skippipe',
        b"[]",
        b"{}",
        "format",
        "step",
        "stage_layers",
        "files",
    ],
)
def test_a_wrong_commit_record_is_named(run_dir, content):
    path = run_dir / "checkpoints" / "00000020" / "COMMITTED"
    if isinstance(content, str):
        content = json.dumps(json.loads(path.read_bytes()) | {content: 2}).encode()
    path.write_bytes(content)
    with pytest.raises(InputError, match="previous checkpoint: step 10") as caught:
        open_checkpoint(run_dir)
    assert caught.value.field == str(path)


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../../plan.json", "stage_0/../../x", "out/x", ""]
)
def test_a_commit_record_that_names_files_elsewhere_is_none(run_dir, name):
    path = run_dir / "checkpoints" / "00000020" / "COMMITTED"
    record = json.loads(path.read_bytes())
    record["files"][name] = "5 bytes"
    path.write_text(json.dumps(record))
    (path.parent / "out").symlink_to(run_dir)
    with pytest.raises(InputError, match="points outside") as caught:
        open_checkpoint(run_dir)
    assert caught.value.field == str(path)


def test_what_an_earlier_version_wrote(run_dir):
    path = run_dir / "checkpoints" / "00000020" / "COMMITTED"
    path.write_text(json.dumps({"format": "skippipe-checkpoint", "version": 1, "stages": 2}))
    with pytest.raises(
        InputError, match=r"version = 1: .*reads version 2\. Resume with the version"
    ):
        open_checkpoint(run_dir)


def test_other_folders_are_no_checkpoints():
    names = {"00000012", "00000003", "123456789", "3", "000000004", "0000000x", "kept", "-0000001"}
    assert steps_named(names) == [3, 12, 123456789]
