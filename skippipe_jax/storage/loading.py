"""Loading of stages from a checkpoint, under any stage partition."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from skippipe_sched.errors import InputError

from skippipe_jax.storage.arrays import PyTree, describe_arrays, flatten, read_arrays
from skippipe_jax.storage.checkpoint import (
    COMMITTED,
    DATA,
    Checkpoint,
    replica_name,
    require_intact,
    stage_name,
)


def load_stage(
    checkpoint: Checkpoint, stage_layers: Sequence[int], stage: int, abstract: Mapping[str, PyTree]
) -> PyTree:
    """Load a stage as `load_stage_numpy` does onto devices, in buffers that may be donated.

    A leaf of `abstract` without a sharding goes to the first local device.
    """
    local = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda array, leaf: jax.device_put(array, leaf.sharding or local, may_alias=False),
        load_stage_numpy(checkpoint, stage_layers, stage, abstract),
        abstract,
    )


def load_stage_numpy(
    checkpoint: Checkpoint, stage_layers: Sequence[int], stage: int, abstract: Mapping[str, PyTree]
) -> PyTree:
    """Read the state of one stage, bit for bit as it was saved, under any stage partition.

    It returns NumPy arrays, so no device memory is used. Arrays of blocks (with "blocks" in their
    path) have a row for each block, and are assembled from the saved stages that hold these blocks,
    one of which is in memory at a time. All other arrays are equal in every stage that has them
    (counters), or exist only in the data stage.

    Args:
        checkpoint: from `open_checkpoint`.
        stage_layers: the blocks of each stage in the current partition; their sum is that of
            `CommitRecord.stage_layers`.
        stage: index of the stage in this partition.
        abstract: tree of jax.ShapeDtypeStruct to read. Each of its top-level entries (such as
            "parameters") is read completely; saved entries that it omits are not read.

    Raises:
        InputError: if the checkpoint is of a model with another number of layers, a file of it is
            missing or damaged, or the saved arrays differ from those of `abstract`.
    """
    layers = checkpoint.record.stage_layers
    if sum(layers) != sum(stage_layers):
        raise InputError(
            f"{checkpoint.folder / COMMITTED}: stage_layers",
            list(layers),
            f"the checkpoint has {sum(layers)} layers, and the configured model has "
            f"{sum(stage_layers)}",
            "Configure the model that was saved, or start a new run",
        )
    wanted = flatten(abstract)
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for saved, rows in _rows_of_saved_stages(layers, stage_layers, stage):
        missing = {n: leaf for n, leaf in wanted.items() if _is_of_blocks(n) or not pieces[n]}
        both_data_stages = stage == saved == 0
        for name, array in _read_saved(checkpoint, saved, missing, both_data_stages).items():
            # Copy, since a view of some rows would keep all in memory.
            pieces[name].append(array[rows].copy() if _is_of_blocks(name) else array)
    leaves = []
    for name in wanted:
        arrays = pieces.pop(name)  # Free the pieces after concatenation.
        leaves.append(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def load_replica(
    checkpoint: Checkpoint,
    stage: int,
    place: int,
    abstract_of: Callable[[Collection[str]], Mapping[str, PyTree]],
) -> PyTree:
    """Read a replica's own state, bit for bit as it was saved, as NumPy arrays.

    `abstract_of` gets the names of all saved arrays, and returns the expected tree.

    Raises:
        InputError: if a file is missing or damaged, or the saved arrays differ from the expected.
    """
    name = replica_name(stage, place)
    require_intact(checkpoint, name)
    folder = checkpoint.folder / name
    described = describe_arrays(folder)
    abstract = abstract_of(described.keys())
    wanted = flatten(abstract)
    _require_same(folder, described, wanted)
    read = read_arrays(folder, wanted)
    return jax.tree.unflatten(jax.tree.structure(abstract), [read[name] for name in wanted])


def stage_step(checkpoint: Checkpoint, stage_layers: Sequence[int], stage: int) -> int:
    """Return the step of the state of a stage in a checkpoint, under any stage partition.

    That is the step of the checkpoint, unless the blocks come from a stage that was dropped.
    """
    saved = _rows_of_saved_stages(checkpoint.record.stage_layers, stage_layers, stage)
    return min(checkpoint.record.stale_stages.get(own, checkpoint.step) for own, _ in saved)


def parts_for_stages(
    checkpoint: Checkpoint, stage_layers: Sequence[int], stages: Collection[int]
) -> set[str]:
    """Return the parts of a checkpoint that `load_stage` reads for some stages of a partition."""
    if sum(checkpoint.record.stage_layers) != sum(stage_layers):
        return set()  # `load_stage` refuses it.
    return {
        stage_name(saved)
        for stage in stages
        for saved, _ in _rows_of_saved_stages(checkpoint.record.stage_layers, stage_layers, stage)
    }


def load_data_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the position in the data; raises InputError like `load_stage_numpy`."""
    require_intact(checkpoint, DATA)
    return json.loads((checkpoint.folder / DATA).read_text())


def _is_of_blocks(name: str) -> bool:
    """Return whether an array has a row for each block of its stage."""
    return "blocks" in name.split("/")


def _rows_of_saved_stages(
    saved_layers: Sequence[int], stage_layers: Sequence[int], stage: int
) -> list[tuple[int, slice]]:
    """Return the saved stages that hold blocks of a stage, in order, and their rows."""
    first = sum(stage_layers[:stage])
    last = first + stage_layers[stage]
    parts = []
    for saved, layers in enumerate(saved_layers):
        before = sum(saved_layers[:saved])
        rows = slice(max(0, first - before), min(layers, last - before))
        if rows.start < rows.stop:
            parts.append((saved, rows))
    return parts


def _read_saved(
    checkpoint: Checkpoint,
    stage: int,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    both_data_stages: bool,
) -> dict[str, np.ndarray]:
    """Read arrays of a saved stage; raise InputError if some are missing or block arrays differ.

    With ``both_data_stages`` the saved stage may have no other arrays at all.
    """
    require_intact(checkpoint, stage_name(stage))
    layers = checkpoint.record.stage_layers[stage]
    expected = {
        name: jax.ShapeDtypeStruct((layers, *leaf.shape[1:]), leaf.dtype)
        if _is_of_blocks(name)
        else leaf
        for name, leaf in wanted.items()
    }
    entries = {name.split("/")[0] for name in wanted}
    folder = checkpoint.folder / stage_name(stage)
    comparable = {
        name: leaf
        for name, leaf in describe_arrays(folder).items()
        if name.split("/")[0] in entries
        and (name in wanted or _is_of_blocks(name) or both_data_stages)
    }
    _require_same(folder, comparable, expected)
    return read_arrays(folder, expected)


def _require_same(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise InputError unless both have arrays of the same names, shapes and types."""

    def describe(arrays: Mapping[str, Any], name: str) -> str:
        if name not in arrays:
            return "no array of this name"
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
