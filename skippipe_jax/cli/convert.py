"""The command that converts Hugging Face models to runs, and runs to Hugging Face models."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_sched.errors import loading

from skippipe_jax.cli.arguments import (
    accept_old_names,
    add_path,
    add_scale,
    add_step,
    required_path,
)
from skippipe_jax.config.choices import DTYPES
from skippipe_jax.config.model import LAYERS_PER_STAGE

DESCRIPTION = """\
Convert models between the Hugging Face format and the folder of a run: Llama 2 and 3, and Mistral
without a sliding window, which is exported as Llama.

from-hf reads config.json and safetensors files (float32, bfloat16 or float16), never pickled
weights (.bin, .pt), and writes a configuration, a checkpoint of step 0 and the tokenizer.
Fine-tuning needs no conversion: set init_from: hf:DIR in the configuration of the run.

to-hf writes config.json, safetensors files and the tokenizer, for transformers, vLLM and others;
for a run on bytes, a tokenizer with one token for each byte.

One stage of the model is in memory at a time. The output is written completely or not at all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="direction")
    reading = commands.add_parser("from-hf", help="convert a Hugging Face model to a run")
    reading.description = (
        "Convert a Hugging Face model to the folder of a run, with a checkpoint of step 0, for "
        "evaluate, generate, serve and lm-eval."
    )
    reading.add_argument("source", type=Path, metavar="DIR", help="Hugging Face model folder")
    reading.add_argument(
        "-o", "--output", type=Path, required=True, metavar="RUN", help="new folder for the run"
    )
    about = f"number of stages (default: one for every {LAYERS_PER_STAGE} layers)"
    reading.add_argument("--num-stages", type=int, metavar="N", help=about)
    accept_old_names(reading, cut="--num-stages", stages="--num-stages")
    writing = commands.add_parser("to-hf", help="convert a run to a Hugging Face model")
    writing.description = (
        "Export a checkpoint of a run as a Hugging Face model folder: config.json, safetensors "
        "files and the tokenizer."
    )
    add_path(writing, "--run", "folder of the run")
    writing.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="new folder for the model"
    )
    add_step(writing, "checkpoint")
    about = "dtype of the weights (default: as the parameters of the run)"
    writing.add_argument("--dtype", choices=DTYPES, help=about)
    add_scale(writing)


def run(arguments: argparse.Namespace) -> int:
    """Convert in the given direction; return the exit code."""
    to_hf = arguments.direction == "to-hf"
    return _to_huggingface(arguments) if to_hf else _from_huggingface(arguments)


def _from_huggingface(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.interop.conversion import from_huggingface
        from skippipe_jax.models.footprint import stage_parameters

    _compute_on_cpu()
    model = from_huggingface(arguments.source, arguments.output, arguments.num_stages).model
    count = stage_parameters(model, model.layers, is_data_stage=True)
    print(
        f"converted {model.layers} layers, {count:,} parameters, to {arguments.output}. Evaluate: "
        f"skippipe evaluate --run {arguments.output}"
    )
    return 0


def _to_huggingface(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.inference.model_source import open_source
        from skippipe_jax.inference.scaling import create_scaling
        from skippipe_jax.interop.conversion import to_huggingface
        from skippipe_jax.storage.run_dir import RunDir

    _compute_on_cpu()
    run = required_path("--run", arguments.run, arguments.former)
    step, scales = RunDir(run).step_named(arguments.step), None
    if arguments.scale is not None:
        source = open_source(run, step=step)
        scales, step = create_scaling(arguments.scale, source).scales(), source.step
        print(f"scales {scales.scales_text(source.cut)}")
    output = arguments.output
    export = to_huggingface(run, output, step, arguments.dtype, scales)
    print(f"exported step {export.step} of {run} to {output} in {export.dtype} (--dtype)")
    options = "--prompt TEXT"
    if export.end_of_turn is not None:
        text, token = export.end_of_turn
        print(f"an answer ends with {text}; eos_token_id includes its token {token}")
        options = "--chat"
    print(
        f'load it with AutoModelForCausalLM.from_pretrained("{output}"), or try it: skippipe '
        f"generate --hf {output} {options}"
    )
    return 0


def _compute_on_cpu() -> None:
    """Select the CPU: little is computed, and accelerators may be too small or busy."""
    import jax

    jax.config.update("jax_platforms", "cpu")
