"""One logical checkpoint per step, whatever hosts wrote it and however the model was cut.

In the run folder, which all hosts share:

    checkpoints/00000020/     one step
        stage_0/ stage_1/ ..  an Orbax checkpoint of each stage's state, written by one host
        data.json             how far the data had been read
        COMMITTED             written last: what the checkpoint holds, with a digest of every file

A folder without COMMITTED is not a checkpoint. COMMITTED says how many blocks each stage held, and
`read_stage` puts the stages of any other cut together from those.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from skippipe_sched.errors import InputError

if TYPE_CHECKING:
    from skippipe_jax.storage.mirror import Mirror

PyTree = Any

# Orbax narrates each save, and prints the traceback of any error that it raises too, through a
# logger that it shares with other libraries.
logging.getLogger("absl").addFilter(
    lambda record: record.levelno == logging.WARNING or "/orbax/" not in record.pathname
)

# Why a file cannot be written that is no fault of this program's.
OF_THE_DISK = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES)
]


# Of the files of a checkpoint, the mark that it is whole, and how far the data had been read.
COMMITTED, DATA = "COMMITTED", "data.json"


FORMAT, VERSION = "skippipe-checkpoint", 2


class Host(Protocol):
    """This host among those that train together, and short messages between them.

    A key is put once. ``get`` waits until it is there, and raises when ``timeout_s`` has passed.
    """

    @property
    def index(self) -> int:
        """Position among the hosts; host 0 commits."""
        ...

    @property
    def count(self) -> int:
        """Number of hosts."""
        ...

    def put(self, key: str, value: str) -> None:
        """Make a value known to all hosts."""
        ...

    def get(self, key: str, timeout_s: float) -> str:
        """Return the value that some host put."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of stages with ``stage_layers`` blocks.

    ``files`` gives the digest of each file in ``folder``.
    """

    folder: Path
    step: int
    stage_layers: tuple[int, ...]
    files: Mapping[str, str]


# Reading.


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a committed checkpoint, ascending."""
    return [step for step, folder in _step_folders(run_dir).items() if _is_committed(folder)]


def latest_step(run_dir: Path) -> int | None:
    """Return the last step that has a committed checkpoint, or None."""
    return max(saved_steps(run_dir), default=None)


def open_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint of ``step``, by default the latest.

    Raises InputError when there is none, its COMMITTED does not describe a checkpoint, or it was
    written by another version of this program.
    """
    steps = saved_steps(run_dir)
    chosen = latest_step(run_dir) if step is None else step
    if chosen is None or chosen not in steps:
        raise InputError(
            str(run_dir / "checkpoints"),
            "latest" if step is None else step,
            "there is no such checkpoint",
            f"Choose one of the steps {steps}" if steps else "Name a run that has saved one",
        )
    folder = _step_folder(run_dir, chosen)
    text = (folder / COMMITTED).read_bytes()
    try:
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if record["version"] != VERSION:
            raise InputError(
                f"{folder / COMMITTED}: version",
                record["version"],
                f"another version of this program wrote it; this one reads version {VERSION}",
                "Resume with the version that wrote it, or start a new run",
            )
        if record["step"] != chosen:
            raise ValueError(f"it speaks of step {record['step']}")
        files = dict(record["files"].items())
        return Checkpoint(folder, chosen, tuple(map(int, record["stage_layers"])), files)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            str(folder / COMMITTED),
            text.decode(errors="replace"),
            f"does not describe a checkpoint: {error!r}",
            _go_back(folder),
        ) from error


def read_stage(
    checkpoint: Checkpoint,
    stage_layers: Sequence[int],
    stage: int,
    abstract: Mapping[str, PyTree],
) -> PyTree:
    """Read the state of one stage, bit for bit as it was saved, under any cut of the model.

    What belongs to blocks (whose path holds "blocks") has a row for each block, and is put together
    from the saved stages that hold these blocks, of which one at a time is in memory. All else is
    the same in every stage that has it (counters), or is the data stage's alone.

    Args:
        checkpoint: from `open_checkpoint`.
        stage_layers: the blocks of each stage as the model is cut now; their sum is that of
            `Checkpoint.stage_layers`.
        stage: index of the stage in this cut.
        abstract: tree of jax.ShapeDtypeStruct to read. Each of its top-level entries (say
            "parameters") is read whole; saved entries that it leaves out are not read at all.
            A leaf without a sharding goes to the first local device.

    Raises:
        InputError: the checkpoint is of a model with other layers, a file of it is missing or
            damaged, or the saved arrays are not those of `abstract`.
    """
    if sum(checkpoint.stage_layers) != sum(stage_layers):
        raise InputError(
            f"{checkpoint.folder / COMMITTED}: stage_layers",
            list(checkpoint.stage_layers),
            f"the checkpoint has {sum(checkpoint.stage_layers)} layers, and the configured model "
            f"has {sum(stage_layers)}",
            "Configure the model that was saved, or start a new run",
        )
    wanted = _leaves_by_name(abstract)
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for saved, rows in _rows_of_saved_stages(checkpoint.stage_layers, stage_layers, stage):
        missing = {n: leaf for n, leaf in wanted.items() if _is_of_blocks(n) or not pieces[n]}
        both_data_stages = stage == saved == 0
        for name, array in _read_saved(checkpoint, saved, missing, both_data_stages).items():
            # A copy, since a view of some rows would hold on to all.
            pieces[name].append(array[rows].copy() if _is_of_blocks(name) else array)
    here = SingleDeviceSharding(jax.local_devices()[0])
    placed = [
        jax.device_put(
            own[0] if len(own) == 1 else np.concatenate(own),
            wanted[name].sharding or here,
            # An array that training donates has to be JAX's own.
            may_alias=False,
        )
        for name, own in pieces.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), placed)


def read_data_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read how far the data had been read; raises InputError like `read_stage`."""
    _require_intact(checkpoint, DATA)
    return json.loads((checkpoint.folder / DATA).read_text())


def prepare_run(
    run_dir: Path, host: Host, step: int | None = None, timeout_s: float = 600
) -> Checkpoint | None:
    """Make the run folder ready to go on from ``step``, by default from its latest checkpoint.

    Every host calls this before it trains. Host 0 removes folders that a crash left without a
    COMMITTED, and checkpoints after ``step``, whose steps the run will take anew. When that is
    done all hosts return the checkpoint to resume from, or None when the run has none.
    Raises InputError, before anything is removed, when ``step`` cannot be opened.
    """
    if step is not None:
        open_checkpoint(run_dir, step)

    def clear() -> int | None:
        last = latest_step(run_dir) if step is None else step
        for found, folder in _step_folders(run_dir).items():
            if last is None or found > last or not _is_committed(folder):
                _remove(folder)
        return last

    failure = _tell(host, "checkpoint/prepared", clear) if host.index == 0 else None
    last = _hear(host, "checkpoint/prepared", timeout_s, failure)
    return None if last is None else open_checkpoint(run_dir, last)


# Writing.


class CheckpointWriter:
    """Writes the parts that this host owns and, with its peers, commits each checkpoint once."""

    def __init__(
        self,
        run_dir: Path,
        host: Host,
        *,
        stage_layers: Sequence[int],
        keep: int,
        keep_every: int | None = None,
        mirror: Mirror | None = None,
        timeout_s: float = 1200,
    ):
        """Write below ``run_dir``, holding on to the last ``keep`` checkpoints.

        Those of every ``keep_every`` steps are kept for good. On host 0, ``mirror`` is brought up
        to date after each checkpoint, before older ones are removed. A checkpoint is whole with
        a stage for each of ``stage_layers``, their blocks, and the state of the data. Hosts wait
        ``timeout_s`` at most for one another's parts.
        """
        self._run_dir = run_dir
        self._host = host
        self._stage_layers = tuple(stage_layers)
        self._keep = keep
        self._keep_every = keep_every
        self._protected: int | None = None
        self._mirror = mirror
        self._timeout_s = timeout_s
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last_save: Future[None] | None = None
        # Slow links hold up neither training nor the next checkpoint.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_copy")
        self._copies: list[Future[None]] = []

    def save(
        self,
        step: int,
        stages: Mapping[int, Mapping[str, PyTree]],
        data: Mapping[str, Any] | None,
    ) -> None:
        """Begin a checkpoint; on return its arrays may be donated, and the writing goes on.

        Every host calls this, at the same steps. One checkpoint is written at a time: this waits
        for the one before.

        Args:
            step: iterations done so far.
            stages: by index, the state of each stage that this host writes: trees under a few
                top-level names, whose leaves are jax.Array on one device each.
            data: how far the data has been read, fit for JSON, from one host and None from others.

        Raises:
            InputError: the step is saved already.
            RuntimeError: the checkpoint before was not committed, whichever host failed.
        """
        self.wait()
        folder = _step_folder(self._run_dir, step)
        if _is_committed(folder):
            raise InputError(
                str(folder), step, "is saved already", "Resume the run, or name a new run folder"
            )
        texts = {} if data is None else {DATA: json.dumps(data)}
        writes: Future[dict[str, ocp.AsyncCheckpointer]] = Future()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            parts = {f"stage_{stage}": state for stage, state in stages.items()}
            writes.set_result({name: _write(folder / name, parts[name]) for name in parts})
        except Exception as error:
            # Raised by the background thread, which tells the other hosts that wait for this part.
            writes.set_exception(error)
        self._last_save = self._background.submit(self._finish, step, writes, texts)

    def protect(self, step: int) -> None:
        """Hold on to the checkpoint of ``step`` too, and no longer to the one protected before.

        Called on host 0, which removes checkpoints.
        """
        self._protected = step

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            InputError: it was not, since the run folder cannot be written any more.
            RuntimeError: it was not, for another reason.
        """
        last_save, self._last_save = self._last_save, None
        if last_save is None:
            return
        try:
            last_save.result()
        except RuntimeError as error:
            # Of this host or another; some come through Orbax, which knows no OSError.
            reason = next((text for text in OF_THE_DISK if text in str(error)), None)
            if reason is None:
                raise
            raise InputError(
                "run_dir",
                str(self._run_dir),
                f"a checkpoint cannot be written there: {reason}",
                "Mend that, and --resume goes on from the checkpoint before",
            ) from error

    def close(self) -> None:
        """Wait for the last save and its copy, and end the background threads.

        Says which of the checkpoints that are held on to could not be copied.
        """
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._copying.shutdown()
        for copy in self._copies:
            copy.result()
        here = saved_steps(self._run_dir)
        if self._mirror is not None and (missing := self._kept(here) - self._mirror.copied):
            _warn(f"not copied to {self._mirror.url}: the checkpoints of steps {sorted(missing)}")

    def _finish(
        self,
        step: int,
        writes: Future[dict[str, ocp.AsyncCheckpointer]],
        texts: Mapping[str, str],
    ) -> None:
        """Complete this host's part, and learn from host 0 whether all parts are there."""
        folder = _step_folder(self._run_dir, step)
        part, whole = f"checkpoint/{step}/part", f"checkpoint/{step}/whole"
        failure = _tell(
            self._host,
            f"{part}/{self._host.index}",
            lambda: _complete_part(folder, writes.result(), texts),
        )
        if self._host.index == 0:
            commit_failure = _tell(self._host, whole, lambda: self._commit(step, part))
            failure = failure or commit_failure
        _hear(self._host, whole, self._timeout_s, failure)

    def _commit(self, step: int, part: str) -> None:
        """Declare the checkpoint whole once every host has told of its part; drop old ones."""
        files: dict[str, str] = {}
        for index in range(self._host.count):
            files |= _hear(self._host, f"{part}/{index}", self._timeout_s)
        expected = {f"stage_{stage}" for stage in range(len(self._stage_layers))}
        expected.add(DATA)
        written = {_entry(name) for name in files}
        if written != expected:
            raise RuntimeError(f"hosts wrote {sorted(written)}, expected {sorted(expected)}")
        _declare_whole(_step_folder(self._run_dir, step), self._stage_layers, files)
        if self._mirror is None:
            self._remove_old()
        else:
            self._copies.append(self._copying.submit(self._copy, self._mirror))

    def _copy(self, mirror: Mirror) -> None:
        """Bring the copy up to date, and only then remove what it may have been copying."""
        try:
            # Where the run was fetched from there, it has not brought all of its checkpoints.
            mirror.update(self._run_dir, self._kept([*saved_steps(self._run_dir), *mirror.steps()]))
        except Exception as error:
            # Training goes on whatever a remote file system raises, and the next copy tries again.
            _warn(f"checkpoints not copied to {mirror.url}: {type(error).__name__}: {error}")
        self._remove_old()

    def _kept(self, steps: Iterable[int]) -> set[int]:
        """Of these saved steps, those to hold on to."""
        ordered = sorted(set(steps))
        return {
            step
            for step in ordered
            if step in ordered[-self._keep :]
            or step == self._protected
            or (self._keep_every is not None and step % self._keep_every == 0)
        }

    def _remove_old(self) -> None:
        steps = saved_steps(self._run_dir)
        for old in set(steps) - self._kept(steps):
            _remove(_step_folder(self._run_dir, old))


def write_checkpoint(
    run_dir: Path,
    step: int,
    stage_layers: Sequence[int],
    state_of: Callable[[int], Mapping[str, PyTree]],
) -> None:
    """Write a whole checkpoint from this process alone, when no data has been read.

    The states, like those of `CheckpointWriter.save`, are asked for and written one by one: no two
    need be held at a time.
    """
    folder = _step_folder(run_dir, step)
    folder.mkdir(parents=True)
    files: dict[str, str] = {}
    for stage in range(len(stage_layers)):
        name = f"stage_{stage}"
        files |= _complete_part(folder, {name: _write(folder / name, state_of(stage))}, {})
    _declare_whole(folder, stage_layers, files)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


# What hosts tell one another.


def _tell(host: Host, key: str, action: Callable[[], Any]) -> Exception | None:
    """Put under ``key`` what ``action`` returns or how it fails; return the failure."""
    failure = None
    try:
        message = {"result": action()}
    except Exception as error:
        failure = error
        message = {"error": f"{type(error).__name__}: {error}"}
    host.put(key, json.dumps(message))
    return failure


def _hear(host: Host, key: str, timeout_s: float, cause: Exception | None = None) -> Any:
    """Return what a host told under ``key``; a failure it told of raises RuntimeError."""
    message = json.loads(host.get(key, timeout_s))
    if "error" in message:
        raise RuntimeError(f"{key}: {message['error']}") from cause
    return message["result"]


# Folders and files.


def _step_folder(run_dir: Path, step: int) -> Path:
    return run_dir.absolute() / "checkpoints" / f"{step:08d}"  # Orbax takes no relative paths


def _step_folders(run_dir: Path) -> dict[int, Path]:
    """Return the folder of each step, ascending, committed or not."""
    folders = (run_dir.absolute() / "checkpoints").glob("*")
    steps = {int(f.name): f for f in folders if re.fullmatch(r"\d{8,}", f.name)}
    return dict(sorted(steps.items()))


def _is_committed(folder: Path) -> bool:
    return (folder / COMMITTED).exists()


def _remove(folder: Path) -> None:
    # The mark goes first: what an interruption leaves is then no checkpoint.
    (folder / COMMITTED).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _declare_whole(folder: Path, stage_layers: Sequence[int], files: Mapping[str, str]) -> None:
    """Write COMMITTED, with the digest of every file of the checkpoint in `folder`."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "step": int(folder.name),
        "stage_layers": list(stage_layers),
        "files": files,
    }
    _write_durably(folder / COMMITTED, json.dumps(record, indent=1))
    _synchronize(folder.parent)


def _write_durably(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whenever the machine stops."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _synchronize(path.parent)


def _synchronize(*paths: Path) -> None:
    """Return once these files, and the entries of these folders, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _entry(name: str) -> str:
    """Return the first component: of a file its stage, of an array its top-level name."""
    return name.split("/")[0]


def _digest(path: Path) -> str:
    """Tell a file from any that was damaged by accident; sha1 is the fastest that does."""
    with path.open("rb") as file:
        sha1 = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
    return f"{path.stat().st_size} bytes, sha1 {sha1}"


def _go_back(folder: Path) -> str:
    """Say what to do about a damaged checkpoint."""
    earlier = [step for step in saved_steps(folder.parent.parent) if step < int(folder.name)]
    if earlier:
        return f"Move {folder} away to go on from the checkpoint before: {earlier[-1]:08d}"
    return "There is no checkpoint before it: start a new run"


def _require_intact(checkpoint: Checkpoint, part: str) -> None:
    """Raise InputError unless every file of ``part`` is as it was committed."""
    recorded = {name: told for name, told in checkpoint.files.items() if _entry(name) == part}
    # A part without files is one that COMMITTED forgot: then its folder counts as missing.
    for name, told in (recorded or {part: "nothing"}).items():
        path = checkpoint.folder / name
        found = _digest(path) if path.is_file() else "missing"
        if found != told:
            raise InputError(
                str(path), found, f"was committed as {told}", _go_back(checkpoint.folder)
            )


# Cuts of the model.


def _is_of_blocks(name: str) -> bool:
    """Whether an array has a row for each block of its stage."""
    return "blocks" in name.split("/")


def _rows_of_saved_stages(
    saved_layers: Sequence[int], stage_layers: Sequence[int], stage: int
) -> list[tuple[int, slice]]:
    """The saved stages that hold blocks of a stage, in order, and which of their rows these are."""
    first = sum(stage_layers[:stage])
    last = first + stage_layers[stage]
    found = []
    for saved, layers in enumerate(saved_layers):
        before = sum(saved_layers[:saved])
        rows = slice(max(0, first - before), min(layers, last - before))
        if rows.start < rows.stop:
            found.append((saved, rows))
    return found


# Orbax.


def _read_saved(
    checkpoint: Checkpoint, stage: int, wanted: Mapping[str, Any], both_data_stages: bool
) -> dict[str, np.ndarray]:
    """Read arrays of a saved stage; refuse one that lacks some, or has others of blocks.

    With ``both_data_stages`` it may have no others at all.
    """
    _require_intact(checkpoint, f"stage_{stage}")
    folder = checkpoint.folder / f"stage_{stage}"
    layers = checkpoint.stage_layers[stage]
    expected = {
        name: jax.ShapeDtypeStruct((layers, *leaf.shape[1:]), leaf.dtype)
        if _is_of_blocks(name)
        else leaf
        for name, leaf in wanted.items()
    }
    entries = {_entry(name) for name in wanted}
    with ocp.Checkpointer(_handler(), multiprocessing_options=_this_process()) as reader:
        saved = reader.metadata(folder).item_metadata.tree
        comparable = {
            name: leaf
            for name, leaf in saved.items()
            if _entry(name) in entries
            and (name in wanted or _is_of_blocks(name) or both_data_stages)
        }
        _require_same(folder, comparable, expected)
        as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
        return reader.restore(
            folder,
            args=ocp.args.PyTreeRestore(item=expected, restore_args=as_numpy, partial_restore=True),
        )


def _complete_part(
    folder: Path, writes: Mapping[str, ocp.AsyncCheckpointer], texts: Mapping[str, str]
) -> dict[str, str]:
    """Wait for the stages, write the texts, and return the digest of every file.

    All of it is on the disk then: a checkpoint that counts is whole even after a power cut.
    """
    with contextlib.ExitStack() as stack:
        for write in writes.values():
            stack.enter_context(write)  # leaving it waits for its files
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [folder / name for name in texts]
    paths += [path for name in writes for path in (folder / name).rglob("*") if path.is_file()]
    folders = {folder / above for path in paths for above in path.relative_to(folder).parents}
    _synchronize(*paths, *folders)
    return {path.relative_to(folder).as_posix(): _digest(path) for path in paths}


def _write(folder: Path, state: Mapping[str, PyTree]) -> ocp.AsyncCheckpointer:
    """Begin to write a stage's state; returns once it has left the devices or is held there."""
    writer = ocp.AsyncCheckpointer(
        _handler(),
        # In the background, folders would be announced under keys that all processes share: one
        # that saves at the same time takes or clears the other's announcement, which then hangs.
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        multiprocessing_options=_this_process(),
    )
    arrays = {name: _as_global(leaf) for name, leaf in _leaves_by_name(state).items()}
    writer.save(folder, args=ocp.args.PyTreeSave(arrays))
    return writer


def _this_process() -> ocp.options.MultiprocessingOptions:
    """Let this process save and restore by itself, with no barrier across processes."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}"
    )


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return what writes a flat mapping of jax.Array, one copy of each, or reads it as NumPy's."""
    arrays = ocp.type_handlers.ArrayHandler(
        primary_host=jax.process_index(),
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # trained numbers shrink by 8%, and training needs the cores
        multiprocessing_options=_this_process(),
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        ),
    )


def _as_global(array: jax.Array) -> jax.Array:
    """Present an array of this process as the first copy of one that another process shares.

    Among several processes Orbax refuses arrays that only one can see. It writes the first copy
    only, so the other process, which never hears of this, has nothing to do.
    """
    if jax.process_count() == 1:
        return array
    (device,) = array.devices()
    elsewhere = next(d for d in jax.devices() if d.process_index != device.process_index)
    copies = NamedSharding(Mesh(np.array([device, elsewhere]), ("copy",)), PartitionSpec())
    return jax.make_array_from_single_device_arrays(array.shape, copies, [array])


def _leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path, such as "params/blocks/0/w": independent of container types."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def _require_same(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise InputError unless both have arrays of the same names, shapes and types."""

    def describe(arrays: Mapping[str, Any], name: str) -> str:
        if name not in arrays:
            return "no such array"
        return f"{np.dtype(arrays[name].dtype).name}{list(arrays[name].shape)}"

    differing = [
        name
        for name in sorted(saved.keys() | wanted.keys())
        if describe(saved, name) != describe(wanted, name)
    ]
    if differing:
        raise InputError(
            f"{folder}: {differing[0]}",
            describe(saved, differing[0]),
            f"the configured model has {describe(wanted, differing[0])}"
            f" ({len(differing)} of its arrays differ)",
            "Configure the model that was saved, or start a new run",
        )
