"""The command that runs tasks of EleutherAI's lm-evaluation-harness on a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax.cli.arguments import (
    add_language_model_arguments,
    is_mixture,
    open_language_model,
)
from skippipe_jax.config.extras import require_extra
from skippipe_jax.config.sampling import DEFAULT_SLOTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Run tasks of EleutherAI's lm-evaluation-harness on a model, some of its stages, or a "
        "mixture."
    )
    add_language_model_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of --keep-fraction")
    about = "task names, separated by commas; * is a wildcard"
    parser.add_argument("--tasks", required=True, metavar="NAMES", help=about)
    about = "folder of task definitions, instead of the built-in tasks"
    parser.add_argument("--tasks-from", type=Path, metavar="DIR", help=about)
    about = "examples before each question"
    parser.add_argument("--num-fewshot", type=int, metavar="N", help=about)
    about = "maximum questions per task"
    parser.add_argument("--limit", type=int, metavar="N", help=about)
    about = "sequences at a time"
    parser.add_argument("--batch-size", type=int, default=DEFAULT_SLOTS, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the tasks and print their results; return the exit code."""
    folder = arguments.tasks_from
    if folder is not None and not folder.is_dir():
        raise InputError("--tasks-from", str(folder), "is not a folder", "Give a folder of tasks")
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(arguments, name)) is not None:
            fields.integer(value, f"--{name.replace('_', '-')}", least)
    is_mixture(arguments)  # Report arguments that do not go together first.
    with loading():
        require_extra("lm_eval", "harness", "--tasks", arguments.tasks)
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table

        from skippipe_jax.inference.harness_model import HarnessModel

    tasks = TaskManager(include_path=folder, include_defaults=folder is None)
    names = arguments.tasks.split(",")
    for name in names:
        if not tasks.match_tasks([name]):
            raise InputError(
                "--tasks", name, "unknown task", "List the built-in tasks with lm-eval ls tasks"
            )
    model = HarnessModel(open_language_model(arguments)[0], arguments.batch_size)
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
