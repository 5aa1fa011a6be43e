"""Hugging Face models become runs, and runs become Hugging Face models.

python -m skippipe_jax.convert from-hf DIR -o RUN
python -m skippipe_jax.convert to-hf RUN -o DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
from skippipe_sched import fields
from skippipe_sched.errors import run_command
from tqdm import tqdm

from skippipe_jax.config import Config, DataConfig, ModelConfig, to_yaml
from skippipe_jax.config.model import DTYPES
from skippipe_jax.config.tokenizer import TOKENIZER_FOLDER
from skippipe_jax.data.tokenizer import write_byte_tokenizer
from skippipe_jax.interop import huggingface
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.runtime.stage_functions import Parameters
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import open_checkpoint
from skippipe_jax.storage.new_folder import new_folder
from skippipe_jax.storage.reader import read_stage
from skippipe_jax.storage.writer import write_checkpoint

LAYERS_OF_STAGE = 4
"""Of a stage that nobody asked for; the model is converted stage by stage."""

DESCRIPTION = """\
Convert models of the Llama 2 and 3 family between the format of Hugging Face and a run's folder.

from-hf reads config.json and safetensors files (one or many; float32, bfloat16 or float16) and
writes a run folder with its configuration, a checkpoint of step 0 and, in tokenizer/, the files of
the tokenizer. Pickled weights (.bin, .pt) are never loaded. To train from the weights no run is
needed: write init_from: hf:DIR in the configuration.

to-hf writes what transformers, vLLM and others load: config.json, safetensors and the tokenizer,
which for a run on bytes has a token for each.

Only one stage of the model is held in memory at a time. The output is there whole or not at all.
"""


def main() -> int:
    """Parse the command line and convert; returns the exit code."""
    arguments = _parser().parse_args()
    # Nothing is computed, and accelerators may be too small or busy.
    jax.config.update("jax_platforms", "cpu")

    def command() -> int:
        if arguments.command == "from-hf":
            config = from_huggingface(arguments.source, arguments.output, arguments.stages)
            print(
                f"{_parameters(config.model):,} parameters of {config.model.layers} layers are in "
                f"{arguments.output}. Their held-out loss: "
                f"python -m skippipe_jax.evaluate --run {arguments.output}"
            )
        else:
            step = to_huggingface(arguments.run, arguments.output, arguments.step, arguments.dtype)
            print(f"step {step} of {arguments.run} is in {arguments.output}")
        return 0

    return run_command(command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_jax.convert",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("from-hf", help="a Hugging Face model becomes a run")
    reading.add_argument("source", type=Path, metavar="DIR", help="the folder of the model")
    reading.add_argument(
        "-o", "--output", type=Path, required=True, metavar="RUN", help="a new folder for the run"
    )
    reading.add_argument(
        "--stages",
        type=int,
        metavar="N",
        help=f"into how many stages to cut (default: one for every {LAYERS_OF_STAGE} layers)",
    )
    writing = commands.add_parser("to-hf", help="a run becomes a Hugging Face model")
    writing.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    writing.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder for the model"
    )
    writing.add_argument("--step", type=int, help="which checkpoint (default: the latest)")
    writing.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: that of the run's parameters)"
    )
    return parser


def from_huggingface(source: Path, run: Path, stages: int | None = None) -> Config:
    """Write the model in `source` as a run cut into `stages` stages; returns its configuration.

    Raises:
        InputError: if the model cannot be read, or `run` is not new.
    """
    weights = huggingface.open_weights(source)
    model = weights.model
    if stages is None:
        stages = max(1, model.layers // LAYERS_OF_STAGE)
    model = _cut(model, fields.integer(stages, "--stages", 1, model.layers))
    length = min(DataConfig.sequence_length, model.context)
    config = Config(run_dir=str(run), model=model, data=DataConfig(sequence_length=length))
    layers, shapes = model.layers_of_stages(stages), stage_shapes(model, stages)

    with (
        new_folder(run, "--output") as folder,
        tqdm(total=stages, unit="stage", disable=None, leave=False) as bar,
    ):

        def state_of(stage: int) -> dict[str, Parameters]:
            bar.update(stage - bar.n)
            parameters = weights.read_stage(shapes[stage], sum(layers[:stage]))
            return {"parameters": jax.device_put(parameters)}

        weights.copy_companions(folder / TOKENIZER_FOLDER)
        write_checkpoint(folder, 0, layers, state_of)
        (folder / run_folder.CONFIG).write_text(to_yaml(config), encoding="utf-8")
    return config


def to_huggingface(
    run: Path, target: Path, step: int | None = None, dtype: str | None = None
) -> int:
    """Write a checkpoint of a run, by default the latest, as a model; returns its step.

    Raises:
        InputError: if the checkpoint cannot be read, or `target` is not new.
    """
    model = run_folder.saved_config(run, "RUN").model
    checkpoint = open_checkpoint(run, step)
    cut = checkpoint.stage_layers
    # The run may have cut its model otherwise since.
    model = replace(model, stage_layers=cut)
    shapes = stage_shapes(model, len(cut))
    dtype = dtype or model.parameter_dtype
    companions = run / TOKENIZER_FOLDER

    def parameters_of(stage: int) -> Parameters:
        return read_stage(checkpoint, cut, stage, {"parameters": shapes[stage]})["parameters"]

    with new_folder(target, "--output") as folder:
        huggingface.write_weights(folder, model, len(cut), parameters_of, dtype)
        description = huggingface.config_json(model, dtype, companions)
        text = json.dumps(description, indent=2) + "\n"
        (folder / huggingface.CONFIG).write_text(text, encoding="utf-8")
        if companions.exists():
            huggingface.copy_companions(companions, folder)
        else:
            write_byte_tokenizer(folder, "--output")
    return checkpoint.step


def _cut(model: ModelConfig, stages: int) -> ModelConfig:
    """The model cut into `stages` stages of equal layers, or of one more in the first of them."""
    each, more = divmod(model.layers, stages)
    if not more:
        return model
    return replace(model, stage_layers=(each + 1,) * more + (each,) * (stages - more))


def _parameters(model: ModelConfig) -> int:
    return parameter_count(stage_shapes(replace(model, stage_layers=None), 1))


if __name__ == "__main__":
    sys.exit(main())
