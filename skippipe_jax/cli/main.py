"""The command line: the list of commands, and the parser that runs one of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from skippipe_sched import commands as planner
from skippipe_sched.errors import loading, run_command

from skippipe_jax import log

# Description of each command, in the order of --help.
COMMANDS = {
    "init": "write an initial configuration",
    "train": "train a model, on one host or as one of several hosts",
    "join": "join a running training job, given the address of one of its hosts",
    "status": "show the status of a run, given the address of one of its hosts",
    "launch": "start all hosts of a run on this machine",
    **planner.COMMANDS,
    "keygen": "generate the secret with which the hosts of a run authenticate each other",
    "measure": "measure a cluster and write a case for the planner",
    "estimate-memory": "estimate the memory of each node and the traffic on links",
    "evaluate": "compute the validation loss of a model, full and with skipped or swapped stages",
    "generate": "sample text from a model, or from some of its stages",
    "serve": "serve a model through an OpenAI-compatible API",
    "lm-eval": "run tasks of lm-evaluation-harness on a model, or on some of its stages",
    "experts": "train independent experts on domains, and compare ensembles of them",
    "report": "write an HTML page about a run",
    "tokenize": "tokenize text in advance, or train a tokenizer",
    "convert": "convert models from and to the Hugging Face format",
    "config": "show a configuration with defaults, all keys, or a JSON schema",
    "completion": "print a shell completion script",
}
FORMER_NAMES = {
    "keys": "keygen",
    "profile": "measure",
    "memory": "estimate-memory",
    "harness": "lm-eval",
    **planner.FORMER_NAMES,
}
EPILOG = """\
A host is one process of a run. A stage is a part of the model, of consecutive layers. A node serves
one stage on a device of a host; the nodes of a stage are its replicas. A case describes nodes and
links; a plan assigns nodes to stages and a path to each microbatch.

Details of a command: skippipe COMMAND --help. Exit codes: 0 done; 2 wrong input; 75 temporary
failure, retry; 130 and 143 stopped by SIGINT and SIGTERM; others: an unexpected error.
"""
COMPLETION = """\
Print a script by which the tab key completes commands, options and their choices. To install it:

  skippipe completion bash > ~/.local/share/bash-completion/completions/skippipe
  skippipe completion zsh > ~/.zfunc/_skippipe  # fpath+=~/.zfunc in ~/.zshrc, before compinit
  skippipe completion fish > ~/.config/fish/completions/skippipe.fish
"""
SHELLS = ("bash", "zsh", "fish")
INTERRUPTED = "interrupted; nothing was saved"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, or of the command line; return its exit code.

    Prints the command's line `interrupted` for a Ctrl-C that the command does not handle.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    words[:1] = [FORMER_NAMES.get(word, word) for word in words[:1]]
    arguments = parser(words[:1]).parse_args(words)
    log.set_level(getattr(arguments, "log_level", log.LEVELS[0]))
    interrupted = getattr(arguments, "interrupted", INTERRUPTED)
    return run_command(lambda: arguments.command(arguments), interrupted)


def parser(named: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Make the parser of all commands; commands that are not `named` are only listed."""
    root = argparse.ArgumentParser(
        prog="skippipe",
        description="Train LLaMA models with pipeline parallelism over slow and uneven links: each "
        "microbatch takes its own path, which may skip stages.",
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
    )
    root.add_argument(
        "--version", action=_Version, nargs=0, help="print versions and devices, and exit"
    )
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        inner = commands.add_parser(name, formatter_class=_HelpFormatter, help=about)
        if name not in named:
            continue
        if name == "completion":
            inner.description = COMPLETION
            inner.add_argument("shell", choices=SHELLS, help="shell")
            inner.set_defaults(command=_complete)
            continue
        package = "skippipe_sched.commands" if name in planner.COMMANDS else "skippipe_jax.cli"
        module = import_module(f"{package}.{name.replace('-', '_')}")
        module.add_arguments(inner)
        inner.set_defaults(command=module.run)
    return root


class _Version(argparse.Action):
    """Action that prints the versions and the devices, loading JAX, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # Else JAX would reserve a GPU's memory.
        with loading():
            from importlib import metadata

            import jax

        try:
            version = metadata.version("skippipe-jax")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        try:
            kinds = Counter(device.device_kind for device in jax.devices())
            devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        except RuntimeError as error:  # Only one process can use a TPU.
            devices = f"not available: {str(error).splitlines()[0]}"
        print(f"skippipe {version}\njax {jax.__version__}\ndevices: {devices}")
        parser.exit()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that adds defaults to help, fills paragraphs and keeps tables as written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Add the default of an option that has one, unless its help names it."""
        text, default = action.help, action.default
        has_none = default is None or default is False or default in ([], argparse.SUPPRESS)
        if not text or "(default: " in text or has_none:
            return text
        return f"{text} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = argparse.HelpFormatter._fill_text
        return "\n\n".join(
            part if "  " in part.strip() else fill(self, part, width, indent)
            for part in text.strip().split("\n\n")
        )


def _complete(arguments: argparse.Namespace) -> int:
    import shtab

    root = parser()
    for inner in parsers(root):
        for action in inner._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(root, arguments.shell))
    return 0


def parsers(outer: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands of a parser, or the parser itself if it has none."""
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
