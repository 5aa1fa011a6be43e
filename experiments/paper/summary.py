"""What a run has found, in a few KB: its held-out losses while it trained, and without some stages.

python -m experiments.paper.summary RUN --command COMMAND --digest DIGEST --output FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from skippipe_sched.errors import run_command

from experiments.benchmarks.harness import reporting
from skippipe_jax import Run
from skippipe_jax.inference.evaluation import Answer, evaluate
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.partial import Question, Variant, kept, swapped
from skippipe_jax.inference.scaling import SHARE, create_scaling
from skippipe_jax.storage.files import atomic_write

SEQUENCES, QUICK_SEQUENCES = 512, 16
MICROBATCH = 32
EVERY_SUBSET = 1000


@dataclass(frozen=True)
class Summary:
    """What a run has found. Losses are held-out, in nats per byte.

    Attributes:
        digest: of the configuration and the plan, and whatever else the run comes from.
        steps: iterations.
        tokens_per_iteration: bytes that an iteration learns.
        curve: after which iteration, seconds on the planner's clock, loss of the full model, over
            fewer sequences than the others.
        simulated_s: seconds of all iterations on the planner's clock.
        loss: of the full model at the end.
        loss_scaled: of the full model in which what residual branches of a stage add is multiplied
            by the share of the microbatches that visited it in training.
        keep: perplexities by how many stages run, over all sets of stages: mean, deviation, least,
            greatest, and the mean loss.
        keep_scaled: the same where branches are multiplied by the share, and where fewer stages run
            by as many times more, but by 1 at most.
        early_exit: losses with the first one, two, ... stages.
        swaps: perplexities with two neighbouring stages swapped, as in `keep`.
        minutes: that training took, in process, on this machine.
        command, commit, machine: that made this.
    """

    digest: str
    steps: int
    tokens_per_iteration: int
    curve: list[list[float]]
    simulated_s: float
    loss: float
    loss_scaled: float
    keep: dict[str, dict[str, float]]
    keep_scaled: dict[str, dict[str, float]]
    early_exit: list[float]
    swaps: dict[str, float]
    minutes: float
    command: str
    commit: str
    machine: dict[str, Any]


def summarise(run: Path, command: str, digest: str, sequences: int) -> Summary:
    """Evaluate the last checkpoint of a run that `command` trains, and gather what it has noted."""
    source = open_source(run)
    model, step = source.model(), source.step
    assert step is not None, "a run has steps"
    data = replace(source.config.data, microbatch_size=min(MICROBATCH, sequences))
    stages = model.stages
    counts = range(1, stages + 1)
    questions = [kept(stages, count / stages, EVERY_SUBSET, 0) for count in counts]
    first = tuple(Variant(tuple(range(count))) for count in counts)
    questions += [Question("early exit", first, stages), swapped(stages)]
    scaling = create_scaling(SHARE, source)
    found = evaluate(model, step, data, sequences, questions, scaling)
    scaled = found.scaled
    assert scaled is not None, "was asked for"
    *keep, early_exit, swaps = found.answers
    *keep_scaled, _, _ = scaled.answers

    lines = Run(run).metrics
    clock_s = list(accumulate(line["predicted_seconds"] for line in lines))
    return Summary(
        digest=digest,
        steps=step,
        tokens_per_iteration=lines[-1]["tokens"],
        curve=[
            [line["step"], round(clock_s[line["step"] - 1], 1), round(line["validation_loss"], 4)]
            for line in lines
            if line["validation_loss"] is not None
        ],
        simulated_s=round(clock_s[-1], 1),
        loss=round(found.loss, 5),
        loss_scaled=round(scaled.loss, 5),
        keep={str(n): _spread(answer) for n, answer in zip(counts, keep, strict=True)},
        keep_scaled={str(n): _spread(own) for n, own in zip(counts, keep_scaled, strict=True)},
        early_exit=[round(loss, 5) for loss in early_exit.losses],
        swaps=_spread(swaps),
        minutes=round(sum(line["seconds_per_iteration"] for line in lines) / 60, 2),
        **reporting.origin(command),
    )


def _spread(answer: Answer) -> dict[str, float]:
    figures = {
        "perplexity": answer.perplexity,
        "deviation": answer.deviation,
        "least": min(answer.perplexities),
        "greatest": max(answer.perplexities),
        "loss": answer.loss,
    }
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> int:
    """Parse the command line and sum up; returns the exit code."""
    parser = reporting.documented_parser("python -m experiments.paper.summary", __doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--command", required=True, help="command that trains the run")
    parser.add_argument("--digest", required=True, help="digest of the configuration and the plan")
    parser.add_argument("--output", type=Path, required=True, help="output file")
    parser.add_argument("--quick", action="store_true", help="evaluate on little text")
    arguments = parser.parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    sequences = QUICK_SEQUENCES if arguments.quick else SEQUENCES
    found = summarise(arguments.run, arguments.command, arguments.digest, sequences)
    atomic_write(arguments.output, json.dumps(asdict(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
