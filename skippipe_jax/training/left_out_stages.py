"""Left-out stages, which no host serves: how checkpoints store them, and how they are restored.

A checkpoint always holds all stages. For a left-out stage the leader copies the state of the last
checkpoint and records its step (`stale_stages`). A host that serves the stage again loads that
state. The update count of the optimizer is set to that of the run, so that all stages use one
learning rate.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.config.cluster import SKIP
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.runtime.stage_functions import functions_of_run
from skippipe_jax.runtime.stage_rebuild import with_count
from skippipe_jax.runtime.state import StateTree, shapes_of_state
from skippipe_jax.runtime.state_copy import Copy, packed
from skippipe_jax.runtime.state_transfer import beside
from skippipe_jax.storage.checkpoint import Checkpoint, open_checkpoint
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.storage.loading import load_stage_numpy, stage_step


def states_of_left_out_stages(
    config: Config, stages: int, left_out: Collection[int], updates: int
) -> tuple[dict[int, dict[str, Any]], dict[int, int]]:
    """Return the states of left-out stages for the next checkpoint, and the step of each state.

    `updates` is the number of updates that the optimizer has made.
    """
    checkpoint = open_checkpoint(Path(config.run_dir))
    cut = config.model.stage_partition(stages)
    kept: dict[int, dict[str, Any]] = {}
    for stage in left_out:
        state = _read(config, checkpoint, stages, stage)
        counted = with_count(state["optimizer_state"], updates)
        kept[stage] = jax.tree.map(beside, {**state, "optimizer_state": counted})
    return kept, {stage: stage_step(checkpoint, cut, stage) for stage in left_out}


def read_left_out_stages(config: Config, group: Group) -> tuple[Copy, ...]:
    """Read from checkpoints the left-out stages that this host provides to their new hosts.

    Raises:
        InputError: if a checkpoint cannot be read.
    """
    generation, own_host = group.generation, (group.hosts[group.index],)
    restored = [made for made in generation.remade if made.by == SKIP and made.sources == own_host]
    copies = []
    for made in restored:
        checkpoint = open_checkpoint(Path(config.run_dir), made.step)
        state = _read(config, checkpoint, len(generation.placement), made.stage)
        copies.append(Copy(made.stage, made.step, packed(state)))
    return tuple(copies)


def saved_steps_of_lost_stages(config: Config, generation: Generation) -> dict[int, int]:
    """Return, for each lost stage, the step of its state in the last checkpoint.

    Lists only stages that are dropped or restored. A host without the run folder returns {}.
    """
    steps: dict[int, int | None] = dict.fromkeys({*generation.left_out} & {*generation.lost})
    steps |= {made.stage: made.step for made in generation.remade if made.by == SKIP}
    if not steps or is_joined(Path(config.run_dir)):
        return {}
    cut = config.model.stage_partition(len(generation.placement))
    return {
        stage: stage_step(open_checkpoint(Path(config.run_dir), step), cut, stage)
        for stage, step in steps.items()
    }


def _read(config: Config, checkpoint: Checkpoint, stages: int, stage: int) -> StateTree:
    cut = config.model.stage_partition(stages)
    functions = functions_of_run(config, stages)[stage]
    return load_stage_numpy(checkpoint, cut, stage, shapes_of_state(functions))
