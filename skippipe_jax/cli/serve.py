"""The command that serves a trained model through the API of OpenAI."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import add_log_level, add_overrides, add_scale
from skippipe_jax.config.extras import require_extra
from skippipe_jax.config.hardware import HOPS
from skippipe_jax.config.sampling import DEFAULT_SLOTS
from skippipe_jax.serving.routing import WHEN_LOST

if TYPE_CHECKING:
    from skippipe_jax.config import ClusterConfig
    from skippipe_jax.connections.keys import Keys
    from skippipe_jax.inference.decoding import Generator
    from skippipe_jax.inference.model_source import ModelSource
    from skippipe_jax.models.branch_scales import ScaleTable
    from skippipe_jax.serving.hosts import StageHosts
    from skippipe_jax.serving.service import Served

DTYPES = ("auto", "float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Serve a model through an OpenAI-compatible API: completions and chat, with streaming."
    )
    where = parser.add_mutually_exclusive_group()
    about = "folder of a run, and a step or best, by validation loss (default: latest)"
    where.add_argument("--run", metavar="DIR[@STEP]", help=about)
    where.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face model folder")
    about = "address to listen on; other than loopback requires --api-key-file"
    parser.add_argument("--host", default="127.0.0.1", help=about)
    parser.add_argument("--port", type=int, default=8000, help="port; 0: any free port")
    about = "file with accepted API keys, one per line"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=about)
    about = "model name in requests (default: name of the folder)"
    parser.add_argument("--served-model-name", metavar="NAME", help=about)
    _add_limits(parser)
    _add_hosts(parser)
    about = "dtype of activations, caches and --hf weights; auto: as configured for the model"
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=about)
    about = "number of stages of an --hf model (default: as in evaluate)"
    parser.add_argument("--num-stages", type=int, metavar="N", help=about)
    add_scale(parser)
    add_overrides(parser, "override a key of the model's configuration; repeatable")
    add_log_level(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    about = "maximum tokens per sequence, with the prompt (default: the model's context)"
    parser.add_argument("--max-model-len", type=int, metavar="N", help=about)
    about = "maximum sequences decoded at a time"
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULT_SLOTS, metavar="N", help=about)
    about = "maximum waiting sequences; more are rejected"
    parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help=about)
    about = "time limit to finish answers after SIGTERM"
    parser.add_argument("--drain-timeout", default="30s", metavar="TIME", help=about)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group("several hosts")
    several.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="number of hosts; the first receives requests. Without --coordinator, all start on "
        "this machine",
    )
    several.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of the first host; others may join and leave at any time and need no --run "
        "or --hf",
    )
    about = "0 for the first host; others need no id"
    several.add_argument("--host-id", type=int, metavar="I", help=about)
    about = "maximum stages per host, counting the data stage (default: as many as fit into memory)"
    several.add_argument("--max-stages", type=int, metavar="N", help=about)
    about = "time until hosts load a lost stage if memory allows, such as 30s (default: never)"
    several.add_argument("--take-over-after", metavar="TIME", help=about)
    several.add_argument(
        "--activation-dtype",
        choices=HOPS,
        help="dtype of activations between hosts; int8 has one scale per group of channels "
        "(default: as computed)",
    )
    several.add_argument(
        "--when-stage-lost",
        choices=WHEN_LOST,
        default=WHEN_LOST[0],
        help="what sequences do while no host holds a stage: skip it, wait, or fail",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    if arguments.coordinator is not None and arguments.host_id != 0:
        return _hold_stages(arguments)
    slots = fields.integer(arguments.max_num_seqs, "--max-num-seqs", 1)
    waiting = fields.integer(arguments.max_waiting, "--max-waiting", 0)
    drain_s = fields.duration(arguments.drain_timeout, "--drain-timeout")
    hosts = fields.integer(arguments.hosts, "--hosts", 1)
    if hosts == 1 and arguments.coordinator is not None:
        problem, remedy = "no other host would join the first", "Write the number of all hosts"
        raise InputError("--hosts", hosts, problem, remedy)
    with loading():
        for module in ("starlette", "uvicorn", "prometheus_client"):
            require_extra(module, "serve", "command", "serve")
        from skippipe_jax.config.api_keys import read_keys
        from skippipe_jax.inference.scaling import create_scaling
        from skippipe_jax.serving.model import open_engine
        from skippipe_jax.serving.server import Server, listen

    keys = read_keys(arguments.api_key_file)
    listening = listen(arguments.host, arguments.port, keys)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening)
        source = _source(arguments)
        name = arguments.served_model_name or _name(arguments)
        scales = None
        if arguments.scale is not None:
            scales = create_scaling(arguments.scale, source).table()
        if hosts == 1:
            given = source.config.data, slots, arguments.max_model_len, scales
            served, engine = open_engine(name, source.model(), *given)
            alone = {"host": 0, "name": socket.gethostname(), "stages": [*range(source.stages)]}
            engines, status = [engine], lambda: [alone]
        else:
            opened = stack.enter_context(_open_hosts(arguments, name, source, slots, scales))
            served, engines, status = opened
        limits: dict[str, Any] = {"most_waiting": waiting, "drain_s": drain_s, "keys": keys}
        server = Server(served, engines, **limits, hosts=status)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info(f"serving {name} at http://{shown}/v1")
        server.answer(listening)
    log.info("service stopped")
    return 0


@contextlib.contextmanager
def _open_hosts(
    arguments: argparse.Namespace,
    name: str,
    source: ModelSource,
    sequences: int,
    scales: ScaleTable | None,
) -> Iterator[tuple[Served, list[Generator], Callable[[], list[dict[str, Any]]]]]:
    """Gather the hosts, starting them locally without a coordinator; end them on exit."""
    with loading():
        from skippipe_jax.connections.addresses import chosen_address, parse_address
        from skippipe_jax.serving.hosts import LossRules, StageHosts
        from skippipe_jax.serving.local_stages import Slots
        from skippipe_jax.serving.model import length_of, open_groups

    count, cluster = arguments.hosts, source.config.cluster
    if source.stages == 1:
        problem = "the model has a single stage, which the first host runs"
        raise InputError("--hosts", count, problem, "Write 1, or set --num-stages to 2 or more")
    groups = min(source.stages, count, sequences)
    length = length_of(source.config.model.context, arguments.max_model_len)
    each = -(-sequences // groups)
    slots = Slots(groups, each, length, arguments.activation_dtype)
    take_over_s = arguments.take_over_after
    if take_over_s is not None:
        take_over_s = fields.duration(take_over_s, "--take-over-after")
    rules = LossRules(arguments.when_stage_lost, take_over_s, _max_stages(arguments))
    hosts = StageHosts(source, slots, rules, _keys(cluster), cluster.heartbeat_timeout_s, scales)
    given = arguments.coordinator or f"{chosen_address(cluster.bind_address) or '127.0.0.1'}:0"
    host, _, port = given.rpartition(":")
    if arguments.coordinator is not None:
        host, port = parse_address("--coordinator", given)
    address = hosts.listen(host, int(port))
    with contextlib.ExitStack() as stack:
        if arguments.coordinator is None:
            stack.enter_context(_local_hosts(arguments, address, hosts))
        stack.callback(hosts.close)  # Before the local hosts are stopped.
        hosts.gather(count - 1, cluster.connect_timeout_s)
        yield *open_groups(name, source, hosts), hosts.status


@contextlib.contextmanager
def _local_hosts(
    arguments: argparse.Namespace, coordinator: str, hosts: StageHosts
) -> Iterator[None]:
    """Start all hosts but the first as local processes, and restart failed ones."""
    from skippipe_jax.campaign.restart_policy import MOST_FAULTS
    from skippipe_jax.local.hosts import LocalHosts

    shared = [*_model_arguments(arguments), "--log-level", arguments.log_level]
    command = [sys.executable, "-m", "skippipe_jax", "serve", *shared]

    def command_of(host: int) -> list[str]:
        return [*command, "--coordinator", coordinator, "--host-id", str(host)]

    started = LocalHosts(range(1, arguments.hosts), command_of, 5.0, lambda: True, MOST_FAULTS)

    def supervise() -> None:
        started.run()
        hosts.give_up()  # No further host will connect.

    thread = threading.Thread(target=supervise, name="skippipe-local-hosts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        started.told(signal.SIGTERM)
        thread.join()


def _hold_stages(arguments: argparse.Namespace) -> int:
    has_weights = arguments.run is not None or arguments.hf is not None
    source = _source(arguments) if has_weights else None
    name = None if arguments.host_id is None else f"--host-id {arguments.host_id}"
    options = arguments.set, source, name, _max_stages(arguments)
    return hold_stages(arguments.coordinator, *options)


def hold_stages(
    coordinator: str,
    overrides: Sequence[str],
    source: ModelSource | None = None,
    name: str | None = None,
    most_stages: int | None = None,
) -> int:
    """Hold stages for the service at an address until it ends; return the exit code.

    The other arguments are as for `StageHost`.
    """
    with loading():
        from skippipe_jax.config import Config
        from skippipe_jax.runtime.compilation import enable_compilation_cache
        from skippipe_jax.serving.stage_host import StageHost

    config = Config.from_dict({}, overrides) if source is None else source.config
    enable_compilation_cache(config.compilation_cache)
    cluster = config.cluster
    options = source, cluster.bind_address, name, most_stages
    asyncio.run(StageHost(coordinator, _keys(cluster), *options).serve())
    log.info("the service has stopped")
    return 0


def _keys(cluster: ClusterConfig) -> Keys:
    """Return the keys of a service, whose hosts send activations over TLS too."""
    from skippipe_jax.connections.keys import Keys

    return Keys.of(replace(cluster, insecure_transfers=True))


def _max_stages(arguments: argparse.Namespace) -> int | None:
    most = arguments.max_stages
    return None if most is None else fields.integer(most, "--max-stages", 1)


def _source(arguments: argparse.Namespace) -> ModelSource:
    """Open the model that the arguments name.

    Raises:
        InputError: if it does not exist.
    """
    with loading():
        from skippipe_jax.inference.model_source import open_source
        from skippipe_jax.runtime.compilation import enable_compilation_cache

    overrides = list(arguments.set)
    if arguments.dtype != DTYPES[0]:
        # Weights of a run keep the type in which they were saved.
        parts = ("compute",) if arguments.hf is None else ("compute", "parameter")
        overrides += [f"model.{part}_dtype={arguments.dtype}" for part in parts]
    run, step = (None, None) if arguments.run is None else _run_and_step(arguments.run)
    source = open_source(run, arguments.hf, step, arguments.num_stages, overrides)
    enable_compilation_cache(source.config.compilation_cache)
    return source


def _model_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that name the model, to start another host with."""
    words = [word for one in arguments.set for word in ("--set", one)]
    for option in ("run", "hf", "dtype", "num_stages", "max_stages"):
        if (value := getattr(arguments, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


def _run_and_step(text: str) -> tuple[Path, int | str | None]:
    """Parse ``DIR[@STEP]``; the name of an existing folder may contain an @."""
    folder, at, step = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not (step.isdecimal() or step == "best"):
        raise InputError("--run", text, f"{step!r} is not a step", "Write DIR@STEP or DIR@best")
    return Path(folder), int(step) if step.isdecimal() else step


def _name(arguments: argparse.Namespace) -> str:
    path = arguments.hf if arguments.hf is not None else _run_and_step(arguments.run)[0]
    return path.absolute().name or "model"
