"""Layout of a run's checkpoints on disk, and their commit.

In the run folder, which all hosts share:

    checkpoints/00000020/     one step
        stage_0/ stage_1/ ..  an Orbax checkpoint of each stage's state, written by one host
        replica_1_0/ ..       in outer mode, one of each replica's own state, by stage and place in
                              the stage, written by the host that holds it
        data.json             the position in the data
        COMMITTED             written last: the commit record, with a digest of every file

It is written as 00000020.writing-G, where G is the number of the generation of hosts (a second
attempt is .writing-G.2), and renamed once it is complete. So hosts in different generations, such
as those on the two sides of a partition, never write to the same folder. A folder without COMMITTED
is not a checkpoint. COMMITTED records the number of blocks of each stage, so that `load_stage` can
assemble the stages of any other partition of the model. It also records the stages that the run had
dropped, with the step of their saved state, and the replicas with states of their own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from skippipe_sched.errors import InputError

from skippipe_jax.errors import CorruptCheckpoint
from skippipe_jax.storage.files import atomic_write, safe_join, synchronize

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""
COMMITTED, DATA = "COMMITTED", "data.json"
"""Files of a checkpoint: the mark that it is complete, and the position in the data."""
DAMAGED = ".damaged"
"""Suffix of the folder of a damaged step, which is ignored."""
WRITING = ".writing-"
"""Infix after the step in the name of a folder that is being written."""
FORMAT, VERSION = "skippipe-checkpoint", 2


class ReplicaStates(msgspec.Struct, frozen=True):
    """Replicas of which a checkpoint has states in addition to those of their stages.

    Attributes:
        counts: number of such replicas of each stage: all of its replicas, or 0.
        averaging: the section `averaging` of the configuration.
    """

    counts: tuple[int, ...]
    averaging: dict[str, Any]

    @classmethod
    def of(cls, replicas: Sequence[Sequence[int]], averaging: Mapping[str, Any]) -> ReplicaStates:
        """Return all replicas of each stage; a single replica has no state of its own."""
        return cls(tuple(len(own) if len(own) > 1 else 0 for own in replicas), dict(averaging))

    def names(self) -> set[str]:
        """Return the names of their folders."""
        return {replica_name(s, p) for s, count in enumerate(self.counts) for p in range(count)}


class CommitRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"stale_stages": "left_out", "replica_states": "own"},
):
    """Contents of COMMITTED.

    Attributes:
        step: number of completed iterations.
        stage_layers: number of blocks of each stage.
        files: the digest of each file.
        stale_stages: the stages that the run had dropped, and the step of the state that the
            checkpoint holds of each.
        replica_states: the replicas with states of their own, if any.
        metrics: metrics measured after the step. None in checkpoints of former versions.
    """

    step: int
    stage_layers: tuple[int, ...]
    files: dict[str, str]
    stale_stages: dict[int, int] = {}
    replica_states: ReplicaStates | None = None
    metrics: dict[str, float] | None = None

    def stages(self) -> set[str]:
        """Return the names of the parts that hold stages."""
        return set(map(stage_name, range(len(self.stage_layers))))

    def parts(self) -> set[str]:
        """Return the parts of a complete checkpoint: stages, replicas, the state of the data."""
        replicas = set() if self.replica_states is None else self.replica_states.names()
        return {*self.stages(), *replicas, DATA}


@dataclass(frozen=True)
class CheckpointItems:
    """Items of a checkpoint that a host writes: trees whose leaves are jax.Array of this process.

    Attributes:
        stages: the state of each stage, by its index, under a few top-level names.
        replicas: the states of diverged replicas, by stage and place in it.
        replica_states: the replicas whose states all hosts together write, if any.
        stale_stages: on the leader, the stages with a state of an earlier step, and that step.
    """

    stages: Mapping[int, Mapping[str, Any]]
    replicas: Mapping[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    replica_states: ReplicaStates | None = None
    stale_stages: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """Committed checkpoint; the files of its `intact` parts have been verified."""

    folder: Path
    record: CommitRecord
    intact: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """Number of completed iterations."""
        return self.record.step

    def staleness_warnings(self) -> list[str]:
        """Return a sentence for each stage that is older than the checkpoint."""
        return [
            f"stage {stage} of step {self.step} is {self.step - step} steps old: the run bypassed "
            f"it after step {step}"
            for stage, step in sorted(self.record.stale_stages.items())
        ]


class _Header(msgspec.Struct):
    format: str
    version: int


# Names.


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"{step:08d}"


def steps_named(names: Collection[str]) -> list[int]:
    """List the steps whose folders are among these names, ascending."""
    steps = {int(name) for name in names if name.isdecimal()}
    return sorted(step for step in steps if step_name(step) in names)


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a step as an absolute path, which Orbax requires."""
    return run_dir.absolute() / CHECKPOINTS / step_name(step)


def pending_folder(run_dir: Path, step: int, generation: int, attempt: int = 1) -> Path:
    """Return the folder to which the hosts of a generation write a checkpoint until its commit."""
    folder = step_folder(run_dir, step)
    again = f".{attempt}" if attempt > 1 else ""
    return folder.with_name(f"{folder.name}{WRITING}{generation}{again}")


def stage_name(stage: int) -> str:
    """Return the name of the folder of a stage, within that of a step."""
    return f"stage_{stage}"


def replica_name(stage: int, place: int) -> str:
    """Return the name of the folder of a replica's own state, within that of a step."""
    return f"replica_{stage}_{place}"


def checkpoint_part(name: str) -> str:
    """Return the part to which a file belongs: the folder of a stage or replica, or itself."""
    return name.split("/")[0]


# Reading.


def committed_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a committed checkpoint, ascending."""
    steps = steps_with_folders(run_dir)
    return [step for step in steps if is_committed(step_folder(run_dir, step))]


def steps_with_folders(run_dir: Path) -> list[int]:
    """List the steps that have a folder, ascending, committed or not."""
    return steps_named({path.name for path in (run_dir / CHECKPOINTS).glob("*")})


def latest_step(run_dir: Path) -> int | None:
    """Return the last step that has a committed checkpoint, or None."""
    return max(committed_steps(run_dir), default=None)


def is_committed(folder: Path) -> bool:
    """Return whether the folder of a step holds a committed checkpoint."""
    return (folder / COMMITTED).exists()


def open_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint of ``step``, by default the latest.

    Raises:
        InputError: if there is none, or another version of this program wrote it.
        CorruptCheckpoint: if its COMMITTED does not describe a checkpoint.
    """
    steps = committed_steps(run_dir)
    chosen = latest_step(run_dir) if step is None else step
    if chosen is None or chosen not in steps:
        raise InputError(
            str(run_dir / CHECKPOINTS),
            "latest" if step is None else step,
            "this checkpoint does not exist",
            f"Choose one of the steps {steps}" if steps else "Name a run that has checkpoints",
        )
    folder = step_folder(run_dir, chosen)
    text = (folder / COMMITTED).read_bytes()
    try:
        header = msgspec.json.decode(text, type=_Header)
        if header.format != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if header.version != VERSION:
            raise InputError(
                f"{folder / COMMITTED}: version",
                header.version,
                f"another version of this program wrote it; this one reads version {VERSION}",
                "Resume with the version that wrote it, or start a new run",
            )
        record = msgspec.json.decode(text, type=CommitRecord)
        if record.step != chosen:
            raise ValueError(f"its step is {record.step}")
        for name in record.files:
            safe_join(folder, name)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            chosen,
            str(folder / COMMITTED),
            text.decode(errors="replace"),
            f"does not describe a checkpoint: {error!r}",
            _remedy(folder),
        ) from error
    return Checkpoint(folder, record)


def require_intact(checkpoint: Checkpoint, part: str) -> None:
    """Raise CorruptCheckpoint unless every file of ``part`` has its committed digest."""
    if part in checkpoint.intact:
        return
    files = checkpoint.record.files
    recorded = {name: expected for name, expected in files.items() if checkpoint_part(name) == part}
    # COMMITTED lists no file of this part: report its folder as missing.
    for name, expected in (recorded or {part: "no files"}).items():
        path = checkpoint.folder / name
        actual = file_digest(path) if path.is_file() else "missing"
        if actual != expected:
            raise CorruptCheckpoint(
                checkpoint.step,
                str(path),
                actual,
                f"the commit record lists {expected}",
                _remedy(checkpoint.folder),
            )


def file_digest(path: Path) -> str:
    """Return size and sha1 of a file, the fastest hash, to detect accidental damage."""
    with path.open("rb") as file:
        sha1 = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
    return f"{path.stat().st_size} bytes, sha1 {sha1}"


# Writing and removing.


def commit(pending: Path, folder: Path, record: CommitRecord) -> None:
    """Commit the checkpoint written in `pending` as `folder`.

    If other hosts have committed that step meanwhile, their equal checkpoint stays.
    """
    described = {"format": FORMAT, "version": VERSION} | msgspec.to_builtins(record, str_keys=True)
    # On a retry it may already be committed, if a later operation failed.
    if pending.exists() or not is_committed(folder):
        atomic_write(pending / COMMITTED, json.dumps(described, indent=1), durably=True)
        _rename(pending, folder)
    synchronize(folder.parent)


def _rename(pending: Path, folder: Path) -> None:
    if folder.exists() and not is_committed(folder):
        shutil.rmtree(folder)  # An earlier version of this program wrote checkpoints in place.
    try:
        pending.rename(folder)
    except OSError:
        if not is_committed(folder):
            raise
        shutil.rmtree(pending)


def remove(folder: Path) -> None:
    """Remove the folder of a step, committed or not."""
    # Remove the mark first, so that an interruption does not leave a checkpoint with missing files.
    (folder / COMMITTED).unlink(missing_ok=True)
    shutil.rmtree(folder)


def remove_unfinished(run_dir: Path, up_to: tuple[int, int] | None = None) -> None:
    """Remove unfinished checkpoints: all, or those `up_to` a step and a generation.

    Folders of later generations stay, as their hosts may be writing them. A host that still writes
    in a removed folder is cut off from the hosts that call this.
    """
    for folder in (run_dir / CHECKPOINTS).glob(f"*{WRITING}*"):
        step, _, rest = folder.name.partition(WRITING)
        generation = rest.partition(".")[0]
        if not (step.isdecimal() and generation.isdecimal()):
            continue
        if up_to is None or (int(step) <= up_to[0] and int(generation) <= up_to[1]):
            shutil.rmtree(folder, ignore_errors=True)


def quarantine(folder: Path) -> None:
    """Rename the folder of a damaged step, replacing one that was quarantined before."""
    quarantined = folder.with_name(folder.name + DAMAGED)
    if quarantined.exists():
        shutil.rmtree(quarantined)
    folder.rename(quarantined)


def _remedy(folder: Path) -> str:
    """Return the remedy for a damaged checkpoint: the previous step, if there is one."""
    earlier = [step for step in committed_steps(folder.parent.parent) if step < int(folder.name)]
    if earlier:
        return f"Choose the previous checkpoint: step {earlier[-1]}"
    return "Start a new run: there is no earlier checkpoint"
