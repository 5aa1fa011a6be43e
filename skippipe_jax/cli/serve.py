"""A trained model behind the API of OpenAI."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import ModelSpec, add_log_level, add_overrides, open_model
from skippipe_jax.config.extras import require
from skippipe_jax.config.sampling import DEFAULT_SLOTS

DTYPES = ("auto", "float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Serve a model through the API of OpenAI: completions, conversations, and streams of both."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--run", metavar="DIR[@STEP]", help="the folder of a run, and which step of it: a number, "
        "or best for the lowest held-out loss (default: the latest)",
    )  # fmt: skip
    where.add_argument(
        "--hf", type=Path, metavar="DIR", help="a model folder in the format of Hugging Face"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but a loopback address needs --api-key-file (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port; 0 takes any (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with API keys, one in a line, of which clients send one",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name by which clients ask for the model (default: that of its folder)",
    )
    _add_limits(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="number format of activations and caches, and of the weights of --hf (default: "
        "%(default)s, as the model's configuration says)",
    )
    parser.add_argument(
        "--num-stages",
        type=int,
        metavar="N",
        help="number of stages of an --hf model (default: as for evaluate)",
    )
    add_overrides(parser, "override a key of the model's configuration; repeatable")
    add_log_level(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="limit of tokens of a sequence, its prompt included (default: the model's context)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=DEFAULT_SLOTS,
        metavar="N",
        help="sequences that get tokens at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="sequences that may wait for that; more are refused (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds in which answers are finished after SIGTERM (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    slots = fields.integer(arguments.max_num_seqs, "--max-num-seqs", 1)
    waiting = fields.integer(arguments.max_waiting, "--max-waiting", 0)
    drain_s = fields.number(arguments.drain_timeout, "--drain-timeout", 0.0)
    with loading():
        for module in ("starlette", "uvicorn", "prometheus_client"):
            require(module, "serve", "serve", arguments.port)
        from skippipe_jax.serving.model import open_engine
        from skippipe_jax.serving.server import Conduct, Server, listen, read_keys

    keys = read_keys(arguments.api_key_file)
    listening = listen(arguments.host, arguments.port, keys)
    with listening:
        model, data, *_ = open_model(_spec(arguments))
        name = arguments.served_model_name or _name(arguments)
        served, engine = open_engine(name, model, data, slots, arguments.max_model_len)
        server = Server(served, engine, Conduct(waiting, drain_s, keys))
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info(f"serving {name} at http://{shown}/v1")
        server.answer(listening)
    log.info("no answer is left; the service ends")
    return 0


def _spec(arguments: argparse.Namespace) -> ModelSpec:
    overrides = list(arguments.set)
    if arguments.dtype != DTYPES[0]:
        # The weights of a run are as they were saved.
        parts = ("compute",) if arguments.hf is None else ("compute", "parameter")
        overrides += [f"model.{part}_dtype={arguments.dtype}" for part in parts]
    given = arguments.num_stages, tuple(overrides)
    if arguments.hf is not None:
        return ModelSpec(hf=(arguments.hf,), num_stages=given[0], overrides=given[1])
    folder, step = _run_and_step(arguments.run)
    return ModelSpec(runs=(folder,), step=step, num_stages=given[0], overrides=given[1])


def _run_and_step(text: str) -> tuple[Path, int | str | None]:
    """Read ``DIR[@STEP]``; a folder that is there may have an @ in its name."""
    folder, at, step = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not (step.isdecimal() or step == "best"):
        raise InputError("--run", text, f"{step!r} is no step", "Write DIR@STEP, or DIR@best")
    return Path(folder), int(step) if step.isdecimal() else step


def _name(arguments: argparse.Namespace) -> str:
    path = arguments.hf if arguments.hf is not None else _run_and_step(arguments.run)[0]
    return path.absolute().name or "model"
