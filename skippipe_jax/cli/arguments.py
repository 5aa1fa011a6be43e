"""Arguments that several commands share, and the models and hosts that they name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import InputError, loading

from skippipe_jax import log

if TYPE_CHECKING:
    from skippipe_jax.cluster.membership import Membership
    from skippipe_jax.config import Config, DataConfig
    from skippipe_jax.inference.ensemble import Ensemble
    from skippipe_jax.inference.model_source import ModelSource
    from skippipe_jax.inference.scaling import Scaling
    from skippipe_jax.inference.staged_model import StagedModel

SINGLE_MODEL_ARGUMENTS = (
    *("step", "stage_order", "keep_fraction", "paths", "swaps", "importance"),
    *("scale", "plot", "part", "url"),
)
MIXTURE_ARGUMENTS = ("mix", "prior")
"""Arguments that apply to a single model (`SINGLE_MODEL_ARGUMENTS`), and to a mixture of models."""
DEFAULT_CONFIG = Path("train.yaml")
"""Configuration file if none is named."""


def add_config_arguments(parser: argparse.ArgumentParser, *, resumes: bool = True) -> None:
    """Add the arguments for a configuration, and --resume if the command `resumes`."""
    about = "configuration file, YAML; skippipe config keys lists its keys"
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help=about)
    add_overrides(parser, "override a configuration key; repeatable")
    if resumes:
        about = (
            "continue from the last checkpoint in run_dir or, if it does not exist, "
            "checkpoint.copy_to"
        )
        parser.add_argument("--resume", action="store_true", help=about)


def config_of(arguments: argparse.Namespace, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration that the arguments of a command name.

    `overrides` are applied before those of `--set`; with `overrides`, the file is optional.

    Raises:
        InputError: if the file is missing or not valid.
    """
    from skippipe_jax.config import Config, load_config

    overrides = [*overrides, *arguments.set]
    # Identity, not equality: a path that the user wrote must exist, even if it is the default.
    if arguments.config is not DEFAULT_CONFIG or DEFAULT_CONFIG.exists():
        return load_config(arguments.config, overrides)
    if len(overrides) == len(arguments.set):
        raise InputError(
            "--config",
            str(DEFAULT_CONFIG),
            "does not exist",
            "Write it with skippipe init, give another file with --config, or train on your text "
            "with skippipe train --data PATH",
        )
    return Config.from_dict({}, overrides)


def add_overrides(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the argument that overrides keys of a configuration; `help_text` is its help."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.SUB=VALUE", help=help_text
    )


def add_addresses(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the addresses of hosts of a run."""
    about = "HOST:PORT of a host of the run; the first that answers is used"
    parser.add_argument("address", metavar="ADDRESS", nargs="+", help=about)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the level of printed lines, which `main` reads."""
    about = "minimum severity of messages on stderr"
    parser.add_argument("--log-level", choices=log.LEVELS, default=log.LEVELS[0], help=about)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments from which `connect_from_args` finds the other hosts."""
    cluster = parser.add_argument_group("several hosts")
    cluster.add_argument("--coordinator", metavar="HOST:PORT", help="address of host 0")
    cluster.add_argument("--hosts", type=int, metavar="N", help="number of hosts")
    accept_old_names(parser, **{"num-hosts": "--hosts"})
    cluster.add_argument("--host-id", type=int, metavar="I", help="index of this host, from 0")
    about = "let JAX detect the hosts of TPU pods whose environment does not list them"
    cluster.add_argument("--distributed", action="store_true", help=about)


def connect_from_args(
    arguments: argparse.Namespace, config: Config
) -> AbstractContextManager[Membership]:
    """Enable the compilation cache of `config`, and connect to the hosts in `arguments`."""
    with loading():
        from skippipe_jax.cluster.joining import connect
        from skippipe_jax.runtime.compilation import enable_compilation_cache
        from skippipe_jax.storage.run_dir import RunDir

    enable_compilation_cache(config.compilation_cache)
    host = arguments.coordinator, arguments.hosts, arguments.host_id
    from_environment = _host_from_environment()
    if host == (None, None, None) and not arguments.distributed:
        host = from_environment
    is_resumed = getattr(arguments, "resume", False)
    last_addresses = RunDir(config.run_dir).last_addresses() if is_resumed else ()
    return connect(config, *host, detect=arguments.distributed, last_addresses=last_addresses)


def _host_from_environment() -> tuple[str | None, int | None, int | None]:
    """Remove SKIPPIPE_COORDINATOR, _HOSTS and _HOST_ID from the environment and return them.

    Child processes are not hosts, so they must not inherit the variables.

    Raises:
        InputError: for a value that is not a number.
    """
    coordinator = os.environ.pop("SKIPPIPE_COORDINATOR", None)
    numbers: list[int | None] = []
    for name in ("SKIPPIPE_HOSTS", "SKIPPIPE_HOST_ID"):
        text = os.environ.pop(name, None)
        if text is not None and not text.isdecimal():
            raise InputError(name, text, "must be a whole number", "Write a number")
        numbers.append(None if text is None else int(text))
    return coordinator, numbers[0], numbers[1]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model, for `open_sources`."""
    from skippipe_jax.config.model import MOST_STAGES

    source = parser.add_mutually_exclusive_group(required=True)
    for option, folder in (("--run", "folder of a run"), ("--hf", "Hugging Face model folder")):
        about = f"{folder}; repeat to mix several models"
        source.add_argument(
            option, type=Path, action="append", default=[], metavar="DIR", help=about
        )
    add_step(parser, "checkpoint of --run")
    default = f"{MOST_STAGES}, or fewer, to divide its layers evenly"
    about = f"number of stages of an --hf model (default: {default})"
    parser.add_argument("--num-stages", type=int, metavar="N", help=about)
    accept_old_names(parser, cut="--num-stages")
    add_overrides(parser, "override a key of the model's configuration; repeatable")
    several = parser.add_argument_group("several models")
    several.add_argument(
        "--mix",
        metavar="{posterior,prior,top-1}",
        help="weights: posterior, updated after each token; prior, constant; top-1, only the "
        "model with the highest posterior (default: posterior)",
    )
    several.add_argument(
        "--prior",
        metavar="PRIOR",
        help="prior: uniform, FILE.json from evaluate --json or, in evaluate, decay (updated along "
        "the text) or cached (default, estimated on other held-out text)",
    )


def add_scale(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, scaled: str = "scale"
) -> None:
    """Add the argument that scales residual branches, for `create_scaling`."""
    about = f"{scaled} the residual branches of inner stages by a NUMBER, or by `share`, the "
    about += "fraction of the run's microbatches that visited each"
    parser.add_argument("--scale", metavar="SCALE", help=about)


def accept_old_names(parser: argparse.ArgumentParser, **former: str) -> None:
    """Accept former names of options, which the help does not list."""
    for name, option in former.items():
        parser._option_string_actions[f"--{name}"] = parser._option_string_actions[option]


def add_path(parser: argparse.ArgumentParser, option: str, help_text: str) -> None:
    """Add a required path for `required_path`; formerly it was a positional argument."""
    metavar = option[2:].upper()
    parser.add_argument(option, type=Path, metavar=metavar, help=f"{help_text} (required)")
    parser.add_argument("former", nargs="*", type=Path, help=argparse.SUPPRESS)


def required_path(option: str, value: Path | None, former: Sequence[Path]) -> Path:
    """Return the path of an option, or of the one positional argument.

    Raises:
        InputError: if there is no path, or more than one.
    """
    named = [*([] if value is None else [value]), *former]
    if len(named) != 1:
        shown = " ".join(map(str, named)) or None
        raise InputError(option, shown, "one path is required", f"Write {option} PATH")
    return named[0]


def add_step(parser: argparse._ActionsContainer, of: str) -> None:
    """Add `--step`, for `RunDir.step_named`."""

    def step(text: str) -> int | str:
        return int(text) if text.lstrip("-").isdecimal() else text

    help_text = f"{of}: its step, or best, by validation loss (default: latest)"
    parser.add_argument("--step", type=step, metavar="N", help=help_text)


def is_mixture(arguments: argparse.Namespace) -> bool:
    """Tell whether the arguments of `add_model_arguments` name several models.

    Raises:
        InputError: if an argument for several models is used with one, or the reverse.
    """
    if several := len(arguments.run or arguments.hf) > 1:
        rejected = SINGLE_MODEL_ARGUMENTS
        problem = "applies to one model, but several are given"
        remedy = "Give one model, or omit this option"
    else:
        rejected = MIXTURE_ARGUMENTS
        problem = "applies to several models, but one is given"
        remedy = "Give more models, or omit this option"
    for name in rejected:
        value = getattr(arguments, name, None)
        if value is not None and value is not False:
            shown = str(value) if isinstance(value, Path) else value
            raise InputError(f"--{name.replace('_', '-')}", shown, problem, remedy)
    return several


def open_sources(arguments: argparse.Namespace) -> list[ModelSource]:
    """Open the models that are named, and enable the compilation cache of the first.

    Raises:
        InputError: if one does not exist or is named twice, or its configuration cannot be read.
    """
    with loading():
        from skippipe_jax.inference.model_source import open_source
        from skippipe_jax.runtime.compilation import enable_compilation_cache

    named = arguments.run or arguments.hf
    for number, path in enumerate(named):
        if path in named[:number]:
            field = "--run" if arguments.run else "--hf"
            raise InputError(field, str(path), "is named twice", "Name each model once")
    options = arguments.step, arguments.num_stages, arguments.set
    sources = [open_source(run, None, *options) for run in arguments.run or ()]
    sources += [open_source(None, hf, *options) for hf in arguments.hf or ()]
    enable_compilation_cache(sources[0].config.compilation_cache)
    return sources


def scaling_of(arguments: argparse.Namespace, source: ModelSource) -> Scaling | None:
    """Return how `--scale` scales a model; None if it does not.

    Raises:
        InputError: if the model cannot be scaled in this way.
    """
    from skippipe_jax.inference.scaling import create_scaling

    return None if arguments.scale is None else create_scaling(arguments.scale, source)


def open_language_model(
    arguments: argparse.Namespace,
) -> tuple[StagedModel | Ensemble, DataConfig]:
    """Read several models as a mixture, or the chosen stages of one model, with the data.

    The stages and their scales are printed to standard error.

    Raises:
        InputError: if a model does not exist, cannot be read, or cannot be used in this way.
    """
    with loading():
        from skippipe_jax.inference.ensemble import read_ensemble
        from skippipe_jax.inference.partial import parse_stage_order

    several, sources = is_mixture(arguments), open_sources(arguments)
    data = sources[0].config.data
    if several:
        return read_ensemble(sources, arguments.mix, arguments.prior or "uniform")[0], data
    [source] = sources
    scaling = scaling_of(arguments, source)
    model, named = source.model(), (arguments.stage_order, arguments.keep_fraction)
    order = parse_stage_order(*named, model.stages, arguments.seed)
    if scaling is not None:
        scales = scaling.scales(len(order))
        log.info(f"scales {scales.scales_text(model.cut)}")
        model = model.scaled(scales)
    if len(order) < model.stages or arguments.stage_order is not None:
        log.info(f"stages {' '.join(map(str, order))} of {model.stages}")
    return replace(model, order=order), data


def add_language_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `open_language_model`: models, stages, scales."""
    add_model_arguments(parser)
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument(
        "--stage-order", metavar="0,2,1", help="run these stages, in this order (default: all)"
    )
    about = "run this fraction of the stages, drawn at random with --seed"
    stages.add_argument("--keep-fraction", type=float, metavar="FRACTION", help=about)
    accept_old_names(parser, stages="--stage-order", keep="--keep-fraction")
    add_scale(parser)
