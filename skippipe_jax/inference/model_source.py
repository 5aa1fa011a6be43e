"""Where the weights of a trained model come from: a checkpoint of a run, or a Hugging Face folder.

Stages are read one by one, so that a host can hold some of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, DataConfig, parse_config, to_tree
from skippipe_jax.config.data import has_tokenizer
from skippipe_jax.config.model import MOST_STAGES, StagePartition
from skippipe_jax.config.pretrained import require_no_window
from skippipe_jax.data.batches import tokenizer_of
from skippipe_jax.data.documents import local_path
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.interop import huggingface
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.storage.loading import load_stage
from skippipe_jax.storage.restore import latest_intact
from skippipe_jax.storage.run_dir import RunDir


@dataclass(frozen=True)
class ModelSource:
    """A trained model of which no stage has been read yet.

    Attributes:
        config: its configuration.
        stages: how many there are.
        load: reads the parameters of a stage onto the first device.
        step: that of its checkpoint, if it has one.
        files: which weights these are: digests of the files of a checkpoint, or their sizes.
        folder: that of its run, or of the model from Hugging Face.
    """

    config: Config
    stages: int
    load: Callable[[int], Any]
    step: int | None
    files: Mapping[str, str | int]
    folder: Path

    @property
    def cut(self) -> StagePartition:
        """Number of blocks of each stage."""
        return self.config.model.stage_partition(self.stages)

    @property
    def identity(self) -> str:
        """Digest by which hosts recognize the same weights, stages and number formats."""
        described = [to_tree(self.config.model), self.stages, self.step, dict(self.files)]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def model(self, held: Collection[int] | None = None) -> StagedModel:
        """Read these stages, by default all; in place of the others there is None."""
        parameters = [
            self.load(stage) if held is None or stage in held else None
            for stage in range(self.stages)
        ]
        data = self.config.data
        return StagedModel(self.config.model, parameters, tokenizer_name=tokenizer_of(data))


def open_source(
    run: Path | None = None,
    hf: Path | None = None,
    step: int | str | None = None,
    num_stages: int | None = None,
    overrides: Sequence[str] = (),
) -> ModelSource:
    """Return the model of a run, or else of a folder from Hugging Face.

    Args:
        run: folder of a run.
        hf: folder of a model from Hugging Face.
        step: checkpoint of the run: its step, or "best" for the lowest validation loss; by default
            the newest that is whole.
        num_stages: number of stages of a model from Hugging Face; by default six, or as many fewer
            as its layers spread over evenly.
        overrides: overrides of the configuration, as in `--set`.

    Raises:
        InputError: if there is no such model or checkpoint, its configuration cannot be read, or
            the overrides hold out text that the run has trained on.
    """
    if run is not None:
        if num_stages is not None:
            problem = "the plan of a run sets its number of stages"
            raise InputError("--num-stages", num_stages, problem, "Leave it out")
        return _of_run(run, step, overrides)
    if hf is None:
        raise InputError("--run", None, "is missing", "Give --run DIR or --hf DIR")
    if step is not None:
        raise InputError("--step", step, "a Hugging Face folder has no steps", "Leave it out")
    return _of_huggingface(hf, num_stages, overrides)


def load_model(
    source: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    stages: int | None = None,
) -> StagedModel:
    """Read a model from the folder of a run, or from a folder of Hugging Face.

    `step` is that of a run and `stages` the number of those from Hugging Face, as in `open_source`.

    Raises:
        InputError: if there is no such model, or it cannot be read.
    """
    folder = Path(source)
    if not RunDir(folder).is_run and (folder / "config.json").exists():
        if step is not None:
            raise InputError("step", step, "a Hugging Face folder has no steps", "Leave it out")
        return open_source(hf=folder, num_stages=stages).model()
    return open_source(folder, step=step, num_stages=stages).model()


def _of_huggingface(folder: Path, cut: int | None, overrides: Sequence[str]) -> ModelSource:
    weights = huggingface.open_weights(folder, "--hf")
    length = min(weights.model.context, Config().data.sequence_length)
    tree = {"model": to_tree(weights.model), "data": {"sequence_length": length}}
    if has_tokenizer(folder):
        tree["data"]["tokenizer"] = str(folder)
    config = parse_config(tree, overrides)
    require_no_window(folder, config.model.context)
    if cut is None:
        cut = next(n for n in range(MOST_STAGES, 0, -1) if config.model.layers % n == 0)
    layers = config.model.stage_partition(fields.integer(cut, "--num-stages", 1))
    shapes = stage_shapes(config.model, cut)

    def load(stage: int) -> Any:
        return jax.device_put(weights.load_stage(shapes[stage], sum(layers[:stage])))

    files = {name: path.stat().st_size for name, path in weights.files.items()}
    return ModelSource(config, cut, load, None, files, folder)


def _of_run(folder: Path, step: int | str | None, overrides: Sequence[str]) -> ModelSource:
    run = RunDir(folder)
    config = run.config("--run", overrides)
    # An override leads from the current folder.
    is_as_saved = not any(one.startswith(("data.path=", "data.mixture")) for one in overrides)
    data = run.with_tokenizer(run.located(config.data) if is_as_saved else config.data)
    if overrides:
        require_same_split(data, run.located(run.config("--run").data))
    checkpoint = latest_intact(folder, run.step_named(step))
    # The run may have cut its model otherwise since.
    cut = checkpoint.record.stage_layers
    config = replace(
        config,
        model=replace(config.model, stage_layers=cut),
        data=data,
    )
    shapes = stage_shapes(config.model, len(cut))

    def load(stage: int) -> Any:
        abstract = {"parameters": shapes[stage]}
        return load_stage(checkpoint, cut, stage, abstract)["parameters"]

    return ModelSource(config, len(cut), load, checkpoint.step, checkpoint.record.files, folder)


def require_same_split(data: DataConfig, of_run: DataConfig) -> None:
    """Refuse to divide the text of a run otherwise than it did."""
    if not _divided_by_seed(data) & _divided_by_seed(of_run):
        return
    for key in ("held_out", "shuffle_seed"):
        if getattr(data, key) != getattr(of_run, key):
            raise InputError(
                f"data.{key}",
                getattr(data, key),
                "the held-out text would contain text that the run has trained on",
                f"Set it to {getattr(of_run, key)}, or use other text",
            )


def _divided_by_seed(data: DataConfig) -> set[tuple[str, str | None, str]]:
    """Return the sources whose held-out part follows from the configuration."""
    return {
        (one.kind, one.path and local_path(one.path), one.text_field)
        for one in data.sources()
        if one.kind != "tokens"
    }
