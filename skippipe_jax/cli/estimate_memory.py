"""The command that estimates memory per node, and bytes over links per iteration."""

from __future__ import annotations

import argparse
import copy
import json

from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import DEFAULT_CONFIG, add_config_arguments, config_of

EPILOG = """\
Without a plan, or with plan: auto, the estimate is for one device; for a case with open stages or
path lengths, for the candidate that is best without a search.

Without a case, --model 8b --devices 3x24GB prints the smallest number of stages that fits, or the
number of devices that the model needs, and the memory that each remedy saves. Defaults:
microbatches of one sequence of at most 4,096 tokens, bfloat16, recompute: block.
"""

LONGEST_SEQUENCE = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Estimate the memory that a node of each stage needs, and the bytes per step on the links."
    )
    parser.epilog = EPILOG
    add_config_arguments(parser, resumes=False)
    about = "model preset, such as 8b, or hf:DIR, a Hugging Face folder"
    parser.add_argument("--model", help=about)
    about = "devices with their memory, as 3x24GB or 2x80GB,24GB, or a case file"
    parser.add_argument("--devices", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; return the exit code."""
    if arguments.devices is not None or arguments.model is not None:
        return _print_fit(arguments)
    config = config_of(arguments)
    with loading():
        from skippipe_jax.models.estimate import (
            estimate_json,
            is_for_one_host,
            planned_case_and_visits,
            table,
        )
        from skippipe_jax.models.footprint import traffic
        from skippipe_jax.models.in_flight import memory_warnings
        from skippipe_jax.models.node_memory import least_memory_bytes, memory_of_stages

    case, visits = planned_case_and_visits(config, arguments.config.parent)
    if is_for_one_host(config):
        log.info(
            "this estimate is for one machine with one device, because the plan is made when the "
            "run starts. For several machines, run skippipe measure -o case.yaml first, then give "
            "--set plan='{case: case.yaml}'"
        )
    memory = memory_of_stages(config, case, memory_bytes=least_memory_bytes(case))
    sent = traffic(config, case, visits)
    if arguments.json:
        print(json.dumps(estimate_json(config, case, memory, sent)))
    else:
        print(table(config, case, memory, sent))
    for sentence in memory_warnings(config, case):
        log.warning(sentence)
    return 0


def _print_fit(arguments: argparse.Namespace) -> int:
    """Print whether a model fits on devices; return the exit code."""
    from skippipe_jax.config import Config, parse_config
    from skippipe_jax.config.parsing import ConfigFiles, read_files

    if not arguments.devices:
        remedy = "Add --devices, such as 3x24GB"
        raise InputError("--devices", arguments.devices, "is required with --model", remedy)
    if arguments.json:
        problem = "cannot be combined with --devices"
        raise InputError("--json", True, problem, "Omit this option")
    is_configured = arguments.config is not DEFAULT_CONFIG or arguments.model is None
    files = read_files(arguments.config, "--config") if is_configured else ConfigFiles()
    tree = files.tree
    tree.pop("plan", None)
    if arguments.model is not None and arguments.model.startswith("hf:"):
        tree["init_from"] = arguments.model
    elif arguments.model is not None:
        tree["model"] = tree.get("model", {}) | {"preset": arguments.model}
    if not is_configured:
        tree["model"] = tree.get("model", {}) | {"compute_dtype": "bfloat16", "recompute": "block"}
        short = copy.deepcopy(tree) | {"data": {"sequence_length": 1}}
        context = parse_config(short).model.context
        length = min(context, LONGEST_SEQUENCE)
        tree["data"] = {"sequence_length": length, "microbatch_size": 1}

    def configured(remedy: str | None) -> Config:
        overrides = arguments.set + ([] if remedy is None else [remedy])
        with files.naming():  # The copy keeps `tree` unchanged by overrides.
            return parse_config(copy.deepcopy(tree), overrides)

    configured(None)  # Report errors before imports that take seconds.
    with loading():
        from skippipe_jax.models.fewest_stages import describe_fit, parse_devices

    print(describe_fit(configured, parse_devices(arguments.devices)))
    return 0
