"""Arrays in files, as Orbax writes them: what is here is all that knows Orbax.

A folder holds the leaves of a tree, each by its path. Every process writes and reads by itself, at
the same time as others or not.
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
"""What is being written: a context whose end waits for the files, and raises what went wrong."""


@functools.cache
def _silence_orbax() -> None:
    """Filter what Orbax prints beside the errors that it raises; from the first write on."""
    # It narrates each save, and prints the traceback of any error that it raises too, through a
    # logger that it shares with other libraries.
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno == logging.WARNING or "/orbax/" not in record.pathname
    )
    # On a full disk each file of a checkpoint may print such a traceback, or an unraisable error,
    # beside the one error, which is raised.
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_another_file(record))
    before = sys.unraisablehook

    def print_unless_late(unraisable: sys.UnraisableHookArgs) -> None:
        if not _is_late_for_orbax(unraisable):
            before(unraisable)

    sys.unraisablehook = print_unless_late


def _is_of_another_file(record: logging.LogRecord) -> bool:
    """Tell whether asyncio reports an error that Orbax did not ask for, after an earlier one."""
    if "exception was never retrieved" not in record.getMessage() or record.exc_info is None:
        return False
    return any("/orbax/" in frame.filename for frame in traceback.extract_tb(record.exc_info[2]))


def _is_late_for_orbax(unraisable: sys.UnraisableHookArgs) -> bool:
    """Tell whether a write has ended on the event loop that Orbax closed when another failed."""
    error = unraisable.exc_value
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return is_closed and unraisable.object is None


def flatten(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path, such as "params/blocks/0/w": independent of container types."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def begin_writing(folder: Path, tree: PyTree) -> Writing:
    """Begin to write the jax.Array leaves of a tree, each of which is on devices of this process.

    Returns once they have left the devices or are held there, so that they may be donated.
    """
    _silence_orbax()
    writer = ocp.AsyncCheckpointer(
        _handler(),
        # In the background, folders would be announced under keys that all processes share: one
        # that saves at the same time takes or clears the other's announcement, which then hangs.
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        multiprocessing_options=_this_process(),
    )
    arrays = {name: _as_global(leaf) for name, leaf in flatten(tree).items()}
    writer.save(folder, args=ocp.args.PyTreeSave(arrays))
    return writer


class ArrayFiles:
    """The arrays of a folder, open for reading for the length of a block."""

    def __init__(self, folder: Path):
        """Open the folder, which `begin_writing` has written."""
        self.folder = folder
        self._reader = ocp.Checkpointer(_handler(), multiprocessing_options=_this_process())

    def __enter__(self) -> ArrayFiles:
        """Open the files; arrays are read later."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder."""
        self._reader.close()

    def described(self) -> Mapping[str, Any]:
        """Describe all arrays by name, each with its `shape` and `dtype`."""
        found = self._reader.metadata(self.folder).item_metadata
        assert found is not None
        return found.tree

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
        """Read some arrays by name; shapes and types are those of the files."""
        as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
        return self._reader.restore(
            self.folder,
            args=ocp.args.PyTreeRestore(
                item=dict(wanted), restore_args=as_numpy, partial_restore=True
            ),
        )


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
    sharding = array.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh([*array.devices()], "one")
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    grid = np.asarray(mesh.devices)
    others = [d for d in jax.devices() if d.process_index != grid.flat[0].process_index]
    if len(others) < grid.size:
        # All others together have not so many: they have only one, for a copy on one.
        return _as_global(jax.device_put(array, grid.flat[0]))
    elsewhere = np.array(others[: grid.size]).reshape(grid.shape)
    copies = Mesh(np.stack([grid, elsewhere]), ("copy", *mesh.axis_names))
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(copies, spec), parts)
