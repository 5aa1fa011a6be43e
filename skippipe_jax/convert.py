"""Hugging Face models become runs, and runs become Hugging Face models.

python -m skippipe_jax.convert from-hf DIR -o RUN
python -m skippipe_jax.convert to-hf RUN -o DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skippipe_sched.errors import loading

from skippipe_jax.arguments import add_old_cut, add_scale, run_module
from skippipe_jax.config.choices import DTYPES
from skippipe_jax.config.model import LAYERS_OF_STAGE

DESCRIPTION = """\
Convert models between the format of Hugging Face and a run's folder: those of the Llama 2 and 3
family, and Mistrals without a sliding window, which become Llamas.

from-hf reads config.json and safetensors files (one or many; float32, bfloat16 or float16) and
writes a run folder with its configuration, a checkpoint of step 0 and, in tokenizer/, the files of
the tokenizer. Pickled weights (.bin, .pt) are never loaded. To train from the weights no run is
needed: write init_from: hf:DIR in the configuration.

to-hf writes what transformers, vLLM and others load: config.json, safetensors and the tokenizer,
which for a run on bytes has a token for each.

Only one stage of the model is held in memory at a time, but for --scale fit, which learns from
all of them. The output is there whole or not at all.
"""


def main() -> int:
    """Parse the command line and convert; returns the exit code."""
    return run_module("skippipe_jax.convert", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    reading = commands.add_parser("from-hf", help="a Hugging Face model becomes a run")
    reading.add_argument("source", type=Path, metavar="DIR", help="the folder of the model")
    reading.add_argument(
        "-o", "--output", type=Path, required=True, metavar="RUN", help="a new folder for the run"
    )
    reading.add_argument(
        "--cut",
        type=int,
        metavar="N",
        help=f"into how many stages (default: one for every {LAYERS_OF_STAGE} layers)",
    )
    add_old_cut(reading)
    reading.set_defaults(command=_from_huggingface)
    writing = commands.add_parser("to-hf", help="a run becomes a Hugging Face model")
    writing.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    writing.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder for the model"
    )
    writing.add_argument("--step", type=int, help="which checkpoint (default: the latest)")
    writing.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: that of the run's parameters)"
    )
    add_scale(writing)
    writing.set_defaults(command=_to_huggingface)


def _from_huggingface(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.interop.conversion import from_huggingface, parameters_in_all

    _compute_on_cpu()
    config = from_huggingface(arguments.source, arguments.output, arguments.cut)
    print(
        f"{parameters_in_all(config.model):,} parameters of {config.model.layers} layers are in "
        f"{arguments.output}. Their held-out loss: "
        f"python -m skippipe_jax.evaluate --run {arguments.output}"
    )
    return 0


def _to_huggingface(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.inference.scaling import FIT, scales_of_run
        from skippipe_jax.interop.conversion import to_huggingface

    if arguments.scale != FIT:
        _compute_on_cpu()
    step, scales = arguments.step, None
    if arguments.scale is not None:
        scales, cut, step = scales_of_run(arguments.scale, arguments.run, step)
        print(f"scales {scales.told(cut)}")
    step = to_huggingface(arguments.run, arguments.output, step, arguments.dtype, scales)
    print(f"step {step} of {arguments.run} is in {arguments.output}")
    return 0


def _compute_on_cpu() -> None:
    """Next to nothing is computed, and accelerators may be too small or busy."""
    import jax

    jax.config.update("jax_platforms", "cpu")


if __name__ == "__main__":
    sys.exit(main())
