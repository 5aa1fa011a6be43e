import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.storage.layout import latest_step, open_checkpoint, prepare_run, saved_steps
from skippipe_jax.storage.reader import read_data_state, read_stage
from skippipe_jax.storage.writer import CheckpointWriter
from tests.thread_hosts import ThreadHost

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 1e-4, 100))
)


LAYERS = (1, 1)


def stage_state(seed, width=8):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": jax.random.normal(keys[0], (16, width)),
        "blocks": {"w": jax.random.normal(keys[1], (1, width, width), jnp.bfloat16)},
        "steps": jax.random.randint(keys[2], (3,), -5, 5),
    }
    floats = {"embed": params["embed"], "blocks": params["blocks"]}
    optimizer = OPTIMIZER.init(floats)
    _, optimizer = OPTIMIZER.update(floats, optimizer, floats)
    return {"params": params, "optimizer": optimizer}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def write(run_dir, steps, keep=3, **options):
    writer = CheckpointWriter(run_dir, ThreadHost(), stage_layers=LAYERS, keep=keep, **options)
    for step in steps:
        data = {"position": [step], "epoch": None}
        writer.save(step, {i: stage_state(10 * step + i) for i in range(2)}, data)
    writer.close()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir, [10, 20])
    return run_dir


@pytest.fixture
def run_dir(two_checkpoints, tmp_path):
    return shutil.copytree(two_checkpoints, tmp_path / "run")


def test_what_is_read_is_what_was_saved(two_checkpoints):
    checkpoint = open_checkpoint(two_checkpoints)
    assert (checkpoint.step, checkpoint.stage_layers) == (20, LAYERS)
    for stage in range(2):
        state = stage_state(200 + stage)
        assert_same(read_stage(checkpoint, LAYERS, stage, abstract(state)), state)
    assert read_data_state(checkpoint) == {"position": [20], "epoch": None}


def test_unusual_numbers_keep_their_bits(tmp_path):
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0xFF800000], np.uint32)
    floats = jax.device_put(patterns.view(np.float32))
    halves = jax.device_put((patterns >> 16).astype(np.uint16).view(jnp.bfloat16))
    state = {"params": {"floats": floats, "halves": halves, "one": jnp.int32(-1)}}
    writer = CheckpointWriter(tmp_path, ThreadHost(), stage_layers=(1,), keep=1)
    writer.save(1, {0: state}, {})
    writer.close()
    assert_same(read_stage(open_checkpoint(tmp_path), (1,), 0, abstract(state)), state)


def test_parameters_are_read_without_the_optimizer(two_checkpoints):
    params = {"params": stage_state(101)["params"]}
    checkpoint = open_checkpoint(two_checkpoints, 10)
    assert_same(read_stage(checkpoint, LAYERS, 1, abstract(params)), params)


def test_a_relative_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path.relative_to(tmp_path), [1])
    assert_same(
        read_stage(open_checkpoint(tmp_path), LAYERS, 0, abstract(stage_state(10))), stage_state(10)
    )


def test_arrays_may_be_donated_once_save_returns(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    writer = CheckpointWriter(tmp_path, ThreadHost(), stage_layers=(1,), keep=9)
    state = {"params": {f"w{i}": jnp.full((512, 1024), i, jnp.float32) for i in range(8)}}
    expected = jax.tree.map(np.array, state)
    writer.save(1, {0: state}, {})
    for _ in range(5):
        state = overwrite(state)
    jax.block_until_ready(state)
    writer.save(2, {0: state}, {})
    writer.close()
    saved = read_stage(open_checkpoint(tmp_path, 1), (1,), 0, abstract(state))
    jax.tree.map(np.testing.assert_array_equal, saved, expected)
    saved = read_stage(open_checkpoint(tmp_path, 2), (1,), 0, abstract(state))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, -1), saved)


def test_the_last_checkpoints_are_kept(tmp_path):
    write(tmp_path, [1, 2, 5, 7], keep=2)
    assert saved_steps(tmp_path) == [5, 7]
    assert latest_step(tmp_path) == 7
    assert {f.name for f in (tmp_path / "checkpoints").iterdir()} == {"00000005", "00000007"}


def test_some_checkpoints_are_kept_for_good(tmp_path):
    write(tmp_path, [2, 3, 4, 6, 8, 9], keep=1, keep_every=4)
    assert saved_steps(tmp_path) == [4, 8, 9]


def test_the_checkpoint_that_is_protected_last_is_kept(tmp_path):
    writer = CheckpointWriter(tmp_path, ThreadHost(), stage_layers=(1,), keep=1)
    for step in range(1, 6):
        writer.save(step, {0: stage_state(step)}, {})
        if step in (1, 3):
            writer.wait()
            writer.protect(step)
    writer.close()
    assert saved_steps(tmp_path) == [3, 5]


def test_a_step_is_not_saved_twice(run_dir):
    with pytest.raises(InputError, match="is saved already"):
        write(run_dir, [20])


def test_orbax_is_quiet_where_others_are_not(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        write(tmp_path, [1])
        read_stage(open_checkpoint(tmp_path), LAYERS, 0, abstract(stage_state(10)))
        logging.getLogger("absl").info("another library")
    assert [record.getMessage() for record in caplog.records] == ["another library"]


# Other cuts.


def model_state(layers):
    """The parameters of a whole model, and what its optimizer holds of them."""
    chance = np.random.default_rng(layers)
    parameters = {
        "blocks": {"w": jnp.zeros((layers, 4, 3)), "norm": {"scale": jnp.zeros((layers, 4))}},
        "embedding": jnp.zeros((7, 4)),
        "head": {"kernel": jnp.zeros((4, 7))},
    }
    parameters["blocks"]["w"] = parameters["blocks"]["w"].astype(jnp.bfloat16)
    state = {"parameters": parameters, "optimizer_state": OPTIMIZER.init(parameters)}
    return jax.tree.map(lambda x: jnp.asarray(chance.normal(size=x.shape) * 99, x.dtype), state)


def stage_of(state, stage_layers, stage):
    """The part of a whole model's state that belongs to a stage."""

    def part(tree):
        first = sum(stage_layers[:stage])
        blocks = jax.tree.map(lambda x: x[first : first + stage_layers[stage]], tree["blocks"])
        return (tree if stage == 0 else {}) | {"blocks": blocks}

    parameters = part(state["parameters"])
    optimizer = jax.tree.map(
        lambda node: part(node) if isinstance(node, dict) else node,
        state["optimizer_state"],
        is_leaf=lambda node: isinstance(node, dict),
    )
    return {"parameters": parameters, "optimizer_state": optimizer}


def write_model(run_dir, state, stage_layers):
    writer = CheckpointWriter(run_dir, ThreadHost(), stage_layers=stage_layers, keep=1)
    stages = {stage: stage_of(state, stage_layers, stage) for stage in range(len(stage_layers))}
    writer.save(1, stages, {})
    writer.close()
    return open_checkpoint(run_dir)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ((4,) * 6, (6,) * 4),
        ((6,) * 4, (4,) * 6),
        ((1, 4, 2), (3, 1, 3)),
        ((5,), (1, 2, 2)),
        ((1, 2, 2), (5,)),
        ((2, 3), (2, 3)),
    ],
)
def test_a_checkpoint_is_read_under_any_cut(tmp_path, saved, wanted):
    state = model_state(sum(saved))
    checkpoint = write_model(tmp_path, state, saved)
    for stage in range(len(wanted)):
        expected = stage_of(state, wanted, stage)
        assert_same(read_stage(checkpoint, wanted, stage, abstract(expected)), expected)


def test_only_stages_with_the_blocks_that_are_wanted_are_read(tmp_path):
    state = model_state(6)
    checkpoint = write_model(tmp_path, state, (1, 3, 1, 1))
    for unwanted in (0, 3):
        shutil.rmtree(checkpoint.folder / f"stage_{unwanted}")
    expected = stage_of(state, (2, 3, 1), 1)
    assert_same(read_stage(checkpoint, (2, 3, 1), 1, abstract(expected)), expected)
    with pytest.raises(InputError, match=r"stage_3/.* = 'missing'"):
        read_stage(checkpoint, (2, 3, 1), 2, abstract(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p | {"blocks": p["blocks"] | {"v": p["blocks"]["w"]}}, "blocks/v = 'no such"),
        (lambda p: p | {"blocks": {"w": p["blocks"]["w"]}}, r"blocks/norm/scale = 'float32\[3, 4"),
        (lambda p: {"blocks": p["blocks"]}, r"parameters/embedding = 'float32\[7, 4\]'"),
        (lambda p: p | {"blocks": jax.tree.map(lambda x: x[..., :2], p["blocks"])}, r"\[3, 2\]"),
    ],
)
def test_another_model_under_another_cut(tmp_path, change, message):
    state = model_state(5)
    checkpoint = write_model(tmp_path, state, (3, 2))
    wanted = {"parameters": change(stage_of(state, (4, 1), 0)["parameters"])}
    with pytest.raises(InputError, match=message):
        read_stage(checkpoint, (4, 1), 0, abstract(wanted))


# Hosts.


def two_writers(run_dir, **options):
    host = ThreadHost(count=2)
    return [
        CheckpointWriter(run_dir, h, stage_layers=LAYERS, keep=3, **options)
        for h in (host, host.peer(1))
    ]


def test_a_checkpoint_waits_for_every_host_and_save_does_not(tmp_path):
    first, second = two_writers(tmp_path)
    first.save(3, {0: stage_state(0)}, {})
    time.sleep(0.3)
    assert latest_step(tmp_path) is None
    second.save(3, {1: stage_state(1)}, None)
    second.wait()
    assert latest_step(tmp_path) == 3
    first.close()
    second.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_every_host_learns_that_one_failed(tmp_path, broken):
    writers = two_writers(tmp_path)
    obstacle = tmp_path / "checkpoints" / "00000003" / f"stage_{broken}"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("in the way")
    for stage, writer in enumerate(writers):
        writer.save(3, {stage: stage_state(stage)}, None if stage else {})
    for writer in writers:
        with pytest.raises(RuntimeError, match=r"ValueError.*already exists") as caught:
            writer.wait()
        named = f"host {broken} has failed at 'checkpoint/3/part'" in str(caught.value)
        assert named == (writer is not writers[broken])
    assert latest_step(tmp_path) is None
    for stage, writer in enumerate(writers):  # and the next checkpoint is none the worse
        writer.save(4, {stage: stage_state(stage)}, None if stage else {})
    for writer in writers:
        writer.close()
    assert latest_step(tmp_path) == 4


def test_a_failed_save_surfaces_in_the_next_one(tmp_path):
    writer = CheckpointWriter(tmp_path, ThreadHost(), stage_layers=LAYERS, keep=3)
    writer.save(1, {0: stage_state(0)}, {})
    with pytest.raises(RuntimeError, match=r"expected \['data.json', 'stage_0', 'stage_1'\]"):
        writer.save(2, {0: stage_state(0)}, {})
    writer.close()


@pytest.mark.parametrize("host", [0, 1])
def test_a_folder_that_cannot_be_written_any_more_is_named(tmp_path, capfd, host):
    """A limit on the size of files stands for a disk that is full."""
    writers = two_writers(tmp_path)
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        for stage, writer in enumerate(writers):
            writer.save(3, {stage: stage_state(stage)}, None if stage else {})
        with pytest.raises(InputError, match=r"run_dir = .*written there: File too large"):
            writers[host].wait()
        with pytest.raises(InputError):
            writers[1 - host].close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writers[host].close()
    assert latest_step(tmp_path) is None
    assert "Traceback" not in capfd.readouterr().err


def test_a_host_that_never_comes(tmp_path):
    first, second = two_writers(tmp_path, timeout_s=0.3)
    first.save(1, {0: stage_state(0)}, {})
    with pytest.raises(TimeoutError, match="checkpoint/1/part/1"):
        first.close()
    second.close()


def test_a_run_goes_on_from_a_clean_folder(run_dir):
    unfinished = run_dir / "checkpoints" / "00000030" / "stage_0.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    checkpoint = prepare_run(run_dir, ThreadHost())
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert not unfinished.parent.exists()
    with pytest.raises(InputError, match=r"Choose one of the steps \[10, 20\]"):
        prepare_run(run_dir, ThreadHost(), step=15)
    checkpoint = prepare_run(run_dir, ThreadHost(), step=10)
    assert checkpoint is not None
    assert checkpoint.step == 10
    write(run_dir, [20])
    assert saved_steps(run_dir) == [10, 20]


def test_a_new_run_is_prepared_by_host_0_alone(tmp_path):
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    host = ThreadHost(count=2)
    with pytest.raises(TimeoutError):
        prepare_run(tmp_path, host.peer(1), timeout_s=0.1)
    assert prepare_run(tmp_path, host) is None
    assert prepare_run(tmp_path, host.peer(1)) is None
    assert not list((tmp_path / "checkpoints").iterdir())


# Wrong input.


def read_everything(run_dir, step=None):
    checkpoint = open_checkpoint(run_dir, step)
    for part in range(2):
        read_stage(checkpoint, LAYERS, part, abstract(stage_state(part)))
    read_data_state(checkpoint)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, os.remove])
def test_every_damaged_file_is_named(run_dir, damage):
    folder = run_dir / "checkpoints" / "00000020"
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != "COMMITTED"]
    assert len(files) > 10
    for path in files:
        intact = path.read_bytes()
        damage(path)
        with pytest.raises(InputError, match="checkpoint before: 00000010") as caught:
            read_everything(run_dir)
        assert caught.value.field == str(path)
        path.write_bytes(intact)
    read_everything(run_dir)


def test_a_missing_stage_is_named(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / "00000010" / "stage_1")
    with pytest.raises(InputError, match=r"stage_1.* = 'missing'.*no checkpoint before it"):
        read_everything(run_dir, 10)


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
    with pytest.raises(InputError, match="checkpoint before: 00000010") as caught:
        read_everything(run_dir)
    assert caught.value.field == str(path)


def test_a_part_that_the_commit_record_forgot(run_dir):
    path = run_dir / "checkpoints" / "00000020" / "COMMITTED"
    record = json.loads(path.read_bytes())
    record["files"] = {k: v for k, v in record["files"].items() if not k.startswith("stage_1")}
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"stage_1.*missing"):
        read_everything(run_dir)


def test_no_checkpoint(two_checkpoints, tmp_path):
    with pytest.raises(InputError, match="Name a run that has saved one"):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"= 15: .*Choose one of the steps \[10, 20\]"):
        open_checkpoint(two_checkpoints, 15)


def test_what_an_earlier_version_wrote(run_dir):
    path = run_dir / "checkpoints" / "00000020" / "COMMITTED"
    path.write_text(json.dumps({"format": "skippipe-checkpoint", "version": 1, "stages": 2}))
    with pytest.raises(
        InputError, match=r"version = 1: .*reads version 2\. Resume with the version"
    ):
        read_everything(run_dir)


def test_other_layers(two_checkpoints):
    checkpoint = open_checkpoint(two_checkpoints)
    with pytest.raises(InputError, match=r"stage_layers = \[1, 1\]: .* 2 layers, .* has 3\."):
        read_stage(checkpoint, (1, 2), 0, abstract(stage_state(0)))


def without_a_block(state):
    return state | {"params": {k: v for k, v in state["params"].items() if k != "blocks"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: stage_state(0, width=4),
            r"bfloat16\[1, 8, 8\].*model has bfloat16\[1, 4, 4\]",
        ),
        (without_a_block, r"params/blocks/w = 'bfloat16\[1, 8, 8\]'.*model has no such array"),
        (
            lambda state: state | {"params": state["params"] | {"head": jnp.zeros(3)}},
            r"params/head = 'no such array'.*float32\[3\] \(1 of its arrays differ\)",
        ),
        (
            lambda state: state | {"optimizer": optax.sgd(0.1, momentum=0.9).init(state["params"])},
            "optimizer/",
        ),
        (lambda state: state | {"average": jnp.zeros(3)}, "average = 'no such array'"),
        (
            lambda state: jax.tree.map(lambda x: x.astype(jnp.float16), state),
            r"count = 'int32\[\]'.*model has float16\[\]",
        ),
    ],
)
def test_another_model(two_checkpoints, change, message):
    with pytest.raises(InputError, match=message):
        read_stage(open_checkpoint(two_checkpoints), LAYERS, 0, abstract(change(stage_state(0))))


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
    writer = CheckpointWriter(run_dir, ThreadHost(), stage_layers=LAYERS, keep=2)
    for step in itertools.count(1):
        state = {"params": {"w": jnp.full((256, 1024), step, jnp.float32)}}
        writer.save(step, {0: state, 1: state}, {"step": step})


def is_saving(run_dir):
    newest = max((run_dir / "checkpoints").iterdir())
    return not (newest / "COMMITTED").exists() or any(newest.glob("*tmp*"))


def test_killed_while_saving(tmp_path):
    runs = [tmp_path / str(i) for i in range(4)]
    processes = [subprocess.Popen([sys.executable, __file__, run]) for run in runs]
    chance = random.Random(0)
    deadline = time.monotonic() + 120
    try:
        for run, process in zip(runs, processes, strict=True):
            while (latest_step(run) or 0) < 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for run, process in zip(runs, processes, strict=True):
            while True:  # stop it at random moments, until one lies within a save
                assert time.monotonic() < deadline
                time.sleep(chance.uniform(0.05, 0.3))
                process.send_signal(signal.SIGSTOP)
                if is_saving(run):
                    break
                process.send_signal(signal.SIGCONT)
            process.kill()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for run in runs:
        last = latest_step(run)
        assert last is not None
        checkpoint = prepare_run(run, ThreadHost())
        assert checkpoint is not None
        assert checkpoint.step == last
        assert {int(f.name) for f in (run / "checkpoints").iterdir()} == set(saved_steps(run))
        shape = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
        for stage in range(2):
            state = read_stage(checkpoint, LAYERS, stage, {"params": {"w": shape}})
            np.testing.assert_array_equal(state["params"]["w"], last)
        assert read_data_state(checkpoint) == {"step": last}


if __name__ == "__main__":  # the process that test_killed_while_saving kills
    save_forever(Path(sys.argv[1]))
