"""Lets a model score all domains of an ensemble, in a process of its own.

python -m skippipe_jax.experts.scoring FOLDER/scores/NAME/asked.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from skippipe_sched.errors import loading

from skippipe_jax.arguments import run_module


def main() -> int:
    """Parse the command line and score; returns the exit code."""
    return run_module("skippipe_jax.experts.scoring", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = "Let a model score all domains, as skippipe experts asks it."
    parser.add_argument("asked", type=Path, help="the file that says what is asked")
    parser.set_defaults(command=_score)


def _score(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.experts.tasks import DONE, asked_of, data_of
        from skippipe_jax.inference.ensemble import averaged
        from skippipe_jax.inference.scores import score
        from skippipe_jax.inference.staged_model import read_run
        from skippipe_jax.runtime.compilation import keep_programs
        from skippipe_jax.storage.whole_file import write_whole

    folder, asked = arguments.asked.parent, asked_of(arguments.asked)
    read = [read_run(Path(run)) for run in asked["runs"]]
    models, configs = [model for model, _, _ in read], [config for _, config, _ in read]
    keep_programs(configs[0].compilation_cache)
    model = models[0] if len(models) == 1 else averaged(models)
    data = data_of(configs[0].data, asked)
    for domain, part, sequences in asked["parts"]:
        found = score(model, data, domain, part, sequences)
        found.save(folder / f"{domain}-{part}.npz")
        print(f"{domain}, {part}: {found.loss:.4f} nats per token", flush=True)
    write_whole(folder / DONE, json.dumps({"digest": asked["digest"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
