"""lm-evaluation-harness with many requests at once against one at a time, on one model.

    python -m experiments.benchmarks.serving.many_requests --json FILE

A model of the quickstart's shapes, with drawn parameters, answers the three kinds of request of the
harness: in turns with as many slots as `skippipe lm-eval` has by default, and with one. Answers of
both must be alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from lm_eval.api.instance import Instance
from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import QUICKSTART
from experiments.benchmarks.harness.turns import in_turns, ratio
from skippipe_jax.config import load_config
from skippipe_jax.config.sampling import DEFAULT_SLOTS
from skippipe_jax.inference.harness_model import HarnessModel
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.llama import create_stage

STAGES, NEW_TOKENS = 4, 64


def quickstart_model() -> StagedModel:
    """Make a new model of the quickstart's shapes: its speed does not depend on training."""
    config = load_config(QUICKSTART).model
    layers = config.stage_partition(STAGES)
    stages = (create_stage(config, s, layers, jax.random.key(0)) for s in range(STAGES))
    return StagedModel(config, [nnx.to_pure_dict(nnx.state(stage)) for stage in stages])


def requests_of(count: int) -> dict[str, list[Instance]]:
    """Draw so many requests of each kind, of random lengths."""
    random = np.random.default_rng(0)

    def text(least: int, most: int) -> str:
        letters = random.integers(97, 123, random.integers(least, most + 1), np.uint8)
        return letters.tobytes().decode()

    generated = {"until": [], "max_gen_toks": NEW_TOKENS}
    asked: dict[Any, Callable[[], tuple[Any, ...]]] = {
        "generate_until": lambda: (text(16, 128), generated),
        "loglikelihood": lambda: (text(16, 128), text(1, 16)),
        "loglikelihood_rolling": lambda: (text(128, 512),),
    }
    return {
        kind: [Instance(kind, {}, draw(), number) for number in range(count)]
        for kind, draw in asked.items()
    }


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Compare both numbers of slots, for each kind of request.

    Raises:
        RuntimeError: if a text differs, or a log-likelihood by more than a thousandth of a nat.
    """
    model, slots = quickstart_model(), arguments.slots
    report |= {"slots": slots, "requests": arguments.requests, "results": {}}
    rows = [["requests per second", f"{slots} at once", "one at a time", "times as fast"]]
    for kind, asked in requests_of(arguments.requests).items():
        answers: dict[str, list[Any]] = {}

        def answered(name: str, at_once: int, kind: str = kind, answers: Any = answers) -> Any:
            answer = getattr(HarnessModel(model, at_once), kind)

            def answer_all(requests: list[Instance]) -> float:
                answers[name] = answer(requests)
                return 0.0

            return answer_all

        programs = {"many": answered("many", slots), "one": answered("one", 1)}
        taken = in_turns(programs, [asked] * (1 + arguments.turns), warmup=1)
        if not is_alike(answers["many"], answers["one"]):
            raise RuntimeError(f"{kind}: the answers depend on the number of slots: {answers}")
        times = ratio(taken["one"].seconds, taken["many"].seconds)
        rates = [f"{arguments.requests / own.median:.1f}" for own in taken.values()]
        rows.append([kind, *rates, f"{times:.2f}"])
        seconds = {name: [round(s, 4) for s in own.seconds] for name, own in taken.items()}
        report["results"][kind] = {"seconds": seconds, "times_as_fast": round(times, 2)}
    return aligned(rows, [0])


def is_alike(some: list[Any], others: list[Any]) -> bool:
    """Tell whether texts are the same, and log-likelihoods within a thousandth of a nat."""
    if isinstance(some[0], str):
        return some == others
    return bool(np.abs(np.subtract(some, others, dtype=float)).max() <= 1e-3)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {
        "slots": (DEFAULT_SLOTS, 1, "slots"),
        "requests": (64, 1, "requests of each kind"),
        "turns": (5, 1, "counted turns"),
    }
    return reporting.run("serving.many_requests", __doc__, measure, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
