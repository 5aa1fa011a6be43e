"""All commands under one name: ``skippipe train``, or ``python -m skippipe_jax train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path

from skippipe_sched.commands import COMMANDS as PLANNING

from skippipe_jax.arguments import run_parsed

# What each command does, in the order of the list that --help prints.
ABOUT = {
    "train": "train along the paths of a plan, as one host or as one of many",
    "join": "join a run in the place of a host that it has lost, with nothing but an address",
    "launch": "start all hosts of a run on this machine",
    **{command.name: command.about for command in PLANNING},
    "keys": "make the secret by which the hosts of a run know each other",
    "profile": "measure a cluster, and write the case to plan for",
    "memory": "say what a run would need: memory of each node, bytes over links",
    "evaluate": "held-out loss of a model, in full and with stages left out or swapped",
    "generate": "text sampled from a model, of which any stages run",
    "harness": "tasks of lm-evaluation-harness on a model, or on some of its stages",
    "experts": "train experts on domains, apart from each other, and compare ensembles of them",
    "report": "one HTML page of a run",
    "tokenize": "tokenize text once, or train a tokenizer for it",
    "convert": "Hugging Face models become runs, and runs become Hugging Face models",
    "config": "show a configuration in full, every key that there is, or a JSON schema",
    "completion": "what lets a shell complete these commands by the tab key",
}
SHELLS = ("bash", "zsh", "fish")


def main() -> int:
    """Parse the command line and run the command that it names; returns the exit code."""
    return run_parsed(parser(sys.argv[1:]))


def parser(named: Collection[str] = tuple(ABOUT)) -> argparse.ArgumentParser:
    """The parser of all commands; those that are not `named` are listed, and no more."""
    made = argparse.ArgumentParser(
        prog="skippipe",
        description="Train LLaMA models over machines far apart: plan, train, look, use.",
        epilog="skippipe COMMAND --help tells of each.",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    planning = {command.name: command for command in PLANNING}
    for name, about in ABOUT.items():
        if name in planning:
            planning[name].add_to(commands)
            continue
        inner = commands.add_parser(name, help=about)
        if name in named:
            _adder(name)(inner)
    return made


def _adder(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """What tells a parser of a command."""
    if name == "completion":
        return _add_completion
    inside = ".__main__" if name in ("config", "experts") else ""
    return import_module(f"skippipe_jax.{name}{inside}").add_arguments


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print what lets a shell complete the commands of skippipe."
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(command=_complete)


def _complete(arguments: argparse.Namespace) -> int:
    import shtab

    made = parser()
    for inner in parsers(made):
        for action in inner._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(made, arguments.shell))
    return 0


def parsers(outer: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands that a parser has; itself, if it has none."""
    inner = [
        command
        for action in outer._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
    for command in inner:
        yield from parsers(command)
    if not inner:
        yield outer


if __name__ == "__main__":
    sys.exit(main())
