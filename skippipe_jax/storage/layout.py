"""Where a run's checkpoints lie, and which of them are whole.

In the run folder, which all hosts share:

    checkpoints/00000020/     one step
        stage_0/ stage_1/ ..  an Orbax checkpoint of each stage's state, written by one host
        replica_1_0/ ..       one of each replica's own state, where replicas go apart: of a stage,
                              and of the place in it, written by the host that holds it
        data.json             how far the data had been read
        COMMITTED             written last: what the checkpoint holds, with a digest of every file

It is written as 00000020.writing-G, where G counts generations of hosts (as .writing-G.2 where that
failed and is tried again), and gets its name once it is whole: those who were cut off write another
one than those who went on without them. A folder without COMMITTED is not a checkpoint. COMMITTED
says how many blocks each stage held, so that `read_stage` can put the stages of any other cut
together from those. It also says which stages the run went on without by then, and after which step
their state is that the checkpoint holds, and which replicas have states of their own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax.storage.inside import inside
from skippipe_jax.storage.whole_file import synchronize, write_whole

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
COMMITTED, DATA = "COMMITTED", "data.json"
"""Of the files of a checkpoint, the mark that it is whole, and how far the data had been read."""
DAMAGED = ".damaged"
"""What the name of a folder ends with whose step is damaged: it counts no more."""
WRITING = ".writing-"
"""What follows the number of the step in the name of a folder that is being written."""
FORMAT, VERSION = "skippipe-checkpoint", 2


@dataclass(frozen=True)
class OwnStates:
    """Which replicas a checkpoint has states of, beside those of their stages.

    Attributes:
        counts: of each stage, how many: all of its replicas, or none.
        averaging: how they are averaged, as the configuration says it.
    """

    counts: tuple[int, ...]
    averaging: Mapping[str, Any]

    @classmethod
    def of(cls, replicas: Sequence[Sequence[int]], averaging: Mapping[str, Any]) -> OwnStates:
        """Of all replicas of each stage; a single one has nothing beside its stage's."""
        return cls(tuple(len(own) if len(own) > 1 else 0 for own in replicas), averaging)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of stages with ``stage_layers`` blocks.

    ``files`` gives the digest of each file in ``folder``; those of the ``intact`` parts have been
    found to have it. Stages that were ``left_out`` are as they were after an earlier step: which.
    Where replicas go apart, there are ``own`` states of them.
    """

    folder: Path
    step: int
    stage_layers: tuple[int, ...]
    files: Mapping[str, str]
    intact: frozenset[str] = frozenset()
    left_out: Mapping[int, int] = field(default_factory=dict)
    own: OwnStates | None = None

    def about_left_out(self) -> list[str]:
        """Which stages are older than the checkpoint, a sentence for each."""
        return [
            f"stage {stage} of step {self.step} is {self.step - step} steps old: the run went on "
            f"without it after step {step}"
            for stage, step in sorted(self.left_out.items())
        ]


class DamagedCheckpoint(InputError):
    """A file of the checkpoint of a step is missing, or is not as it was committed."""

    def __init__(self, step: int, field: str, value: str, problem: str, remedy: str):
        """Keep the parts, of the value its beginning: hosts tell each other."""
        super().__init__(field, value[:200], problem, remedy)
        self.step = step

    def parts(self) -> list[str]:
        """What it is made of, but for the step."""
        return [self.field, self.value, self.problem, self.remedy]

    def with_remedy(self, remedy: str) -> DamagedCheckpoint:
        """The same damage, about which something else is to be done."""
        return DamagedCheckpoint(self.step, self.field, self.value, self.problem, remedy)


# Names.


def step_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"{step:08d}"


def steps_named(names: Collection[str]) -> list[int]:
    """The steps whose folders are among these names, ascending."""
    steps = {int(name) for name in names if name.isdecimal()}
    return sorted(step for step in steps if step_name(step) in names)


def step_folder(run_dir: Path, step: int) -> Path:
    """The folder of a step, as an absolute path: Orbax takes no others."""
    return run_dir.absolute() / CHECKPOINTS / step_name(step)


def unfinished_folder(run_dir: Path, step: int, generation: int, attempt: int = 1) -> Path:
    """Where the hosts of a generation write the checkpoint of a step until it is whole."""
    folder = step_folder(run_dir, step)
    again = f".{attempt}" if attempt > 1 else ""
    return folder.with_name(f"{folder.name}{WRITING}{generation}{again}")


def stage_name(stage: int) -> str:
    """The name of the folder of a stage, in that of a step."""
    return f"stage_{stage}"


def replica_name(stage: int, place: int) -> str:
    """The name of the folder of what a replica has of its own, in that of a step."""
    return f"replica_{stage}_{place}"


def replicas_named(own: OwnStates | None) -> set[str]:
    """The names of the folders of all replicas that have states of their own."""
    counts = () if own is None else own.counts
    return {
        replica_name(stage, place) for stage, count in enumerate(counts) for place in range(count)
    }


def part_of(name: str) -> str:
    """Of a file of a checkpoint, the part to which it belongs: a stage, or the file itself."""
    return name.split("/")[0]


# What is there.


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a committed checkpoint, ascending."""
    found = steps_with_folders(run_dir)
    return [step for step in found if is_committed(step_folder(run_dir, step))]


def steps_with_folders(run_dir: Path) -> list[int]:
    """The steps that have a folder, ascending, committed or not."""
    return steps_named({path.name for path in (run_dir / CHECKPOINTS).glob("*")})


def latest_step(run_dir: Path) -> int | None:
    """Return the last step that has a committed checkpoint, or None."""
    return max(saved_steps(run_dir), default=None)


def is_committed(folder: Path) -> bool:
    """Whether the folder of a step holds a whole checkpoint."""
    return (folder / COMMITTED).exists()


def open_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint of ``step``, by default the latest.

    Raises InputError when there is none, or it was written by another version of this program;
    DamagedCheckpoint when its COMMITTED does not describe a checkpoint.
    """
    steps = saved_steps(run_dir)
    chosen = latest_step(run_dir) if step is None else step
    if chosen is None or chosen not in steps:
        raise InputError(
            str(run_dir / CHECKPOINTS),
            "latest" if step is None else step,
            "there is no such checkpoint",
            f"Choose one of the steps {steps}" if steps else "Name a run that has saved one",
        )
    folder = step_folder(run_dir, chosen)
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
        for name in files:
            inside(folder, name)
        left_out = {int(stage): int(of) for stage, of in record.get("left_out", {}).items()}
        layers = tuple(map(int, record["stage_layers"]))
        own = record.get("own")
        if own is not None:
            own = OwnStates(tuple(map(int, own["counts"])), dict(own["averaging"]))
        return Checkpoint(folder, chosen, layers, files, left_out=left_out, own=own)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            chosen,
            str(folder / COMMITTED),
            text.decode(errors="replace"),
            f"does not describe a checkpoint: {error!r}",
            _go_back(folder),
        ) from error


def require_intact(checkpoint: Checkpoint, part: str) -> None:
    """Raise DamagedCheckpoint unless every file of ``part`` is as it was committed."""
    if part in checkpoint.intact:
        return
    recorded = {name: told for name, told in checkpoint.files.items() if part_of(name) == part}
    # A part without files is one that COMMITTED forgot: then its folder counts as missing.
    for name, told in (recorded or {part: "nothing"}).items():
        path = checkpoint.folder / name
        found = digest(path) if path.is_file() else "missing"
        if found != told:
            raise DamagedCheckpoint(
                checkpoint.step,
                str(path),
                found,
                f"was committed as {told}",
                _go_back(checkpoint.folder),
            )


def digest(path: Path) -> str:
    """Tell a file from any that was damaged by accident; sha1 is the fastest that does."""
    with path.open("rb") as file:
        sha1 = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
    return f"{path.stat().st_size} bytes, sha1 {sha1}"


# What comes and goes.


def declare_whole(
    unfinished: Path,
    folder: Path,
    stage_layers: Sequence[int],
    files: Mapping[str, str],
    left_out: Mapping[int, int] | None = None,
    own: OwnStates | None = None,
) -> None:
    """Make what was written in `unfinished` the checkpoint in `folder`, with a digest of each file.

    Stages that are `left_out` are as they were after these steps; there are `own` states of
    replicas.
    If others have done so for that step meanwhile, theirs is the same, and stays.
    """
    record = {
        "format": FORMAT,
        "version": VERSION,
        "step": int(folder.name),
        "stage_layers": list(stage_layers),
        "files": files,
    } | ({"left_out": left_out} if left_out else {})
    if own is not None:
        record["own"] = asdict(own)
    # It may have become whole before what is done after that failed.
    if unfinished.exists() or not is_committed(folder):
        write_whole(unfinished / COMMITTED, json.dumps(record, indent=1), durably=True)
        _rename(unfinished, folder)
    synchronize(folder.parent)


def _rename(unfinished: Path, folder: Path) -> None:
    if folder.exists() and not is_committed(folder):
        shutil.rmtree(folder)  # An earlier version of this program wrote checkpoints in place.
    try:
        unfinished.rename(folder)
    except OSError:
        if not is_committed(folder):
            raise
        shutil.rmtree(unfinished)


def remove(folder: Path) -> None:
    """Remove the folder of a step, whole or not."""
    # The mark goes first: what an interruption leaves is then no checkpoint.
    (folder / COMMITTED).unlink(missing_ok=True)
    shutil.rmtree(folder)


def remove_unfinished(run_dir: Path, up_to: tuple[int, int] | None = None) -> None:
    """Remove what there is of checkpoints that were not finished.

    Of all, or of those `up_to` a step and a generation: what later ones write is not touched.
    Whoever still writes there was cut off from those that call this.
    """
    for folder in (run_dir / CHECKPOINTS).glob(f"*{WRITING}*"):
        step, _, rest = folder.name.partition(WRITING)
        generation = rest.partition(".")[0]
        if not (step.isdecimal() and generation.isdecimal()):
            continue
        if up_to is None or (int(step) <= up_to[0] and int(generation) <= up_to[1]):
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Rename the folder of a damaged step, in the place of one that was set aside before."""
    aside = folder.with_name(folder.name + DAMAGED)
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)


def _go_back(folder: Path) -> str:
    """Say what to do about a damaged checkpoint."""
    earlier = [step for step in saved_steps(folder.parent.parent) if step < int(folder.name)]
    if earlier:
        return f"Choose the checkpoint before: step {earlier[-1]}"
    return "There is no checkpoint before it: start a new run"
