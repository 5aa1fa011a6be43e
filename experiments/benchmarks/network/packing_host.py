"""One host of a run whose sockets are looked at: the real command, which notes what it has sent.

Its arguments are a folder for what is noted, and those of `skippipe_jax.train`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import struct
import sys
from pathlib import Path

from skippipe_sched.errors import run_command

from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    connect_from_args,
)
from skippipe_jax.config import load_config
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.trainer import Trainer

# Where `bytes_acked` is in Linux's struct tcp_info: behind 8 bytes, 24 numbers of 4, and 2 of 8.
BYTES_ACKED, TCP_INFO_BYTES = 8 + 24 * 4 + 2 * 8, 256


class Sent(Callback):
    """Writes how many bytes this host has sent, from the first step to the end of the last."""

    def __init__(self, folder: Path):
        """Into a file of `folder`, named after the host."""
        self.folder = folder
        self.before = 0

    def on_train_begin(self, run: RunView) -> None:
        """Leave out what was sent until now."""
        self.before = bytes_acked()

    def on_train_end(self, run: RunView) -> None:
        """Count while connections are still open."""
        count = bytes_acked() - self.before
        _count_of(self.folder, run.group.index).write_text(f"{count}\n")


def bytes_acked() -> int:
    """What the other ends of all TCP connections of this process have confirmed."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # Most are no sockets, and some are closed by now.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                [acked] = struct.unpack_from("=Q", info, BYTES_ACKED)
                total += acked
    return total


def read_counts(folder: Path, hosts: int) -> int:
    """What all hosts together have sent."""
    return sum(int(_count_of(folder, host).read_text()) for host in range(hosts))


def _count_of(folder: Path, host: int) -> Path:
    return folder / f"sent{host}.txt"


def main() -> int:
    """Train as `skippipe_jax.train` does; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    return run_command(lambda: train(arguments))


def train(arguments: argparse.Namespace) -> int:
    """One host of the run; returns the exit code."""
    config, folder = load_config(arguments.config, arguments.set), arguments.config.parent
    with connect_from_args(arguments, config) as host:
        Trainer(config, [Sent(arguments.folder)], host=host, config_folder=folder).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
