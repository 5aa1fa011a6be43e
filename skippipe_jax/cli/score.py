"""Score all domains of an ensemble by one model, as `skippipe experts` asks in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_sched.errors import loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("asked", type=Path, help="the file that says what is asked")


def run(arguments: argparse.Namespace) -> int:
    """Score, and write the scores beside the file; return the exit code."""
    with loading():
        from skippipe_jax.experts.scoring import score_asked

    score_asked(arguments.asked)
    return 0
