"""The command that samples text from a model, from some of its stages, or from a mixture."""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import (
    accept_old_names,
    add_language_model_arguments,
    open_language_model,
)
from skippipe_jax.config.sampling import Sampling

if TYPE_CHECKING:
    from skippipe_jax.data.chat import Turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Sample a continuation of a prompt from a model or a mixture; with --chat, an answer."
    )
    add_language_model_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="prompt; - reads it from stdin")
    about = "print the answer by the chat template; without --prompt, start a conversation"
    parser.add_argument("--chat", action="store_true", help=about)
    about = "maximum sampled tokens"
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help=about)
    about = "divisor of the logits; 0: greedy decoding"
    parser.add_argument("--temperature", type=float, default=Sampling.temperature, help=about)
    about = "total probability of the likeliest tokens to sample from"
    parser.add_argument("--top-p", type=float, default=Sampling.top_p, help=about)
    about = "seed of sampling and of --keep-fraction"
    parser.add_argument("--seed", type=int, default=Sampling.seed, help=about)
    accept_old_names(parser, tokens="--max-new-tokens")
    parser.set_defaults(interrupted="\ninterrupted")


def run(arguments: argparse.Namespace) -> int:
    """Print the text while it is sampled; return the exit code."""
    with loading():
        from skippipe_jax.data.chat import encode_prompt, end_of_turn, trains_on_answers
        from skippipe_jax.inference.decoding import generate_tokens
        from skippipe_jax.inference.text_stream import TextStream

    count = fields.integer(arguments.max_new_tokens, "--max-new-tokens", 1)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    if arguments.prompt is None and not (arguments.chat and sys.stdin.isatty()):
        remedy = "Give a text, - for standard input, or --chat on a terminal"
        raise InputError("--prompt", None, "is missing", remedy)
    model, data = open_language_model(arguments)
    tokenizer, is_chat_model = model.tokenizer, trains_on_answers(data)
    if arguments.chat and not is_chat_model and tokenizer.chat_template is None:
        problem = "the model was not trained on conversations, and has no chat template"
        raise InputError("--chat", True, problem, "Omit this option")
    if is_chat_model and not arguments.chat:
        log.info("the model was trained on conversations: add --chat to get an answer")
    today = data.today or datetime.date.today().isoformat()
    turn_end = end_of_turn(tokenizer, today) if arguments.chat or is_chat_model else None
    ends = {tokenizer.end} | ({turn_end[1]} if turn_end else set())

    def print_continuation(prompt: list[int], shown: str) -> str:
        """Print the continuation of a prompt after `shown`, and return it."""
        sampled = generate_tokens(model, prompt, count, sampling)
        tokens = itertools.takewhile(lambda token: token not in ends, sampled)
        stream, pieces = TextStream(tokenizer.decode, prompt), []
        # `shown` is printed with the first piece, because sampling can still fail before it.
        for token in tokens:
            piece = stream.push(token)
            if piece:
                print(shown + piece, end="", flush=True)
                shown = ""
                pieces.append(piece)
        pieces.append(stream.rest())
        print(shown + pieces[-1])
        return "".join(pieces)

    def answer(messages: list[Turn]) -> str:
        return print_continuation([*map(int, encode_prompt(messages, tokenizer, today))], "")

    if arguments.prompt is None:
        _converse(answer)
        return 0
    text = _prompt(arguments.prompt)
    if arguments.chat:
        answer([_user_message(text.removesuffix("\n"))])
    else:
        print_continuation([tokenizer.begin, *map(int, tokenizer.encode(text))], text)
    return 0


def _user_message(text: str) -> Turn:
    return {"role": "user", "content": text}


def _converse(answer: Callable[[list[Turn]], str]) -> None:
    """Answer the lines typed on a terminal, each with the conversation so far, until EOF."""
    messages: list[Turn] = []
    while True:
        try:
            messages.append(_user_message(input("> ")))
        except EOFError:
            print()
            return
        messages.append({"role": "assistant", "content": answer(messages)})


def _prompt(argument: str) -> str:
    """Return the prompt, from standard input if the argument is -."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
        text.encode()  # Bytes that are not text appear as lone surrogates.
    except UnicodeError as error:
        raise InputError("--prompt", argument, "is not UTF-8 text", "Give UTF-8 text") from error
    return text
