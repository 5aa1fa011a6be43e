"""Text sampled from a model, of which any stages run, in any order, or from several together."""

from __future__ import annotations

import argparse
import sys

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax.cli.arguments import (
    ModelSpec,
    accept_former,
    add_language_model_arguments,
    open_language_model,
)
from skippipe_jax.config.sampling import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Sample the continuation of a prompt from a model, or a mixture of models, and print it."
    )
    add_language_model_arguments(parser)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue; - reads stdin"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=100,
        help="limit of tokens to sample (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        help="divides the logits; 0 is greedy decoding (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=Sampling.top_p,
        help="sample from the likeliest tokens of this total probability (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=Sampling.seed, help="seed of all draws (default: %(default)s)"
    )
    accept_former(parser, tokens="--max-new-tokens")
    parser.set_defaults(interrupted="\ninterrupted")


def run(arguments: argparse.Namespace) -> int:
    """Print the text as it is sampled; return the exit code."""
    with loading():
        from skippipe_jax.inference.decoding import text_pieces

    count = fields.integer(arguments.max_new_tokens, "--max-new-tokens", 1)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    model = open_language_model(ModelSpec.of(arguments))
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


def _prompt(argument: str) -> str:
    """Return the prompt, which is read from standard input where the argument is -."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
        text.encode()  # Bytes of an argument that are no text come as lone surrogates.
    except UnicodeError as error:
        raise InputError("--prompt", argument, "is not UTF-8 text", "Give text") from error
    return text
