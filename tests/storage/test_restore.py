"""Choice of the checkpoint to resume from: without damaged ones, and the same on all hosts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.errors import CorruptCheckpoint, GenerationEnded
from skippipe_jax.storage import checkpoint as checkpoint_module
from skippipe_jax.storage.checkpoint import (
    CheckpointItems,
    committed_steps,
    open_checkpoint,
    steps_named,
)
from skippipe_jax.storage.loading import load_data_state, load_stage, stage_step
from skippipe_jax.storage.mirror import Mirror
from skippipe_jax.storage.restore import latest_intact, rewind
from tests.harness.thread_hosts import ThreadHost, on_hosts
from tests.storage.checkpoints import (
    LAYERS,
    abstract,
    assert_same,
    damage,
    every_part,
    prepare_run,
    stage_state,
    write,
    writer_of,
)


def step(run_dir: Path, number: int = 20) -> Path:
    return run_dir / "checkpoints" / f"{number:08d}"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def remove(path: Path) -> Path:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


def empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "bit of a stage": lambda folder: damage(max(files_of(folder / "stage_1"))),
    "missing file": lambda folder: remove(files_of(folder / "stage_0")[0]),
    "missing position in the text": lambda folder: remove(folder / "data.json"),
    "empty record": lambda folder: empty(folder / "COMMITTED"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_goes_on_from_the_checkpoint_before(
    name: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    path = DAMAGES[name](step(run_dir))
    checkpoint = prepare_run(run_dir, ThreadHost())
    assert checkpoint is not None
    assert checkpoint.step == 10
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {path} = ")
    assert line.endswith(". The run continues from step 10.")
    # Nobody reads it any more, and it is in nobody's way.
    assert committed_steps(run_dir) == [10]
    assert step(run_dir).with_name("00000020.damaged").is_dir()
    write(run_dir, [20])
    assert latest_intact(run_dir).step == 20


def test_all_hosts_go_on_from_what_is_whole_for_each(run_dir: Path):
    write(run_dir, [30, 40])
    damage(max(files_of(step(run_dir, 40) / "stage_1")))
    remove(step(run_dir, 30) / "data.json")
    looked: list[tuple[int, str]] = []

    def prepare(host: ThreadHost) -> int:
        part = "data.json" if host.index == 2 else f"stage_{host.index}"

        def parts(checkpoint: checkpoint_module.Checkpoint) -> list[str]:
            looked.append((checkpoint.step, part))
            return [part]

        checkpoint = prepare_run(run_dir, host, parts=parts)
        assert checkpoint is not None
        assert checkpoint.intact == {part}
        return checkpoint.step

    assert on_hosts(3, prepare) == [20, 20, 20]
    # Every host looks at its own parts only.
    parts = ("data.json", "stage_0", "stage_1")
    assert sorted(looked) == sorted((number, part) for number in (40, 30, 20) for part in parts)
    assert committed_steps(run_dir) == [20]


def test_damage_to_what_no_host_reads_is_none(run_dir: Path):
    damage(max(files_of(step(run_dir) / "stage_1")))
    checkpoint = prepare_run(run_dir, ThreadHost(), parts=lambda checkpoint: ["stage_0"])
    assert checkpoint is not None
    assert checkpoint.step == 20


def test_a_step_that_was_named_is_that_or_none(run_dir: Path):
    path = damage(max(files_of(step(run_dir) / "stage_1")))
    checkpoint = latest_intact(run_dir, 20)
    with pytest.raises(CorruptCheckpoint, match="the previous checkpoint: step 10") as caught:
        load_stage(checkpoint, LAYERS, 1, abstract(stage_state(201)))
    assert caught.value.field == str(path)
    assert committed_steps(run_dir) == [10, 20]


def test_where_none_is_whole_all_hosts_say_so_and_nothing_is_removed(run_dir: Path):
    for number in (10, 20):
        damage(step(run_dir, number) / "data.json")
    before = files_of(run_dir)
    for error in on_hosts(2, lambda host: prepare_run(run_dir, host)):
        assert isinstance(error, CorruptCheckpoint)
        assert error.field == str(step(run_dir, 10) / "data.json")
        assert "Start a new run: there is no earlier checkpoint" in str(error)
    assert files_of(run_dir) == before


def test_what_was_found_intact_is_not_read_twice_for_that(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint = prepare_run(run_dir, ThreadHost())
    assert checkpoint is not None
    monkeypatch.setattr(
        checkpoint_module, "file_digest", lambda path: pytest.fail(f"{path} is looked at again")
    )
    state = stage_state(201)
    assert_same(load_stage(checkpoint, LAYERS, 1, abstract(state)), state)
    assert load_data_state(checkpoint) == {"position": [20], "epoch": None}


# Going back while a run trains.


def leads() -> None:
    """Nobody goes on without this leader."""


def test_all_hosts_go_back_to_the_newest_that_is_whole_for_each(run_dir: Path):
    write(run_dir, [30, 40])
    damage(max(files_of(step(run_dir, 30) / "stage_1")))

    def back(host: ThreadHost) -> tuple[int, bool]:
        # The last host does not reach the folder.
        folder = run_dir if host.index < 2 else run_dir / "elsewhere"
        parts = (lambda checkpoint: [f"stage_{host.index}"]) if host.index < 2 else None
        found, checkpoint = rewind(folder, host, 30, parts=parts, require_leads=leads)
        return found, checkpoint is not None and checkpoint.intact == {f"stage_{host.index}"}

    assert on_hosts(3, back) == [(20, True), (20, True), (20, False)]
    # A later one of which those that decided knew nothing would be gone on from when it is resumed.
    assert committed_steps(run_dir) == [20]
    assert step(run_dir, 30).with_name("00000030.damaged").is_dir()


def test_a_leader_without_which_others_go_on_removes_nothing(run_dir: Path):
    write(run_dir, [30])
    unfinished = checkpoint_module.pending_folder(run_dir, 40, 9)
    unfinished.mkdir()

    def is_late() -> None:
        raise GenerationEnded

    with pytest.raises(GenerationEnded):
        rewind(run_dir, ThreadHost(), 20, parts=every_part, require_leads=is_late)
    assert committed_steps(run_dir) == [10, 20, 30]
    assert unfinished.is_dir()


def test_where_there_is_nothing_to_go_back_to_all_hosts_say_so(run_dir: Path):
    for error in on_hosts(
        2, lambda host: rewind(run_dir, host, 9, parts=every_part, require_leads=leads)
    ):
        assert isinstance(error, InputError)
        assert "no checkpoint to roll back to" in str(error)


# Other readers.


def test_no_model_is_read_where_no_checkpoint_is_whole(run_dir: Path):
    damage(max(files_of(step(run_dir) / "stage_1")))
    damage(step(run_dir, 10) / "COMMITTED")
    with pytest.raises(InputError, match="there is no earlier checkpoint"):
        latest_intact(run_dir)
    # Whoever only reads leaves all as it is.
    assert committed_steps(run_dir) == [10, 20]


# A copy of the run.


def copied(run_dir: Path, url: str) -> Mirror:
    mirror = Mirror(url)
    (run_dir / "config.yaml").touch()
    mirror.update(run_dir, [10, 20])
    return mirror


def test_a_damaged_checkpoint_is_fetched_from_the_copy(run_dir: Path, tmp_path: Path):
    mirror = copied(run_dir, f"file://{tmp_path}/copy")
    expected = {path: path.read_bytes() for path in files_of(step(run_dir))}
    damage(max(files_of(step(run_dir) / "stage_1")))
    (run_dir / "metrics.jsonl").write_text("later than in the copy")
    checkpoint = prepare_run(run_dir, ThreadHost(), mirror=mirror)
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert {path: path.read_bytes() for path in files_of(step(run_dir))} == expected
    assert (run_dir / "metrics.jsonl").read_text() == "later than in the copy"


def test_a_copy_that_is_damaged_too_is_removed(run_dir: Path, tmp_path: Path):
    damage(max(files_of(step(run_dir) / "stage_1")))
    mirror = copied(run_dir, f"file://{tmp_path}/copy")
    checkpoint = prepare_run(run_dir, ThreadHost(), mirror=mirror)
    assert checkpoint is not None
    assert checkpoint.step == 10
    # So that the run may copy its own step 20, and be resumed before it comes there.
    assert mirror.steps() == [10]
    mirror.prepare(run_dir, resume=True)


def test_an_earlier_checkpoint_is_fetched_where_the_last_is_damaged_in_the_copy(
    run_dir: Path, tmp_path: Path
):
    damage(step(run_dir) / "data.json")
    mirror, fetched = copied(run_dir, f"file://{tmp_path}/copy"), tmp_path / "fetched"
    mirror.prepare(fetched, resume=True)
    assert committed_steps(fetched) == [20]
    checkpoint = prepare_run(fetched, ThreadHost(), mirror=mirror)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert committed_steps(fetched) == mirror.steps() == [10]


def test_a_copy_that_cannot_be_read_is_told(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    damage(step(run_dir) / "data.json")
    (tmp_path / "bucket").write_text("in the way")
    checkpoint = prepare_run(run_dir, ThreadHost(), mirror=Mirror(f"file://{tmp_path}/bucket/copy"))
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert "warning: step 20 was not fetched from file://" in capsys.readouterr().err


def test_stages_that_a_run_went_on_without_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    writer = writer_of(tmp_path)
    for number, left_out in ((10, {}), (20, {1: 10})):
        stages = {stage: stage_state(stage) for stage in range(2)}
        writer.save(number, CheckpointItems(stages, stale_stages=left_out), {})
    writer.close()
    checkpoint = latest_intact(tmp_path)
    told = "warning: stage 1 of step 20 is 10 steps old: the run bypassed it after step 10\n"
    assert capsys.readouterr().err == told
    prepare_run(tmp_path, ThreadHost())
    assert capsys.readouterr().err == told
    assert [stage_step(checkpoint, LAYERS, stage) for stage in range(2)] == [20, 10]
    assert stage_step(checkpoint, (2,), 0) == 10, "under another cut"
    latest_intact(tmp_path, 10)
    assert capsys.readouterr().err == ""


# Which checkpoints of a run are there, and what counts as none.


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
