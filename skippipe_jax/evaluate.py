"""Held-out loss and perplexity of a model, in full and with stages left out or swapped.

python -m skippipe_jax.evaluate --run DIR --keep 1.0,0.75,0.5 --paths --swaps --importance
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched import fields
from skippipe_sched.errors import InputError, kind_of, loading

from skippipe_jax.arguments import (
    add_model_arguments,
    add_old_cut,
    add_scale,
    named_ensemble,
    named_folders,
    named_model,
    names_several,
    run_module,
)
from skippipe_jax.config.data import HELD_OUT_PARTS

if TYPE_CHECKING:
    from skippipe_jax.inference.partial import Question

DEFAULT_SEQUENCES = 256
DEFAULT_SUBSETS = 32


def main() -> int:
    """Parse the command line and evaluate; returns the exit code."""
    return run_module("skippipe_jax.evaluate", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Held-out loss and perplexity of the full model, every stage in order, and of partial "
        "ones. All that is asked for is evaluated in one go on the same text: the held-out part of "
        "what data.source and data.path say, which --set can change. Of several models, the loss "
        "of each alone and of all together, by domain, on a part of the first one's held-out text."
    )
    add_model_arguments(parser)
    add_old_cut(parser)
    parser.add_argument(
        "--sequences",
        type=int,
        default=DEFAULT_SEQUENCES,
        help="at most so many; of a mixture, and of each of its domains, at most so many (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--part",
        choices=HELD_OUT_PARTS,
        help="of the held-out documents: all of them, or those on which priors of an ensemble are "
        "estimated, or those that it is scored on (default: all)",
    )
    partial = parser.add_argument_group("partial models")
    partial.add_argument(
        "--keep",
        metavar="SHARES",
        help="1.0,0.75,0.5: all ways to keep such a share of the stages, the data stage always",
    )
    partial.add_argument(
        "--subsets",
        type=int,
        default=DEFAULT_SUBSETS,
        help="draw so many where --keep has more (default: %(default)s)",
    )
    partial.add_argument("--seed", type=int, default=0, help="of that draw (default: %(default)s)")
    partial.add_argument("--paths", action="store_true", help="the paths of the run's own plan")
    partial.add_argument("--swaps", action="store_true", help="two neighbouring stages swapped")
    partial.add_argument("--importance", action="store_true", help="each stage left out in turn")
    add_scale(partial, "all of this once more,")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw perplexity against --keep"
    )
    parser.set_defaults(command=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.data.batches import what_is_too_long
        from skippipe_jax.inference.by_domain import evaluate_domains
        from skippipe_jax.inference.evaluation import evaluate, subsets, table
        from skippipe_jax.reporting.evaluation_plot import picture

    sequences = fields.integer(arguments.sequences, "--sequences", 1)
    if names_several(arguments):
        return _evaluate_several(arguments, sequences)
    shares = _shares(arguments)
    model, config, step, scaling = named_model(arguments)
    _ = model.tokenizer  # Which is refused before anything is evaluated.
    questions = _questions(arguments, shares, model.stages)
    part = arguments.part or "all"
    found = evaluate(model, step, config.data, sequences, questions, scaling, part)
    is_mixture = config.data.mixture is not None
    by_domain = evaluate_domains(model, config.data, part, sequences) if is_mixture else None
    if arguments.plot is not None:
        scaled = None if found.scaled is None else subsets(found.scaled)
        _write(arguments.plot, picture(subsets(found), model.stages, found.perplexity, scaled))
    for line in what_is_too_long(config.data):
        print(line, file=sys.stderr)
    if arguments.json:
        print(json.dumps(found.to_json() | (by_domain.to_json() if by_domain else {})))
    else:
        print(table(found, model.cut) + (f"\n{by_domain.table()}" if by_domain else ""))
    return 0


def _evaluate_several(arguments: argparse.Namespace, sequences: int) -> int:
    with loading():
        from skippipe_jax.data.batches import what_is_too_long
        from skippipe_jax.ensemble.priors import CACHED, PRIORS
        from skippipe_jax.inference.ensemble_evaluation import evaluate_ensemble

    ensemble, data, steps, prior = named_ensemble(arguments, CACHED, PRIORS)
    found = evaluate_ensemble(ensemble, steps, data, sequences, prior)
    for line in what_is_too_long(data):
        print(line, file=sys.stderr)
    print(json.dumps(found.to_json()) if arguments.json else found.table())
    return 0


def _shares(arguments: argparse.Namespace) -> list[float]:
    """What --keep lists; refuses, before anything is evaluated, what could not be drawn."""
    if arguments.plot is not None:
        if arguments.keep is None:
            raise InputError(
                "--plot", str(arguments.plot), "draws what --keep finds", "Add --keep 1.0,0.75,0.5"
            )
        if not arguments.plot.parent.is_dir():
            raise InputError("--plot", str(arguments.plot), "there is no such folder", "Create it")
        if arguments.plot.suffix != ".svg":
            raise InputError(
                "--plot", str(arguments.plot), "is no name of an SVG file", "Write shares.svg, say"
            )
        if arguments.plot.is_dir():
            raise InputError("--plot", str(arguments.plot), "is a folder", "Give another name")
    if arguments.keep is None:
        return []
    return [fields.number(share, "--keep") for share in arguments.keep.split(",")]


def _questions(
    arguments: argparse.Namespace, shares: Sequence[float], stages: int
) -> list[Question]:
    from skippipe_jax.inference.partial import along_paths, kept, swapped, without_each
    from skippipe_jax.storage.run_folder import saved_plan

    limit = fields.integer(arguments.subsets, "--subsets", 1)
    questions = [kept(stages, share, limit, arguments.seed) for share in shares]
    if arguments.paths:
        run, _ = named_folders(arguments)
        if run is None:
            raise InputError("--paths", True, "only a run has a plan", "Leave it out")
        questions.append(along_paths(saved_plan(run), stages))
    if arguments.swaps:
        questions.append(swapped(stages))
    if arguments.importance:
        questions.append(without_each(stages))
    return questions


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise kind_of(error)(
            "--plot", str(path), f"cannot be written: {error.strerror}", "Give another file"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
