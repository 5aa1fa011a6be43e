"""A trained model by its folder: that of a run, or one from Hugging Face."""

from __future__ import annotations

import os
from pathlib import Path

from skippipe_sched.errors import InputError

from skippipe_jax.inference.model_source import read_model
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.storage.run_dir import RunDir


def load_model(
    source: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    stages: int | None = None,
) -> StagedModel:
    """Read a model from the folder of a run, or from a folder of Hugging Face.

    Args:
        source: the folder.
        step: which checkpoint of a run: its step, or "best" for the lowest validation loss; by
            default the latest that is whole.
        stages: into how many stages a model from Hugging Face is cut; by default six, or as many
            fewer as its layers spread over evenly.

    Raises:
        InputError: if there is no such model, or it cannot be read.
    """
    folder = Path(source)
    if not RunDir(folder).is_run and (folder / "config.json").exists():
        if step is not None:
            raise InputError("step", step, "a Hugging Face folder has no steps", "Leave it out")
        return read_model(None, folder, cut=stages)[0]
    return read_model(folder, None, step, stages)[0]
