"""A checkpoint is written by all hosts, and counts once it is whole, whoever fails or is killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.config.run import CheckpointConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.errors import CheckpointFailed, CorruptCheckpoint, GenerationEnded
from skippipe_jax.storage import checkpoint as checkpoint_module
from skippipe_jax.storage import checkpointer as checkpointer_module
from skippipe_jax.storage.checkpoint import (
    COMMITTED,
    CheckpointItems,
    ReplicaStates,
    committed_steps,
    latest_step,
    open_checkpoint,
    pending_folder,
    remove_unfinished,
    step_folder,
)
from skippipe_jax.storage.checkpointer import best_step, retained
from skippipe_jax.storage.loading import load_data_state, load_replica, load_stage
from skippipe_jax.storage.records import append_record
from skippipe_jax.storage.run_dir import BEST, VALIDATION, RunDir
from tests.harness.processes import started_processes
from tests.harness.thread_hosts import ThreadHost
from tests.sched.examples import plan_of
from tests.storage.checkpoints import (
    LAYERS,
    abstract,
    both_stages,
    prepare_run,
    stage_state,
    write,
    writer_of,
)


def test_arrays_may_be_donated_once_save_returns(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    writer = writer_of(tmp_path, layers=(1,))
    state = {"params": {f"w{i}": jnp.full((512, 1024), i, jnp.float32) for i in range(8)}}
    expected = jax.tree.map(np.array, state)
    writer.save(1, CheckpointItems({0: state}), {})
    for _ in range(5):
        state = overwrite(state)
    jax.block_until_ready(state)
    writer.save(2, CheckpointItems({0: state}), {})
    writer.close()
    saved = load_stage(open_checkpoint(tmp_path, 1), (1,), 0, abstract(state))
    jax.tree.map(np.testing.assert_array_equal, saved, expected)
    saved = load_stage(open_checkpoint(tmp_path, 2), (1,), 0, abstract(state))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, -1), saved)


def test_where_hosts_may_be_lost_the_checkpoint_before_the_last_is_kept(tmp_path):
    """A host that has not heard of the last one has all go back to the one before."""
    write(tmp_path, [1, 2, 3], keep=1, generation=5)
    assert committed_steps(tmp_path) == [2, 3]


@given(
    losses=st.lists(st.none() | st.floats(0, 9), max_size=12),
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 5),
)
def test_the_last_the_best_and_every_nth_are_retained(losses, keep, keep_every):
    saved, config = dict(enumerate(losses, 1)), CheckpointConfig(1, keep, keep_every)
    kept, best = retained(config, saved), best_step(saved)
    known = [x for x in losses if x is not None]
    assert (None if best is None else losses[best - 1]) == min(known, default=None)
    for step in saved:
        is_regular = keep_every is not None and step % keep_every == 0
        assert (step in kept) == (step > len(losses) - keep or is_regular or step == best)
    # What was removed before changes nothing later.
    assert retained(config, {step: saved[step] for step in kept}) == kept


def test_a_step_is_not_saved_twice(run_dir):
    with pytest.raises(InputError, match="already exists"):
        write(run_dir, [20])


def test_orbax_is_quiet_where_others_are_not(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        write(tmp_path, [1])
        load_stage(open_checkpoint(tmp_path), LAYERS, 0, abstract(stage_state(10)))
        logging.getLogger("absl").info("another library")
    assert [record.getMessage() for record in caplog.records] == ["another library"]


def test_only_who_writes_changes_what_other_libraries_print(tmp_path):
    program = """
import logging, sys
import skippipe_jax.storage.loading
assert sys.unraisablehook is sys.__unraisablehook__
assert not logging.getLogger("absl").filters + logging.getLogger("asyncio").filters
"""
    with started_processes(tmp_path) as processes:
        processes.start("-c", program)
        assert processes.exit_code(0, 60) == 0, processes.outputs()


def test_a_run_of_an_earlier_version_keeps_its_best_checkpoint(tmp_path):
    """Its commit records have no metrics: the losses are in a file of the run."""
    write(tmp_path, [1, 2, 3])
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        path = step_folder(tmp_path, step) / COMMITTED
        record = json.loads(path.read_text())
        assert record.pop("metrics") == {}
        path.write_text(json.dumps(record))
        append_record(tmp_path / VALIDATION, {"step": step, "validation_loss": loss})
    write(tmp_path, [4, 5], keep=1)
    assert committed_steps(tmp_path) == [2, 5]
    assert json.loads((tmp_path / BEST).read_text()) == {"step": 2, "validation_loss": 1.0}
    # A run that goes on from before the best has none yet.
    shutil.rmtree(step_folder(tmp_path, 2))
    writer_of(tmp_path).close()
    assert not (tmp_path / BEST).exists()


def test_what_was_begun_is_written_to_its_end_where_the_next_part_cannot_be_begun(
    tmp_path, monkeypatch
):
    begin, ended = checkpointer_module.begin_writing, []

    @contextlib.contextmanager
    def written(folder, state):
        try:
            with begin(folder, state):
                yield
        finally:
            ended.append(folder.name)

    def begins(folder, state):
        if folder.name == "stage_1":
            raise ValueError("no such stage")
        return written(folder, state)

    monkeypatch.setattr(checkpointer_module, "begin_writing", begins)
    writer = writer_of(tmp_path)
    writer.save(1, both_stages(1), {})
    with pytest.raises(CheckpointFailed, match="no such stage"):
        writer.wait()
    assert ended == ["stage_0"]
    writer.close()


# Hosts.


def two_writers(run_dir, **options):
    host = ThreadHost(count=2)
    return [writer_of(run_dir, own, **options) for own in (host, host.peer(1))]


@pytest.fixture
def writers(tmp_path):
    """Return the checkpointers of two hosts."""
    both = two_writers(tmp_path)
    yield both
    for writer in both:
        writer.close()


def save(writers, step):
    """Each of two hosts saves its stage, the first one the data too."""
    for stage, writer in enumerate(writers):
        writer.save(step, CheckpointItems({stage: stage_state(stage)}), None if stage else {})


def test_a_checkpoint_waits_for_every_host_and_save_does_not(tmp_path, writers):
    first, second = writers
    first.save(3, CheckpointItems({0: stage_state(0)}), {})
    time.sleep(0.3)
    assert latest_step(tmp_path) is None
    second.save(3, CheckpointItems({1: stage_state(1)}), None)
    second.wait()
    assert latest_step(tmp_path) == 3


def test_own_states_of_replicas_are_part_of_a_checkpoint_bit_by_bit(tmp_path, writers):
    """Of stage 1 there are two replicas, one on each host; it is whole with both."""
    first, second = writers
    own = ReplicaStates((0, 2), {"every": 4})
    states = [{"residual": stage_state(place), "under_way": {"8": {}}} for place in range(2)]
    first.save(3, CheckpointItems({0: stage_state(0)}, {(1, 0): states[0]}, own), {})
    second.save(3, CheckpointItems({1: stage_state(1)}, {(1, 1): states[1]}, own), None)
    second.wait()
    checkpoint = open_checkpoint(tmp_path, 3)
    assert checkpoint.record.replica_states == own
    for place, state in enumerate(states):
        found = load_replica(checkpoint, 1, place, lambda _, own=state: abstract(own))
        jax.tree.map(np.testing.assert_array_equal, found, state)
    more = {**states[0], "parameters": stage_state(0)}
    with pytest.raises(InputError, match=r"replica_1_0.*no array of this name"):
        load_replica(checkpoint, 1, 0, lambda _: abstract(more))
    # Which of them are to be there all hosts know: less is no checkpoint.
    first.save(4, CheckpointItems({0: stage_state(0)}, {}, own), {})
    second.save(4, CheckpointItems({1: stage_state(1)}, {(1, 1): states[1]}, own), None)
    with pytest.raises(CheckpointFailed, match="replica_1_0"):
        first.wait()
    with pytest.raises(CheckpointFailed):
        second.wait()
    assert latest_step(tmp_path) == 3
    (checkpoint.folder / "replica_1_1" / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptCheckpoint, match="missing"):
        load_replica(checkpoint, 1, 1, lambda _: abstract(states[1]))


def fail_part(monkeypatch, stage, error):
    """Let the part with this stage not be written."""
    complete = checkpointer_module._complete_part

    def fails(folder, parts, texts):
        if f"stage_{stage}" in parts:
            raise error
        return complete(folder, parts, texts)

    monkeypatch.setattr(checkpointer_module, "_complete_part", fails)


@pytest.mark.parametrize("broken", [0, 1])
def test_every_host_learns_that_one_failed(tmp_path, writers, broken, monkeypatch):
    """The kind of the error decides, not its text, which names an error that is tried again."""
    fail_part(monkeypatch, broken, ValueError("NotWritten: in the text of another error"))
    save(writers, 3)
    for writer in writers:
        with pytest.raises(CheckpointFailed, match="ValueError: NotWritten: in the text") as caught:
            writer.wait()
        named = f"host {broken + 5} failed at 'checkpoint/3/part'" in str(caught.value)
        assert named == (writer is not writers[broken])
    assert latest_step(tmp_path) is None
    monkeypatch.undo()
    save(writers, 4)  # The next checkpoint is none the worse.
    for writer in writers:
        assert writer.wait()
    assert latest_step(tmp_path) == 4


def of_generation(run_dir, generation, step):
    """A writer of a generation that has begun the checkpoint of a step, but not all of it."""
    writer, write_slowly = writer_of(run_dir, generation=generation), threading.Event()
    writer._background.submit(write_slowly.wait)
    writer.save(step, both_stages(step), {})
    return writer, write_slowly


@pytest.mark.parametrize("first", [0, 1])
def test_those_who_were_cut_off_and_those_who_went_on_may_save_one_step(tmp_path, first):
    writers = [of_generation(tmp_path, generation, 4) for generation in (7, 8)]
    folders = [pending_folder(tmp_path, 4, generation) for generation in (7, 8)]
    assert all(folder.is_dir() for folder in folders)
    writer, write_on = writers[first]
    write_on.set()
    writer.wait()
    assert committed_steps(tmp_path) == [4]
    assert not folders[first].exists()
    stamp = (step_folder(tmp_path, 4) / "COMMITTED").stat()
    other, write_on = writers[1 - first]
    write_on.set()
    # The first has removed what was there of it; what it has written since does not count.
    with contextlib.suppress(CheckpointFailed):
        other.wait()
    assert (step_folder(tmp_path, 4) / "COMMITTED").stat() == stamp
    assert not folders[1 - first].exists()
    load_stage(open_checkpoint(tmp_path, 4), LAYERS, 0, abstract(stage_state(0)))
    for writer, _ in writers:
        writer.close()


def test_only_what_is_as_old_is_removed_of_checkpoints_that_were_not_finished(tmp_path):
    """Folders of a later step or generation stay."""
    pending = [(3, 2), (4, 2), (5, 2), (4, 8)]
    for step, generation in pending:
        (pending_folder(tmp_path, step, generation) / "stage_0").mkdir(parents=True)
    write(tmp_path, [4], generation=3)
    assert [of for of in pending if pending_folder(tmp_path, *of).exists()] == [(5, 2), (4, 8)]
    remove_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000004"]


def test_a_failed_save_surfaces_in_the_next_one(tmp_path):
    writer = writer_of(tmp_path)
    writer.save(1, CheckpointItems({0: stage_state(0)}), {})
    with pytest.raises(CheckpointFailed, match=r"expected \['data.json', 'stage_0', 'stage_1'\]"):
        writer.save(2, CheckpointItems({0: stage_state(0)}), {})
    writer.close()


@contextlib.contextmanager
def full_disk():
    """A limit on the size of files stands for a disk that is full."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def no_pauses(monkeypatch):
    for module in ("files", "checkpointer"):
        monkeypatch.setattr(f"skippipe_jax.storage.{module}.RETRY_PAUSES_S", (0.0, 0.0))


def test_training_goes_on_where_a_checkpoint_cannot_be_written_and_the_next_one_is(
    tmp_path, writers, no_pauses, monkeypatch, caplog
):
    def is_saved(step):
        save(writers, step)
        return [writer.wait() for writer in writers]

    # Not a file, which would be full too.
    monkeypatch.setattr(sys, "stderr", printed := io.StringIO())
    with full_disk():
        assert is_saved(3) == [False, False]
        # The last one of a run is tried again.
        assert is_saved(3) == [False, False]
    assert not any((tmp_path / "checkpoints").iterdir()), "it would take the room of the next"
    told = printed.getvalue().splitlines()
    assert [line.partition(": ")[0] for line in told] == ["warning"] * 4, told
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert is_saved(3) == [True, True]
    assert is_saved(4) == [True, True]
    assert committed_steps(tmp_path) == [3, 4]


def test_a_run_folder_that_was_removed_is_not_made_again_for_checkpoints(
    tmp_path, no_pauses, capfd
):
    """They could not be resumed without the configuration and the plan."""
    folder = tmp_path / "run"
    folder.mkdir()
    writer = writer_of(folder)
    folder.rename(tmp_path / "moved")
    writer.save(1, both_stages(1), {})
    assert not writer.wait()
    assert "could not be written: No such file or directory" in capfd.readouterr().err
    (tmp_path / "moved").rename(folder)
    writer.save(2, both_stages(2), {})
    assert writer.wait()
    writer.close()
    assert committed_steps(folder) == [2]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_host_that_can_write_no_checkpoint_ends_alone_with_an_error_that_may_be_over_later(
    tmp_path, writers, broken, monkeypatch, no_pauses
):
    fail_part(monkeypatch, broken, OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    for step in (1, 2, 3):
        save(writers, step)
        assert writers[1 - broken].wait() is False
        if step < 3:
            assert writers[broken].wait() is False
    with pytest.raises(TemporaryError, match=r"run_dir = .*be written: Stale file handle"):
        writers[broken].wait()
    assert latest_step(tmp_path) is None


def while_handling(error, context):
    """An error as it is raised while another one is handled."""
    error.__context__ = context
    return error


NO_SPACE = os.strerror(errno.ENOSPC)
OF_TENSORSTORE = f"RESOURCE_EXHAUSTED: Failed to write to file 4: [os_error_code='{errno.ENOSPC}']"


@pytest.mark.parametrize(
    ("error", "is_of_files"),
    [
        (OSError(errno.ENOSPC, NO_SPACE), True),
        (ValueError(OF_TENSORSTORE), True),
        (ValueError(f"INTERNAL: Failed to write [OS error: {NO_SPACE}]"), True),
        (while_handling(RuntimeError("closed"), OSError(errno.ENOSPC, NO_SPACE)), True),
        (while_handling(RuntimeError("closed"), ValueError(OF_TENSORSTORE)), True),
        (ValueError(f"a text with {NO_SPACE}"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
    ],
)
def test_errors_of_files_are_known_by_their_numbers(error, is_of_files):
    def fail():
        raise error

    expected = checkpointer_module.NotWritten if is_of_files else type(error)
    with pytest.raises(expected) as caught:
        checkpointer_module._attempt_write(fail)
    assert str(caught.value) == NO_SPACE if is_of_files else caught.value is error


def failing_once(monkeypatch, module, name):
    """Let a function of a module fail once, and then no more."""
    left, real = [OSError(errno.EIO, os.strerror(errno.EIO))], getattr(module, name)

    def fails(*given):
        if left:
            raise left.pop()
        return real(*given)

    monkeypatch.setattr(module, name, fails)
    return left


def test_a_checkpoint_is_committed_although_the_file_system_fails_right_after(
    tmp_path, monkeypatch, no_pauses
):
    left = failing_once(monkeypatch, checkpoint_module, "synchronize")
    write(tmp_path, [1])
    assert not left
    assert committed_steps(tmp_path) == [1]


def test_what_is_old_and_cannot_be_removed_stays_until_the_next_checkpoint(
    tmp_path, monkeypatch, capsys
):
    left = failing_once(monkeypatch, checkpointer_module, "remove")
    write(tmp_path, [1, 2], keep=1)
    assert "not removed: Input/output error" in capsys.readouterr().err
    assert not left
    assert committed_steps(tmp_path) == [1, 2]
    write(tmp_path, [3], keep=1)
    assert committed_steps(tmp_path) == [3]


def test_a_leader_that_wakes_up_late_declares_nothing_whole_and_removes_nothing(tmp_path):
    line = Generation(8, (0, 1), (7, 8), 1, 3, cause="host 0 was lost")
    RunDir(tmp_path).append_generation(
        line, plan_of([[0], [1]], [[0, 1]]), [{"host": 1, "address": "a"}]
    )
    theirs = pending_folder(tmp_path, 4, generation=8)
    theirs.mkdir(parents=True)
    stopped, wakes_up = of_generation(tmp_path, 7, 4)
    wakes_up.set()
    with pytest.raises(GenerationEnded):
        stopped.close()
    assert committed_steps(tmp_path) == []
    assert theirs.is_dir()


def test_only_what_a_host_has_written_itself_is_discarded(tmp_path):
    for name in ("stage_1", "stage_1.orbax-checkpoint-tmp", "stage_10"):
        (tmp_path / name).mkdir()
    checkpointer_module._discard(tmp_path, ["stage_1", "data.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["stage_10"]
    checkpointer_module._discard(tmp_path / "removed by another host", ["stage_1"])


@pytest.mark.parametrize(("file", "told"), [("/orbax/files.py", []), ("/other/files.py", [True])])
def test_what_orbax_does_not_ask_for_is_not_told(caplog, file, told):
    def fail():
        exec(compile("raise ValueError('a full disk')", file, "exec"))

    loop = asyncio.new_event_loop()
    failed = loop.create_future()
    try:
        fail()
    except ValueError as error:
        failed.set_exception(error)
    del failed  # Nobody has asked for its error.
    loop.close()
    assert ["never retrieved" in record.message for record in caplog.records] == told


def test_a_host_that_never_comes(tmp_path):
    first, second = two_writers(tmp_path, timeout_s=0.3)
    first.save(1, CheckpointItems({0: stage_state(0)}), {})
    with pytest.raises(TimeoutError, match="checkpoint/1/part/1"):
        first.close()
    second.close()


# Sudden death.


def test_all_is_on_the_disk_before_a_checkpoint_counts(tmp_path, monkeypatch):
    synchronized = []

    def fsync(descriptor):
        committed = any(tmp_path.glob("checkpoints/*/COMMITTED"))
        synchronized.append((os.fstat(descriptor).st_ino, committed))

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, [1])
    [folder] = (tmp_path / "checkpoints").iterdir()
    before = {number for number, committed in synchronized if not committed}
    below = {path.stat().st_ino: path for path in [folder, *folder.rglob("*")]}
    assert {below[number].name for number in below.keys() - before} == set()
    after = {number for number, committed in synchronized if committed}
    assert after == {path.stat().st_ino for path in (folder, folder.parent)}


def save_forever(run_dir):
    writer = writer_of(run_dir, keep=2)
    for step in itertools.count(1):
        state = {"params": {"w": jnp.full((256, 1024), step, jnp.float32)}}
        writer.save(step, CheckpointItems({0: state, 1: state}), {"step": step})


def is_saving(run_dir):
    newest = max((run_dir / "checkpoints").iterdir())
    return not (newest / "COMMITTED").exists() or any(newest.glob("*tmp*"))


def test_killed_while_saving(tmp_path):
    runs = [tmp_path / str(i) for i in range(2)]
    chance = random.Random(0)
    deadline = time.monotonic() + 120
    with started_processes(tmp_path / "processes") as processes:
        for run in runs:
            processes.start(__file__, run)
        processes.wait_until(lambda: all((latest_step(run) or 0) >= 3 for run in runs), 120)
        for run, process in zip(runs, processes.processes, strict=True):
            while True:  # stop it at random moments, until one lies within a save
                assert time.monotonic() < deadline
                time.sleep(chance.uniform(0.05, 0.3))
                process.send_signal(signal.SIGSTOP)
                if is_saving(run):
                    break
                process.send_signal(signal.SIGCONT)
            process.kill()
    for run in runs:
        last = latest_step(run)
        assert last is not None
        checkpoint = prepare_run(run, ThreadHost())
        assert checkpoint is not None
        assert checkpoint.step == last
        assert {int(f.name) for f in (run / "checkpoints").iterdir()} == set(committed_steps(run))
        shape = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
        for stage in range(2):
            state = load_stage(checkpoint, LAYERS, stage, {"params": {"w": shape}})
            np.testing.assert_array_equal(state["params"]["w"], last)
        assert load_data_state(checkpoint) == {"step": last}


if __name__ == "__main__":
    save_forever(Path(sys.argv[1]))  # the process that test_killed_while_saving kills
