"""Arrays in files, written and read by Orbax; no other module imports Orbax.

A folder holds the leaves of a tree, each by its path. Every process writes and reads independently
of other processes.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PyTree = Any

Writing = ocp.AsyncCheckpointer
"""Write in progress: a context manager whose exit waits for the files and raises their errors."""


@functools.cache
def _silence_orbax() -> None:
    """Filter the messages that Orbax prints in addition to the errors that it raises."""
    # Orbax logs each save, and the traceback of each error that it also raises, through a logger
    # that other libraries use too.
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno == logging.WARNING or "/orbax/" not in record.pathname
    )
    # On a full disk each file of a checkpoint may print a traceback or an unraisable error, in
    # addition to the one error that is raised.
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_another_file(record))
    before = sys.unraisablehook

    def print_unless_late(unraisable: sys.UnraisableHookArgs) -> None:
        if not _is_late_for_orbax(unraisable):
            before(unraisable)

    sys.unraisablehook = print_unless_late


def _is_of_another_file(record: logging.LogRecord) -> bool:
    """Return whether asyncio reports an error of Orbax that Orbax never retrieved."""
    if "exception was never retrieved" not in record.getMessage() or record.exc_info is None:
        return False
    return any("/orbax/" in frame.filename for frame in traceback.extract_tb(record.exc_info[2]))


def _is_late_for_orbax(unraisable: sys.UnraisableHookArgs) -> bool:
    """Return whether a write ended after Orbax had closed its event loop because another failed."""
    error = unraisable.exc_value
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return is_closed and unraisable.object is None


def flatten(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path, such as "params/blocks/0/w", independent of container types."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def begin_writing(folder: Path, tree: PyTree) -> Writing:
    """Start writing the jax.Array leaves of a tree, which are on devices of this process.

    Returns once they have been copied from the devices or are held there, so that the caller may
    donate them.
    """
    _silence_orbax()
    writer = ocp.AsyncCheckpointer(
        _handler(),
        # Folders created in the background are announced under keys that all processes share:
        # processes that save at the same time take each other's announcement, and one hangs.
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        multiprocessing_options=_this_process(),
    )
    arrays = {name: _as_global(leaf) for name, leaf in flatten(tree).items()}
    writer.save(folder, args=ocp.args.PyTreeSave(arrays))
    return writer


def describe_arrays(folder: Path) -> Mapping[str, Any]:
    """Return a description of each array of a folder by name, with its `shape` and `dtype`."""
    with _reader() as reader:
        metadata = reader.metadata(folder).item_metadata
    assert metadata is not None
    return metadata.tree


def read_arrays(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Read some arrays of a folder by name, with the shapes and types of the files."""
    as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
    arguments = ocp.args.PyTreeRestore(
        item=dict(wanted), restore_args=as_numpy, partial_restore=True
    )
    with _reader() as reader:
        return reader.restore(folder, args=arguments)


def _reader() -> ocp.Checkpointer:
    return ocp.Checkpointer(_handler(), multiprocessing_options=_this_process())


def _this_process() -> ocp.options.MultiprocessingOptions:
    """Return options for saving and restoring in this process alone, without barriers."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}"
    )


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return the handler that writes a flat mapping of jax.Array and reads it as NumPy arrays."""
    arrays = ocp.type_handlers.ArrayHandler(
        primary_host=jax.process_index(),
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # Saves only 8%, and training needs the cores.
        multiprocessing_options=_this_process(),
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        ),
    )


def _as_global(array: jax.Array) -> jax.Array:
    """Return an array of this process as the first copy of a global array.

    With several processes Orbax refuses arrays that only one process can access. It writes only the
    first copy, so the other process does not take part.
    """
    if jax.process_count() == 1:
        return array
    sharding = array.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh([*array.devices()], "one")
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    grid = np.asarray(mesh.devices)
    others = [d for d in jax.devices() if d.process_index != grid.flat[0].process_index]
    if len(others) < grid.size:
        # Too few devices elsewhere for a second copy: gather the array on one device.
        return _as_global(jax.device_put(array, grid.flat[0]))
    elsewhere = np.array(others[: grid.size]).reshape(grid.shape)
    copies = Mesh(np.stack([grid, elsewhere]), ("copy", *mesh.axis_names))
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(copies, spec), parts)
