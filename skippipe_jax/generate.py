"""Text sampled from a model, of which any stages run, in any order.

python -m skippipe_jax.generate --run DIR --prompt "def " --keep 0.75
"""

from __future__ import annotations

import argparse
import sys

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax.arguments import (
    add_model_arguments,
    add_scale,
    add_stages_arguments,
    named_model,
    run_module,
)
from skippipe_jax.config.sampling import Sampling


def main() -> int:
    """Parse the command line and generate; returns the exit code."""
    return run_module("skippipe_jax.generate", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = "Print a prompt and text that a model goes on with, as it comes."
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
        from skippipe_jax.inference.decoding import generate_tokens, text_pieces
        from skippipe_jax.inference.partial import chosen_order

    count = fields.integer(arguments.tokens, "--tokens", 1)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    model, _, _, scaling = named_model(arguments)
    order = chosen_order(arguments.stages, arguments.keep, model.stages, arguments.seed)
    if scaling is not None:
        scales = scaling.scales(len(order))
        print(f"scales {scales.told(model.cut)}", file=sys.stderr)
        model = model.scaled(scales)
    tokenizer = model.tokenizer
    text = _prompt(arguments.prompt)
    prompt = [tokenizer.begin, *map(int, tokenizer.encode(text))]
    tokens = generate_tokens(model, order, prompt, count, sampling, tokenizer.end)
    if len(order) < model.stages or arguments.stages is not None:
        names = " ".join(map(str, order))
        print(f"stages {names} of {model.stages}", file=sys.stderr)
    # With the first piece: until there is one, an error can still come instead.
    shown = text
    for piece in text_pieces(tokenizer.decode, prompt, tokens):
        print(shown + piece, end="", flush=True)
        shown = ""
    print(shown)
    return 0


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
