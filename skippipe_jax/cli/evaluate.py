"""The command that computes validation loss and perplexity of a model, in full and in part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched import fields
from skippipe_sched.commands.output_files import require_writable, write
from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import (
    accept_old_names,
    add_model_arguments,
    add_scale,
    is_mixture,
    open_sources,
    scaling_of,
)
from skippipe_jax.config.data import HELD_OUT_PARTS

if TYPE_CHECKING:
    from skippipe_jax.config import DataConfig
    from skippipe_jax.inference.partial import Question
    from skippipe_jax.inference.remote_model import RemoteModel

DEFAULT_SEQUENCES = 256
DEFAULT_SUBSETS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Compute validation loss and perplexity of the full model and of partial models on "
        "held-out text; or, by domain, of several models and their mixture, on the held-out text "
        "of the first model."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--sequences",
        type=int,
        help=f"maximum sequences; for a mixture also in each domain (default: {DEFAULT_SEQUENCES})",
    )
    parser.add_argument(
        "--part",
        choices=HELD_OUT_PARTS,
        help="held-out documents: all, or an ensemble's for priors or for scores (default: all)",
    )
    partial = parser.add_argument_group("partial models, evaluated besides the full model")
    partial.add_argument(
        "--keep-fraction",
        metavar="FRACTIONS",
        help="fractions of the stages, as 1.0,0.75,0.5; for each, all subsets with the data stage",
    )
    about = "maximum subsets of each fraction, drawn at random"
    partial.add_argument("--subsets", type=int, default=DEFAULT_SUBSETS, help=about)
    partial.add_argument("--seed", type=int, default=0, help="seed of the draw of subsets")
    partial.add_argument("--paths", action="store_true", help="paths of the run's plan")
    about = "each pair of neighboring stages swapped"
    partial.add_argument("--swaps", action="store_true", help=about)
    partial.add_argument("--importance", action="store_true", help="each stage skipped in turn")
    accept_old_names(parser, keep="--keep-fraction", stages="--num-stages")
    add_scale(partial, "also evaluate after scaling")
    service = parser.add_argument_group("model on a server")
    service.add_argument(
        "--url",
        metavar="http://HOST:PORT/v1",
        help="skippipe serve process that runs the model; --run or --hf selects only text and "
        "tokenizer",
    )
    about = "file with an API key in the first line"
    service.add_argument("--api-key-file", type=Path, metavar="FILE", help=about)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    about = "plot perplexity against --keep-fraction"
    output.add_argument("--plot", type=Path, metavar="FILE.svg", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; return the exit code."""
    with loading():
        from skippipe_jax.data.batches import shortage_warning, too_long_lines
        from skippipe_jax.inference.domain_losses import evaluate_domains
        from skippipe_jax.inference.evaluation import evaluate, subsets, table
        from skippipe_jax.reporting.line_chart import perplexity_plot

    requested = arguments.sequences
    sequences = (
        DEFAULT_SEQUENCES if requested is None else fields.integer(requested, "--sequences", 1)
    )
    several = is_mixture(arguments)
    if arguments.api_key_file is not None and arguments.url is None:
        problem = "applies only to a service"
        raise InputError("--api-key-file", str(arguments.api_key_file), problem, "Add --url")
    if several:
        return _evaluate_several(arguments, sequences)
    shares = _fractions(arguments)
    step = scaling = served = None
    if arguments.url is not None:
        served, data = _open_service(arguments)
        model = served
    else:
        [source] = open_sources(arguments)
        scaling = scaling_of(arguments, source)
        model, data, step = source.model(), source.config.data, source.step
        _ = model.tokenizer  # Report an unusable tokenizer before the evaluation.
    questions = _questions(arguments, shares, model.stages)
    part = arguments.part or "all"
    evaluation = evaluate(model, step, data, sequences, questions, scaling, part)
    by_domain = None
    if data.mixture is not None:
        by_domain = evaluate_domains(model, data, part, sequences)
    if arguments.plot is not None:
        scaled = None if evaluation.scaled is None else subsets(evaluation.scaled)
        plot = perplexity_plot(subsets(evaluation), model.stages, evaluation.perplexity, scaled)
        write("--plot", arguments.plot, plot)
    fewer = [] if requested is None else shortage_warning(data, requested, part)
    for line in [*too_long_lines(data), *fewer]:
        log.info(line)
    if arguments.hf and not any(one.startswith("data.") for one in arguments.set):
        log.info("to use your own text, add --set data.source=text --set data.path=PATH")
    others = [each for each in (by_domain, served) if each is not None]
    if arguments.json:
        print(
            json.dumps({k: v for each in (evaluation, *others) for k, v in each.to_json().items()})
        )
    else:
        print("\n".join([table(evaluation, model, data), *(each.table() for each in others)]))
    return 0


def _open_service(arguments: argparse.Namespace) -> tuple[RemoteModel, DataConfig]:
    """Return the model at --url, and the data to evaluate it on.

    Raises:
        InputError: if the model or the data does not exist, or for an argument that applies only to
            a model of this process.
    """
    with loading():
        from skippipe_jax.inference.remote_model import RemoteModel, with_large_batches

    options = {
        "--step": arguments.step,
        "--num-stages": arguments.num_stages,
        "--scale": arguments.scale,
        "--set": next((one for one in arguments.set if not one.startswith("data.")), None),
    }
    for option, value in options.items():
        if value is not None:
            problem = "does not apply to the model of --url, which a server runs"
            raise InputError(option, value, problem, "Omit it, or give it to skippipe serve")
    [source] = open_sources(arguments)
    data = with_large_batches(source.config.data)
    return RemoteModel(arguments.url, data, arguments.api_key_file), data


def _evaluate_several(arguments: argparse.Namespace, sequences: int) -> int:
    with loading():
        from skippipe_jax.data.batches import too_long_lines
        from skippipe_jax.ensemble import CACHED, PRIORS
        from skippipe_jax.inference.domain_losses import evaluate_ensemble
        from skippipe_jax.inference.ensemble import read_ensemble

    sources = open_sources(arguments)
    ensemble, prior = read_ensemble(sources, arguments.mix, arguments.prior or CACHED, PRIORS)
    data, steps = sources[0].config.data, [source.step for source in sources]
    evaluation = evaluate_ensemble(ensemble, steps, data, sequences, prior)
    for line in too_long_lines(data):
        log.info(line)
    print(json.dumps(evaluation.to_json()) if arguments.json else evaluation.table())
    return 0


def _fractions(arguments: argparse.Namespace) -> list[float]:
    """Return the shares of --keep-fraction, after the checks of --plot."""
    shares, plot = arguments.keep_fraction, arguments.plot
    if plot is not None:
        if shares is None:
            remedy = "Add --keep-fraction 1.0,0.75,0.5"
            raise InputError("--plot", str(plot), "requires --keep-fraction", remedy)
        require_writable("--plot", plot)
    if shares is None:
        return []
    return [fields.number(share, "--keep-fraction") for share in shares.split(",")]


def _questions(
    arguments: argparse.Namespace, shares: Sequence[float], stages: int
) -> list[Question]:
    from skippipe_jax.inference.partial import kept, leave_one_out_variants, path_variants, swapped
    from skippipe_jax.storage.run_dir import RunDir

    limit = fields.integer(arguments.subsets, "--subsets", 1)
    questions = [kept(stages, share, limit, arguments.seed) for share in shares]
    if arguments.paths:
        if not arguments.run:
            raise InputError("--paths", True, "requires --run: only a run has a plan", "Omit it")
        questions.append(path_variants(RunDir(arguments.run[0]).plan(), stages))
    if arguments.swaps:
        questions.append(swapped(stages))
    if arguments.importance:
        questions.append(leave_one_out_variants(stages))
    return questions
