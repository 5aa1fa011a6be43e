"""The tokenizer of a run's data, which the run keeps in its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from skippipe_jax.config import DataConfig
from skippipe_jax.config.tokenizer import BYTES, TOKENIZER_FOLDER, has_tokenizer
from skippipe_jax.data.batches import tokenizer_of
from skippipe_jax.data.tokenizer import copy_tokenizer
from skippipe_jax.storage.new_folder import new_folder


def keep_tokenizer(config: DataConfig, run: Path) -> None:
    """Copy the tokenizer into the folder of a run, if it is not that of bytes or there already."""
    name, own = tokenizer_of(config), run / TOKENIZER_FOLDER
    if name != BYTES and not own.is_dir():
        with new_folder(own, "run_dir") as partial:
            copy_tokenizer(name, partial)


def with_tokenizer_of_run(config: DataConfig, run: Path) -> DataConfig:
    """The configuration with the tokenizer that a run keeps, unless it is that of bytes."""
    if config.tokenizer == BYTES or not has_tokenizer(run / TOKENIZER_FOLDER):
        return config
    return replace(config, tokenizer=str(run / TOKENIZER_FOLDER))
