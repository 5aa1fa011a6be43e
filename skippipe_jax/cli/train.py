"""The command that trains a LLaMA along the paths of a plan, as one host or one of many."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.commands.output_files import write
from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    add_log_level,
    config_of,
    connect_from_args,
)
from skippipe_jax.config.data import kind_of
from skippipe_jax.config.model import PRESETS

if TYPE_CHECKING:
    from skippipe_jax.cluster.membership import Membership
    from skippipe_jax.config import Config
    from skippipe_jax.training.trainer import RunResult

EPILOG = """\
Under SLURM and on TPU pods, hosts are detected. Elsewhere, start one process per host with these
options or SKIPPIPE_COORDINATOR, SKIPPIPE_HOSTS and SKIPPIPE_HOST_ID; on one machine, skippipe
launch does so.
"""

INTERRUPTED = "interrupted; the last checkpoint, if any, is kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Train a LLaMA model in a pipeline, with the paths of a plan."
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="training text: a file, folder or glob of text, JSON lines (also conversations) or "
        "Parquet, or a folder from skippipe tokenize; needs no --config",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"model preset, {', '.join(PRESETS)}; or hf:DIR, a Hugging Face folder to start "
        "from (default: as configured, or tiny)",
    )
    add_cluster_arguments(parser)
    add_log_level(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check and print configuration, plan and memory, then exit; no plan if several hosts "
        "are to measure",
    )
    parser.set_defaults(interrupted=INTERRUPTED)


def run(arguments: argparse.Namespace) -> int:
    """Train as one host; return the exit code."""
    from skippipe_jax.config.describe import summary

    # Report configuration errors before imports that take seconds.
    config = config_of(arguments, _overrides(arguments))
    if arguments.dry_run:
        _dry_run(config, arguments)
        return 0
    with loading():
        from skippipe_jax.cluster.ending import exit_at_once
        from skippipe_jax.storage.run_dir import RunDir
        from skippipe_jax.training.trainer import Trainer

    if not (arguments.resume or arguments.host_id):
        # Check this before waiting for other hosts.
        RunDir(config.run_dir).require_new()
    with connect_from_args(arguments, config) as host:
        host.resume_hint = lambda: resume_hint(config)
        trainer = Trainer(
            config, host=host, resume=arguments.resume, config_folder=arguments.config.parent
        )
        if host.index == 0:
            log.output(summary(trainer.config))
        result = trainer.run()
    if result.left_run:
        log.output(
            f"host {host.index} left; the run continues from step {result.step}. "
            "Rejoin with skippipe train --resume"
        )
    else:
        _print_result(config, host, result)
    if host.generation_number not in (0, 1):
        # Threads may still wait for messages from failed hosts, and an ordinary exit would end them
        # within JAX.
        exit_at_once(result.exit_code)
    return result.exit_code


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """Return --data and --model as overrides of the configuration."""
    overrides = []
    if arguments.data is not None:
        kind = kind_of(arguments.data)
        named = {"source": kind, "path": arguments.data, "mixture": None}
        if kind == "chat":
            named["packing"] = "documents"
        overrides += [f"data.{key}={json.dumps(value)}" for key, value in named.items()]
    if arguments.model is not None:
        key = "init_from" if ":" in arguments.model else "model.preset"
        overrides.append(f"{key}={json.dumps(arguments.model)}")
    return overrides


def _dry_run(config: Config, arguments: argparse.Namespace) -> None:
    """Check configuration, folder, plan, hosts and memory as host 0 does, and print the results.

    Text and pretrained weights are read only by a single host that measures its cluster.

    Raises:
        InputError: if the run could not start.
    """
    with loading():
        from skippipe_jax.config import require_same_run
        from skippipe_jax.config.describe import summary
        from skippipe_jax.models.estimate import table
        from skippipe_jax.models.footprint import traffic
        from skippipe_jax.models.in_flight import memory_warnings
        from skippipe_jax.models.node_memory import least_memory_bytes, memory_of_stages
        from skippipe_jax.models.planned_case import size_mismatches
        from skippipe_jax.profiling.case import check_template
        from skippipe_jax.program.schedule import OWN
        from skippipe_jax.storage.checkpoint import latest_step
        from skippipe_jax.storage.run_dir import RunDir
        from skippipe_jax.training.initial_weights import open_initial_weights
        from skippipe_jax.training.planning import log_planned_time, make_plans, with_plan
        from skippipe_jax.training.setup import hosts_for, open_text

    run = RunDir(config.run_dir)
    hosts = arguments.hosts or max(config.cluster.host_of_node or [0]) + 1
    config = with_plan(config, hosts)
    log.output(summary(config))
    done = 0
    if arguments.resume:
        require_same_run(config, run.config())
        schedule, done = run.schedule(), latest_step(run.path) or 0
    else:
        run.require_new()
        if config.plan.measure:
            check_template(config, hosts)
            if hosts == 1:
                open_text(config)
                open_initial_weights(config, anew=True)
            log.output("# the run measures the cluster and makes a plan when it starts")
            return
        schedule = make_plans(config, arguments.config.parent, None)
    hosts_for(config, schedule, hosts)
    plan = schedule.plans[OWN]
    case = plan.case
    log_planned_time(config, schedule, done)
    memory = memory_of_stages(config, case, memory_bytes=least_memory_bytes(case))
    log.output(
        f"\n{table(config, case, memory, traffic(config, case, sum(map(len, plan.microbatches))))}"
    )
    for sentence in size_mismatches(config, case) + memory_warnings(config, case, plan.stage_of):
        log.warning(sentence)


def resume_hint(config: Config) -> str:
    """Return a sentence on how to continue a run that ended early."""
    from skippipe_jax.config.parsing import is_run
    from skippipe_jax.storage.checkpoint import latest_step

    folder = Path(config.run_dir)
    step = latest_step(folder)
    if step is None and not (is_run(folder) or config.checkpoint.copy_to):
        return f"Restart without --resume; {config.run_dir} contains no run yet."
    if step is None:
        # --resume is required: the folder already holds the run.
        return f"Restart with --resume; without a checkpoint, {config.run_dir} starts at step 0."
    return f"Restart with --resume; last checkpoint: step {step} in {config.run_dir}."


def _print_result(config: Config, host: Membership, result: RunResult) -> None:
    if result.stopped_by is not None:
        stopped = f"stopped by {result.stopped_by.name}"
        if host.count > 1:
            stopped = f"{result.stop_message}: all hosts stop"
        log.output(f"{stopped} after step {result.step}. {resume_hint(config)}")
    elif not host.leads:
        early = f"stopped early (validation.patience = {config.validation.patience}) after"
        how = early if result.step < config.train.steps else "finished"
        log.output(f"host {host.index}: {how} {result.step} steps; run directory {config.run_dir}")
    else:
        from skippipe_jax.storage.checkpointer import best_step
        from skippipe_jax.storage.run_dir import RunDir

        run_dir = RunDir(Path(config.run_dir))
        if result.step < config.train.steps:
            losses = run_dir.validation_losses()
            step = best_step(losses)
            assert step is not None, "a run without losses does not stop early"
            since = sum(other > step for other in losses)
            log.output(
                f"stopped early: no improvement in {since} validation{'s' * (since > 1)} after "
                f"step {step} (validation loss {losses[step]:.4f}). To continue, --resume with "
                f"validation.patience above {config.validation.patience}, or null"
            )
        best = run_dir.best()
        if best is not None:
            best_text = f"step {best['step']}, validation loss {best['validation_loss']:.4f}"
            log.output(f"best checkpoint (--step best): {best_text}")
        log.output(
            f"finished {result.step} steps; run directory {config.run_dir}. Evaluate: "
            f"skippipe evaluate --run {shlex.quote(config.run_dir)}"
        )
        _report(Path(config.run_dir))


def _report(folder: Path) -> None:
    """Write the report of a finished run; an error here is only a warning."""
    from skippipe_jax.reporting.page import REPORT, report

    try:
        write("run_dir", folder / REPORT, report(folder))
    except InputError as error:
        log.warning(f"no report was written: {error}")
    else:
        log.output(f"report with curves and timelines: {folder / REPORT}")
