"""Text sampled from a model, of which any stages run, in any order, or from several together.

python -m skippipe_jax.generate --run DIR --prompt "def " --keep 0.75
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax.arguments import (
    add_model_arguments,
    add_scale,
    add_stages_arguments,
    named_ensemble,
    named_model,
    names_several,
    run_module,
)
from skippipe_jax.config.sampling import Sampling

if TYPE_CHECKING:
    from skippipe_jax.inference.language_model import LanguageModel


def main() -> int:
    """Parse the command line and generate; returns the exit code."""
    return run_module("skippipe_jax.generate", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Print a prompt and text that a model goes on with, or several do, as it comes."
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="- reads standard input")
    parser.add_argument(
        "--tokens", type=int, default=100, help="at most so many (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        help="divides the logits; 0 takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=Sampling.top_p,
        help="draw from the likeliest tokens of this share (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=Sampling.seed, help="of all draws (default: %(default)s)"
    )
    add_stages_arguments(parser)
    add_scale(parser)
    parser.set_defaults(command=_generate, interrupted="\ninterrupted")


def _generate(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.inference.decoding import text_pieces

    count = fields.integer(arguments.tokens, "--tokens", 1)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    model = _several(arguments) if names_several(arguments) else _one(arguments)
    tokenizer = model.tokenizer
    text = _prompt(arguments.prompt)
    prompt = [tokenizer.begin, *map(int, tokenizer.encode(text))]
    tokens = model.tokens_after(prompt, count, sampling, tokenizer.end)
    # With the first piece: until there is one, an error can still come instead.
    shown = text
    for piece in text_pieces(tokenizer.decode, prompt, tokens):
        print(shown + piece, end="", flush=True)
        shown = ""
    print(shown)
    return 0


def _several(arguments: argparse.Namespace) -> LanguageModel:
    """The models that are named, together."""
    return named_ensemble(arguments, "uniform", ("uniform",))[0]


def _one(arguments: argparse.Namespace) -> LanguageModel:
    """The model that is named, with the stages that are; what it is, is told."""
    with loading():
        from skippipe_jax.inference.partial import chosen_order

    model, _, _, scaling = named_model(arguments)
    order = chosen_order(arguments.stages, arguments.keep, model.stages, arguments.seed)
    if scaling is not None:
        scales = scaling.scales(len(order))
        print(f"scales {scales.told(model.cut)}", file=sys.stderr)
        model = model.scaled(scales)
    if len(order) < model.stages or arguments.stages is not None:
        names = " ".join(map(str, order))
        print(f"stages {names} of {model.stages}", file=sys.stderr)
    return replace(model, order=order)


def _prompt(argument: str) -> str:
    """The prompt that is given, or standard input."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
        text.encode()  # Bytes of an argument that are no text come as lone surrogates.
    except UnicodeError as error:
        raise InputError("--prompt", argument, "is not UTF-8 text", "Give text") from error
    return text


if __name__ == "__main__":
    sys.exit(main())
