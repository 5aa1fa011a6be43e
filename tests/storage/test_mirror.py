"""The copy of a run on another file system: what is there, what is fetched, what cannot be."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
import pytest
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.config import Config, load_config
from skippipe_jax.storage.checkpoint import COMMITTED, CheckpointItems, committed_steps
from skippipe_jax.storage.checkpointer import Checkpointer
from skippipe_jax.storage.mirror import Mirror
from skippipe_jax.storage.records import append_record
from skippipe_jax.storage.run_dir import BEST, METRICS
from skippipe_jax.storage.run_lock import RunLock
from tests.harness.messages import refusal
from tests.harness.training_runs import (
    SMALL_CASE,
    assert_same_run,
    settings,
    train_alone,
    write_config,
)
from tests.storage.checkpoints import writer_of


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder on a file system, that is empty again afterwards."""
    yield f"file://{tmp_path}/bucket/copy" if request.param == "file" else "memory://bucket/copy"
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def files_at(url: str) -> dict[str, bytes]:
    files, root = fsspec.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


def make_run(run_dir: Path) -> Path:
    run_dir.mkdir()
    for name in ("config.yaml", "plan.json", "metrics.jsonl"):
        (run_dir / name).write_text(f"of {run_dir.name}: {name}")
    names = ("tokenizer/tokenizer.json", "timelines/00000001/host_0.json", "a.partial")
    for name in (*names, "plans/full.json", "plans/from_2.json"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)
    return run_dir


def writer(run_dir: Path, mirror: Mirror | None, **options: Any) -> Checkpointer:
    return writer_of(run_dir, layers=(1,), keep=2, mirror=mirror, **options)


def save(checkpoints: Checkpointer, *steps: int, **metrics: float) -> None:
    for step in steps:
        checkpoints.save(
            step,
            CheckpointItems({0: {"w": jnp.full(1000, step, jnp.float32)}}),
            {"at": step},
            metrics,
        )


def write(run_dir: Path, url: str, *steps: int, **options: Any) -> None:
    checkpoints = writer(run_dir, Mirror(url), **options)
    save(checkpoints, *steps)
    checkpoints.close()


def files_in(run_dir: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run_dir).as_posix(): path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and "timelines" not in path.parts and path.suffix != ".partial"
    }


def test_the_copy_is_the_run_folder(tmp_path: Path, url: str):
    run_dir = make_run(tmp_path / "run")
    write(run_dir, url, 1, 2, 3, 4, 5, keep_every=2)
    assert committed_steps(run_dir) == Mirror(url).steps() == [2, 4, 5]
    assert files_at(url) == files_in(run_dir)

    (run_dir / "metrics.jsonl").write_text("more")
    # Of another recipe, under which the run goes on.
    (run_dir / "plans" / "from_2.json").unlink()
    write(run_dir, url, 6)
    assert committed_steps(run_dir) == Mirror(url).steps() == [5, 6]
    assert files_at(url) == files_in(run_dir)
    shutil.rmtree(run_dir / "plans")
    write(run_dir, url, 7)
    assert files_at(url) == files_in(run_dir)


def test_a_run_whose_folder_is_gone_is_fetched(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
):
    write(make_run(tmp_path / "run"), url, 1, 2)
    # Of a checkpoint that is being copied when the machine goes, there is no COMMITTED.
    files, root = fsspec.url_to_fs(url)
    files.makedirs(f"{root}/checkpoints/00000003", exist_ok=True)
    files.pipe_file(f"{root}/checkpoints/00000003/data.json", b"{")

    found = tmp_path / "found"
    Mirror(url).prepare(found, resume=True)
    assert capsys.readouterr().out == f"fetched step 2 of the run from {url} into {found}\n"
    expected = files_in(tmp_path / "run")
    assert files_in(found) == {n: c for n, c in expected.items() if "/00000001/" not in n}
    Mirror(url).prepare(found, resume=True)
    assert capsys.readouterr().out == ""
    write(found, url, 3)
    assert Mirror(url).steps() == [2, 3]
    assert files_at(url) == files_in(found)


def test_the_best_checkpoint_is_fetched_too_and_what_is_kept_for_good_stays_in_the_copy(
    tmp_path: Path, url: str
):
    def save_validated(run_dir: Path, losses: dict[int, float]) -> None:
        with closing(writer(run_dir, Mirror(url), keep_every=4)) as checkpoints:
            for step, loss in losses.items():
                save(checkpoints, step, validation_loss=loss)

    save_validated(make_run(tmp_path / "run"), {1: 3.0, 2: 1.0, 3: 4.0, 4: 5.0, 5: 6.0, 6: 7.0})
    found = tmp_path / "found"
    Mirror(url).prepare(found, resume=True)
    assert committed_steps(found) == [2, 6]
    save_validated(found, {7: 8.0, 9: 9.0})
    assert committed_steps(found) == [2, 7, 9]
    assert Mirror(url).steps() == [2, 4, 7, 9]
    assert json.loads((found / BEST).read_text())["step"] == 2


def test_fetching_that_was_broken_off_begins_again(tmp_path: Path, url: str):
    write(make_run(tmp_path / "run"), url, 1)
    expected = files_in(tmp_path / "run")
    for broken in sorted(expected):
        found = shutil.copytree(tmp_path / "run", tmp_path / "found")
        # The config comes last.
        (found / "config.yaml").unlink()
        if broken != "config.yaml":
            (found / broken).write_bytes(expected[broken][:1])
        Mirror(url).prepare(found, resume=True)
        assert files_in(found) == expected
        shutil.rmtree(found)


def test_copying_that_fails_is_told_at_once_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = make_run(tmp_path / "run")
    obstacle = tmp_path / "bucket"
    url = f"file://{obstacle}/copy"
    mirror = Mirror(url)
    mirror.prepare(tmp_path / "new", resume=False)
    obstacle.write_text("in the way")

    checkpoints = writer(run_dir, mirror)
    for step in (1, 2, 3):
        save(checkpoints, step)
        checkpoints.wait()
        checkpoints._copying.submit(lambda: None).result()
    checkpoints.close()
    first, second, third, last = capsys.readouterr().err.splitlines()
    for line in (first, second, third):
        assert line.startswith(f"warning: checkpoints not copied to {url}: NotADirectoryError")
    assert last == f"warning: checkpoints of steps [2, 3] not copied to {url}"
    assert committed_steps(run_dir) == [2, 3]

    obstacle.unlink()
    write(run_dir, url, 4)
    assert capsys.readouterr().err == ""
    assert Mirror(url).steps() == [3, 4]


def test_on_a_slow_link_one_copy_waits_and_no_old_checkpoints_pile_up(tmp_path: Path):
    class Slow(Mirror):
        """Begins to copy, and goes on when it is told to."""

        def update(self, run_dir: Path, steps: Collection[int]) -> None:
            begun.append(sorted(steps))
            has_begun.set()
            assert go_on.wait(60)
            assert set(steps) <= set(committed_steps(run_dir)), (
                "what is being copied is not removed"
            )
            super().update(run_dir, steps)

    begun: list[list[int]] = []
    has_begun, go_on = threading.Event(), threading.Event()
    run_dir = make_run(tmp_path / "run")
    checkpoints = writer(run_dir, Slow(f"file://{tmp_path}/copy"))
    save(checkpoints, 1)
    assert has_begun.wait(60)
    save(checkpoints, *range(2, 9))
    checkpoints.wait()
    assert committed_steps(run_dir) == [1, 7, 8]
    go_on.set()
    checkpoints.close()
    assert begun == [[1], [7, 8]]
    assert committed_steps(run_dir) == Mirror(f"file://{tmp_path}/copy").steps() == [7, 8]


def test_the_copy_that_a_lost_leader_has_begun_is_completed_by_the_next(tmp_path: Path, url: str):
    run_dir = make_run(tmp_path / "run")
    write(run_dir, url, 1)
    with closing(writer(run_dir, None)) as lost:
        save(lost, 2)
    mirror = Mirror(url)
    mirror.steps()
    checkpoints = writer(run_dir, mirror)
    checkpoints.complete_copy()
    assert Mirror(url).steps() == [1, 2]
    assert files_at(url) == files_in(run_dir)
    checkpoints.close()


def test_only_files_that_have_changed_are_sent_again(tmp_path: Path, url: str):
    class Watched(Mirror):
        """Notes which of the run's own files it sends."""

        def _write(self, name: str, content: bytes) -> None:
            super()._write(name, content)
            if not name.endswith(COMMITTED):
                sent.append(name)

    sent: list[str] = []
    run_dir = make_run(tmp_path / "run")
    checkpoints = writer(run_dir, Watched(url))

    def sent_with(step: int) -> list[str]:
        sent.clear()
        save(checkpoints, step)
        checkpoints.wait()
        checkpoints._copying.submit(lambda: None).result()
        return sorted(sent)

    own = [name for name in sorted(files_in(run_dir)) if "checkpoints" not in name]
    assert sent_with(1) == own
    assert sent_with(2) == []
    append_record(run_dir / METRICS, {"step": 3})
    assert sent_with(3) == ["metrics.jsonl"]
    checkpoints.close()
    assert files_at(url) == files_in(run_dir)


# Two that resume one run, and one folder.


def train_in(folder: Path, run_dir: str, **changes: Any) -> None:
    path = write_config(folder, plan={"case": SMALL_CASE, "method": "balanced"})
    changes = {"run_dir": folder / run_dir, "train__steps": 1, **changes}
    train_alone(load_config(path, settings(**changes)[1::2]), resume=True)


def test_nothing_is_fetched_into_a_folder_that_another_holds(tmp_path: Path):
    url = f"file://{tmp_path}/copy"
    write(make_run(tmp_path / "run"), url, 1)
    with RunLock(tmp_path / "found") as lock:
        lock.acquire()
        with pytest.raises(TemporaryError, match="another training run is writing to it"):
            train_in(tmp_path, "found", checkpoint__copy_to=url)
        assert not list((tmp_path / "found").iterdir())


def test_a_folder_that_was_made_to_fetch_into_vanishes_when_nothing_is_there(tmp_path: Path):
    with pytest.raises(InputError, match="has no checkpoint"):
        train_in(tmp_path, "a/found", checkpoint__copy_to=f"file://{tmp_path}/copy")
    assert not (tmp_path / "a").exists()


def test_a_folder_is_held_that_vanishes_while_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, lock, locked = tmp_path / "run", fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not locked:  # The one that held it ends at this moment.
            folder.rmdir()
        locked.append(descriptor)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunLock(folder) as run:
        run.acquire()
        assert len(locked) == 3, "twice, and to see that the lock excludes others"
        with pytest.raises(TemporaryError, match="another training"):
            RunLock(folder).acquire()


# What cannot be.


def refused(url: str, run_dir: Path, *, resume: bool) -> InputError:
    with pytest.raises(InputError) as caught:
        Mirror(url).prepare(run_dir, resume=resume)
    assert (caught.value.field, caught.value.value) == ("checkpoint.copy_to", url)
    return caught.value


def test_the_copy_of_another_run(tmp_path: Path, url: str):
    run_dir = make_run(tmp_path / "run")
    write(run_dir, url, 5)
    assert "has a checkpoint of step 5" in refused(url, tmp_path / "new", resume=False).problem
    shutil.rmtree(run_dir / "checkpoints")
    assert "has not reached" in refused(url, run_dir, resume=True).problem
    nothing = refused(f"{url}/nothing", tmp_path / "new", resume=True)
    assert "has no checkpoint" in nothing.problem


@pytest.mark.parametrize("where", ["", "/copy", "/checkpoints/../copy/"])
def test_a_copy_in_the_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    monkeypatch.chdir(tmp_path)
    for resume in (False, True):
        assert "is inside run" in refused(f"run{where}", Path("run"), resume=resume).problem
    Mirror("run2").prepare(Path("run"), resume=False)


@pytest.mark.parametrize(
    "name", ["run/../../evil.txt", "checkpoints/00000002/../../../../evil.txt", "link/evil.txt"]
)
def test_what_would_be_written_elsewhere_is_not_fetched(tmp_path: Path, name: str):
    url = "memory://bucket/keys"
    write(make_run(tmp_path / "run"), url, 2)
    files, root = fsspec.url_to_fs(url)
    files.pipe_file(f"{root}/{name}", b"evil")
    found = tmp_path / "a" / "found"
    found.mkdir(parents=True)
    (found / "link").symlink_to(tmp_path)
    try:
        told = refused(url, found, resume=True)
    finally:
        files.rm("/bucket", recursive=True)
    assert f"the path {name!r} points outside {found}" in told.problem
    assert [path.name for path in found.iterdir()] == ["link"]
    assert not list(tmp_path.rglob("evil.txt"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://bucket", "Protocol not known: nosuch"),
        pytest.param(
            "gs://bucket/run",
            "gcsfs",
            marks=pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is there"),
        ),
    ],
)
def test_a_file_system_that_is_not_there(url: str, reason: str):
    with refusal(f"checkpoint.copy_to = ...{reason}"):
        Mirror(url)


def test_a_copy_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bucket").write_text("in the way")
    url = f"file://{tmp_path}/bucket/copy"
    assert "NotADirectoryError" in refused(url, tmp_path / "run", resume=False).problem
    assert "NotADirectoryError" in refused(url, tmp_path / "run", resume=True).problem
    # A run that is here goes on without.
    Mirror(url).prepare(make_run(tmp_path / "run"), resume=True)
    assert capsys.readouterr().err.startswith("warning: checkpoint.copy_to = ")


# Training.


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_training_goes_on_from_the_copy(tmp_path: Path, url: str):
    path = write_config(tmp_path, plan={"case": SMALL_CASE, "method": "balanced"})

    def load(run_dir: str, steps: int, **changes: Any) -> Config:
        every = {"checkpoint__every": 2, "checkpoint__keep": 2}
        changes = {"run_dir": tmp_path / run_dir, "train__steps": steps, **every, **changes}
        return load_config(path, settings(**changes)[1::2])

    train_alone(load("whole", 6))
    train_alone(load("run", 4, checkpoint__copy_to=url))
    shutil.rmtree(tmp_path / "run")
    train_alone(load("run", 6, checkpoint__copy_to=url), resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole", 6)
    assert Mirror(url).steps() == [4, 6]
    with pytest.raises(InputError, match="has a checkpoint of step 6"):
        train_alone(load("another", 6, checkpoint__copy_to=url))
    assert not (tmp_path / "another").exists()
