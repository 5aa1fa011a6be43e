"""The command that shows the status of a run, from any of its hosts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import TemporaryError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import add_addresses, add_log_level, add_overrides

EPILOG = """\
This machine needs the secret of the run: --set cluster.secret=FILE, SKIPPIPE_SECRET_FILE or
SKIPPIPE_SECRET. A run on a single host has no status.

With http://HOST:PORT of skippipe serve as ADDRESS, show the status of the service.
"""

WATCH_S = "2s"
CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Show the status of a run: hosts, stages, links, progress, failures and waits."
    )
    parser.epilog = EPILOG
    add_addresses(parser)
    about = "print one JSON object per line; docs/watch.md lists its keys"
    parser.add_argument("--json", action="store_true", help=about)
    parser.add_argument(
        "--watch",
        nargs="?",
        const=WATCH_S,
        metavar="TIME",
        help=f"repeat at this interval (without a value: {WATCH_S}); place it after ADDRESS",
    )
    about = "file with an API key in the first line, if ADDRESS is a URL"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=about)
    add_overrides(parser, "set a key of section cluster, such as cluster.secret; repeatable")
    add_log_level(parser)
    parser.set_defaults(interrupted="interrupted; the run continues")


def run(arguments: argparse.Namespace) -> int:
    """Request the status and print it; return the exit code."""
    with loading():
        import msgspec

        from skippipe_jax.config import parse_config
        from skippipe_jax.connections.addresses import parse_address
        from skippipe_jax.connections.asking import NoListener, observe
        from skippipe_jax.connections.keys import Keys
        from skippipe_jax.reporting.status import status_text

    watch_s = arguments.watch and fields.duration(arguments.watch, "--watch", above=True)
    if arguments.address[0].startswith(("http://", "https://")):
        return _show_service(arguments, watch_s)
    for address in arguments.address:
        parse_address("ADDRESS", address)
    keys = Keys.of(parse_config({}, arguments.set).cluster)
    known_addresses: list[str] = []
    while True:
        try:
            answering, status = asyncio.run(observe([*known_addresses, *arguments.address], keys))
        except TemporaryError as error:
            if not known_addresses or isinstance(error, NoListener):
                raise
            log.warning(str(error))
        else:
            known_addresses = [answering, *(host.address for host in status.hosts if host.address)]
            shown = (
                json.dumps(msgspec.to_builtins(status)) if arguments.json else status_text(status)
            )
            _show(shown, arguments, watch_s)
        if not watch_s:
            return 0
        time.sleep(watch_s)


def _show(shown: str, arguments: argparse.Namespace, watch_s: float | None) -> None:
    if watch_s and not arguments.json:
        shown = f"{CLEAR if sys.stdout.isatty() else ''}{shown}\n"
    print(shown, flush=True)


def _show_service(arguments: argparse.Namespace, watch_s: float | None) -> int:
    """Show the status of the `skippipe serve` at a URL."""
    from skippipe_jax.serving.status import ask, service_status_text

    while True:
        status = ask(arguments.address[0], arguments.api_key_file)
        _show(
            json.dumps(status) if arguments.json else service_status_text(status),
            arguments,
            watch_s,
        )
        if not watch_s:
            return 0
        time.sleep(watch_s)
