"""How commands begin, and the arguments that several of them share. Nothing here computes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import InputError, loading, run_command

if TYPE_CHECKING:
    from skippipe_jax.cluster.membership import Membership
    from skippipe_jax.config import Config, DataConfig
    from skippipe_jax.inference.ensemble import Ensemble
    from skippipe_jax.inference.scaling import Scaling
    from skippipe_jax.inference.staged_model import StagedModel

INTERRUPTED = "interrupted; nothing is kept"
OF_ONE = ("step", "stages", "keep", "paths", "swaps", "importance", "scale", "plot", "part")
OF_SEVERAL = ("mix", "average", "prior")
"""Arguments that tell something of a single model, and of models that are mixed."""


def run_module(module: str, add_arguments: Callable[[argparse.ArgumentParser], None]) -> int:
    """Parse the command line of `python -m MODULE` and run it; returns the exit code.

    `add_arguments` tells a parser of the command's arguments, and what calls the command.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    add_arguments(parser)
    return run_parsed(parser)


def run_parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> int:
    """Call the `command` that the parsed words name; returns the exit code.

    A Ctrl-C that the command does not take itself becomes the line `interrupted`, if it has one.
    """
    arguments = parser.parse_args(words)
    interrupted = getattr(arguments, "interrupted", INTERRUPTED)
    return run_command(lambda: arguments.command(arguments), interrupted)


def add_config_arguments(parser: argparse.ArgumentParser, *, resumes: bool = True) -> None:
    """The arguments that give the configuration, and that a run `resumes` if a command does so."""
    parser.add_argument("--config", type=Path, required=True, help="the configuration, YAML")
    add_overrides(parser, "override one key of the configuration; may be given often")
    if resumes:
        parser.add_argument(
            "--resume",
            action="store_true",
            help="go on from the last checkpoint in run_dir, or in checkpoint.copy_to where there "
            "is no run_dir any more",
        )


def add_overrides(parser: argparse.ArgumentParser, told: str) -> None:
    """The argument that overrides keys of a configuration, with what is told of it."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY.SUB=VALUE", help=told)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments by which a process finds the other hosts, as `joined_by` reads them."""
    cluster = parser.add_argument_group("many hosts")
    cluster.add_argument("--coordinator", metavar="HOST:PORT", help="where host 0 listens")
    cluster.add_argument("--hosts", type=int, metavar="N", help="how many hosts there are")
    cluster.add_argument("--host-id", type=int, metavar="I", help="which of them this is, from 0")
    cluster.add_argument(
        "--distributed",
        action="store_true",
        help="let JAX find the cluster (for TPU pods whose environment does not name the others)",
    )


def joined_by(arguments: argparse.Namespace, config: Config) -> AbstractContextManager[Membership]:
    """Keep compiled programs as `config` says, and be one of the hosts that `arguments` name."""
    with loading():
        from skippipe_jax.cluster.joining import joined
        from skippipe_jax.config.resume import identity, settings
        from skippipe_jax.connections.hello import Run
        from skippipe_jax.runtime.compilation import keep_programs
        from skippipe_jax.storage.run_folder import last_addresses

    keep_programs(config.compilation_cache)
    return joined(
        config.cluster,
        arguments.coordinator,
        arguments.hosts,
        arguments.host_id,
        arguments.distributed,
        last_addresses(Path(config.run_dir)) if getattr(arguments, "resume", False) else (),
        Run(identity(config), settings(config)),
        spare=config.join.places,
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a model, as `named_model` reads them."""
    from skippipe_jax.config.model import MOST_STAGES

    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--run",
        type=Path,
        action="append",
        metavar="DIR",
        help="the folder of a run; several are mixed",
    )
    where.add_argument(
        "--hf",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder from Hugging Face; several are mixed",
    )
    parser.add_argument("--step", type=int, help="which checkpoint of --run (default: the latest)")
    parser.add_argument(
        "--cut",
        type=int,
        metavar="N",
        help=f"into how many stages an --hf model is cut (default: {MOST_STAGES}, or as many fewer "
        "as its layers spread over evenly)",
    )
    add_overrides(parser, "override the configuration, as for training; may be given often")
    several = parser.add_argument_group("several models")
    several.add_argument(
        "--mix",
        metavar="BY",
        help="weigh models by their posterior, which each token updates, or always by their prior; "
        "or the likeliest alone answers, top-1 (default: posterior)",
    )
    several.add_argument(
        "--average",
        metavar="MEAN",
        help="of what they say: arithmetic or geometric (default: arithmetic)",
    )
    several.add_argument(
        "--prior",
        metavar="PRIOR",
        help="how likely each is where a document begins: uniform, or a FILE.json that evaluate "
        "--json has written; evaluate itself takes decay too, updated by what it has read, and "
        "cached, estimated on text of its own (default: uniform, of evaluate cached)",
    )


def add_scale(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, scaled: str = "the model"
) -> None:
    """The argument that scales residual branches, as `scaling_of` reads it."""
    parser.add_argument(
        "--scale",
        metavar="SCALE",
        help=f"{scaled} with what the residual branches of inner stages add multiplied by a "
        "NUMBER; by the `share` of the run's microbatches that visited the stage, or by as many "
        "times more as fewer stages run, at most 1; or as they `fit` training text best, which "
        "takes seconds",
    )


def add_old_cut(parser: argparse.ArgumentParser) -> None:
    """Take ``--stages N``, as two commands called ``--cut N``, where N is a number; untold in help.

    Elsewhere ``--stages`` lists the stages that run.
    """

    def number(text: str) -> int:
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(
                f"which stages run, as in {text!r}, is not for this command to say; into how many "
                "a model is cut says --cut N"
            )
        return int(text)

    parser.add_argument("--stages", dest="cut", type=number, help=argparse.SUPPRESS)


def names_several(arguments: argparse.Namespace) -> bool:
    """Whether the arguments name several models, which are to be mixed.

    Raises:
        InputError: if they tell of one what only several have, or of several what only one has.
    """
    is_several = len(arguments.run or arguments.hf) > 1
    if is_several:
        told, problem = OF_ONE, "is of one model, and several are named"
        remedy = "Name one, or leave it out"
    else:
        told, problem = OF_SEVERAL, "is of several models, and one is named"
        remedy = "Name another, or leave it out"
    for name in told:
        value = getattr(arguments, name, None)
        if value is not None and value is not False:
            shown = str(value) if isinstance(value, Path) else value
            raise InputError(f"--{name}", shown, problem, remedy)
    return is_several


def named_model(
    arguments: argparse.Namespace,
) -> tuple[StagedModel, Config, int | None, Scaling | None]:
    """The model that the arguments name, as `read_model` reads it, and how `--scale` scales it."""
    with loading():
        from skippipe_jax.inference.scaling import parse_scale, scaling_of
        from skippipe_jax.inference.staged_model import read_model

    run, hf = named_folders(arguments)
    scale = arguments.scale
    if scale is not None:
        scale = parse_scale(scale)  # A mistake shows before much is read.
    model, config, step = read_model(run, hf, arguments.step, arguments.cut, arguments.set)
    scaling = None if scale is None else scaling_of(scale, model, config.data, run, step)
    return model, config, step, scaling


def named_folders(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The folder of the one model that is named: of a run, or from Hugging Face."""
    run, hf = (None if own is None else own[0] for own in (arguments.run, arguments.hf))
    return run, hf


def named_ensemble(
    arguments: argparse.Namespace, prior: str, allowed: Collection[str]
) -> tuple[Ensemble, DataConfig, list[int | None], str]:
    """The models that the arguments name, together, as `read_ensemble` reads them.

    `prior` is the default, and those `allowed` are estimated here.
    """
    with loading():
        from skippipe_jax.inference.reading_experts import read_ensemble

    return read_ensemble(
        arguments.run or (),
        arguments.hf or (),
        arguments.cut,
        arguments.set,
        arguments.mix,
        arguments.average,
        arguments.prior or prior,
        allowed,
    )


def add_stages_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that name the stages that run, as `partial.chosen_order` reads them."""
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument(
        "--stages", metavar="0,2,1", help="which stages run, in this order (default: all)"
    )
    stages.add_argument(
        "--keep", type=float, metavar="SHARE", help="this share of the stages, drawn by --seed"
    )
