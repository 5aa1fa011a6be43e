"""Tasks of EleutherAI's lm-evaluation-harness, run on a model of which any stages run.

python -m skippipe_jax.harness --run DIR --tasks hellaswag,arc_easy --keep 0.5
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from skippipe_sched.errors import InputError, loading

from skippipe_jax.arguments import (
    add_model_arguments,
    add_scale,
    add_stages_arguments,
    named_ensemble,
    named_folders,
    names_several,
    run_module,
)


def main() -> int:
    """Parse the command line and run the tasks; returns the exit code."""
    return run_module("skippipe_jax.harness", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Run tasks of lm-evaluation-harness on a model, on some of its stages, or on several "
        "models together."
    )
    add_model_arguments(parser)
    add_stages_arguments(parser)
    add_scale(parser)
    parser.add_argument("--seed", type=int, default=0, help="of --keep (default: %(default)s)")
    parser.add_argument(
        "--tasks", required=True, metavar="NAMES", help="separated by commas; * stands for anything"
    )
    parser.add_argument(
        "--tasks-from",
        type=Path,
        metavar="DIR",
        help="a folder with tasks of your own, instead of those that the harness brings",
    )
    parser.add_argument("--num-fewshot", type=int, help="examples before each question")
    parser.add_argument("--limit", type=int, help="questions of each task at most")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences at once (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")
    parser.set_defaults(command=_harness)


def _harness(arguments: argparse.Namespace) -> int:
    folder = arguments.tasks_from
    if folder is not None and not folder.is_dir():
        raise InputError("--tasks-from", str(folder), "is no folder", "Name one with tasks")
    is_several = names_several(arguments)
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            "--tasks",
            arguments.tasks,
            "lm-evaluation-harness is not installed",
            'Install it, in a clone of the repository: pip install -e ".[harness]"',
        )
    with loading():
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table

        from skippipe_jax.inference.harness_model import HarnessModel

    tasks = TaskManager(include_path=folder, include_defaults=folder is None)
    names = arguments.tasks.split(",")
    for name in names:
        if not tasks.match_tasks([name]):
            raise InputError(
                "--tasks", name, "there is no such task", "lm-eval ls tasks lists the harness's own"
            )
    if is_several:
        ensemble = named_ensemble(arguments, "uniform", ("uniform",))[0]
        model = HarnessModel(model=ensemble, batch_size=arguments.batch_size)
    else:
        run, hf = named_folders(arguments)
        model = HarnessModel(
            run,
            hf,
            step=arguments.step,
            cut=arguments.cut,
            overrides=arguments.set,
            stages=arguments.stages,
            keep=arguments.keep,
            scale=arguments.scale,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
        )
    if model.scales is not None:
        print(f"scales {model.scales.told(model.cut)}", file=sys.stderr)
    results = simple_evaluate(
        model=model,
        tasks=[*tasks.match_tasks(names)],
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        log_samples=False,
        task_manager=tasks,
    )
    if arguments.json:
        print(json.dumps(results, default=handle_non_serializable))
    else:
        print(make_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
