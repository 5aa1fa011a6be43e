"""Whole models from Hugging Face's format to the folder of a run, and back, stage by stage."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from skippipe_sched import fields
from tqdm import tqdm

from skippipe_jax.config import Config, DataConfig, ModelConfig, to_yaml
from skippipe_jax.config.data import TOKENIZER_FOLDER, has_tokenizer
from skippipe_jax.config.model import LAYERS_PER_STAGE, StagePartition
from skippipe_jax.config.parsing import CONFIG
from skippipe_jax.config.pretrained import require_no_window
from skippipe_jax.data.chat import end_of_turn
from skippipe_jax.data.tokenizer import load_tokenizer, write_byte_tokenizer
from skippipe_jax.interop import huggingface
from skippipe_jax.models.branch_scales import BranchScales
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.runtime.stage_functions import Parameters
from skippipe_jax.storage.checkpointer import write_initial_checkpoint
from skippipe_jax.storage.files import new_directory
from skippipe_jax.storage.loading import load_stage
from skippipe_jax.storage.restore import latest_intact
from skippipe_jax.storage.run_dir import RunDir


def from_huggingface(source: Path, run: Path, stages: int | None = None) -> Config:
    """Write the model in `source` as a run cut into `stages` stages; returns its configuration.

    Raises:
        InputError: if the model cannot be read, or `run` is not new.
    """
    weights = huggingface.open_weights(source, "DIR")
    model = weights.model
    require_no_window(source, model.context)
    if stages is None:
        stages = max(1, model.layers // LAYERS_PER_STAGE)
    model = _cut(model, fields.integer(stages, "--num-stages", 1, model.layers))
    length = min(DataConfig.sequence_length, model.context)
    config = Config(run_dir=str(run), model=model, data=DataConfig(sequence_length=length))
    layers, shapes = model.stage_partition(stages), stage_shapes(model, stages)

    with (
        new_directory(run, "--output") as folder,
        tqdm(total=stages, unit="stage", disable=None, leave=False) as bar,
    ):

        def state_of(stage: int) -> dict[str, Parameters]:
            bar.update(stage - bar.n)
            parameters = weights.load_stage(shapes[stage], sum(layers[:stage]))
            return {"parameters": jax.device_put(parameters)}

        weights.copy_tokenizer(folder / TOKENIZER_FOLDER)
        write_initial_checkpoint(folder, 0, layers, state_of)
        (folder / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    return config


@dataclass(frozen=True)
class Export:
    """Files that were written for a run.

    Attributes:
        step: of the checkpoint.
        dtype: of the weights.
        end_of_turn: text and token with which an answer ends, where there is a chat template that
            tells, and the run may have learnt by it.
    """

    step: int
    dtype: str
    end_of_turn: tuple[str, int] | None


def to_huggingface(
    run: Path,
    target: Path,
    step: int | None = None,
    dtype: str | None = None,
    scales: BranchScales | None = None,
) -> Export:
    """Write a checkpoint of a run, by default the newest whole one, as a model.

    `scales` of residual branches are folded into the weights.

    Raises:
        InputError: if the checkpoint cannot be read, or `target` is not new.
    """
    config = RunDir(run).config("RUN")
    model = config.model
    checkpoint = latest_intact(run, step)
    cut = StagePartition(checkpoint.record.stage_layers)
    # The run may have cut its model otherwise since.
    model = replace(model, stage_layers=cut)
    shapes = stage_shapes(model, len(cut))
    dtype = dtype or model.parameter_dtype
    companions = run / TOKENIZER_FOLDER
    turn_end = _end_of_turn(companions, config.data)
    end_token = None if turn_end is None else turn_end[1]

    def parameters_of(stage: int) -> Parameters:
        parameters = load_stage(checkpoint, cut, stage, {"parameters": shapes[stage]})["parameters"]
        return parameters if scales is None else scales.folded(parameters, cut, stage)

    with new_directory(target, "--output") as folder:
        huggingface.write_weights(folder, model, len(cut), parameters_of, dtype)
        description = huggingface.config_json(model, dtype, companions, end_token)
        text = json.dumps(description, indent=2) + "\n"
        (folder / huggingface.CONFIG).write_text(text, encoding="utf-8")
        if companions.exists():
            huggingface.copy_companions(companions, folder)
            huggingface.end_generation_at(end_token, folder)
        else:
            write_byte_tokenizer(folder, "--output")
    return Export(checkpoint.step, dtype, turn_end)


def _end_of_turn(companions: Path, data: DataConfig) -> tuple[str, int] | None:
    """Return text and token with which answers end that a run may have learnt, if known."""
    # Tokens may be those of conversations, and lie elsewhere.
    has_learnt = any(source.kind in ("chat", "tokens") for source in data.sources())
    if not has_learnt or not has_tokenizer(companions):
        return None
    today = data.today or datetime.date.today().isoformat()
    return end_of_turn(load_tokenizer(str(companions)), today)


def _cut(model: ModelConfig, stages: int) -> ModelConfig:
    """Cut the model into `stages` stages of equal layers, or of one more in the first ones."""
    each, more = divmod(model.layers, stages)
    if not more:
        return model
    return replace(model, stage_layers=(each + 1,) * more + (each,) * (stages - more))
