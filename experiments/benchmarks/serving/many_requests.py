"""The harness with many requests at once against one at a time, on the quickstart's model.

    python -m experiments.benchmarks.serving.many_requests --json FILE

A model of the quickstart's shapes, with drawn parameters, answers the three kinds of request of
lm-evaluation-harness: in turns with as many slots as `skippipe lm-eval` has by default, and with
one. The ratio of a turn is that of their seconds; answers of both have to be alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from lm_eval.api.instance import Instance
from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import ratio
from skippipe_jax.config import load_config
from skippipe_jax.config.sampling import DEFAULT_SLOTS
from skippipe_jax.inference.harness_model import HarnessModel
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.llama import create_stage

QUICKSTART = Path(__file__).parents[2] / "quickstart.yaml"
STAGES = 4
NEW_TOKENS = 64
LONGEST_CONTEXT, LONGEST_CONTINUATION, LONGEST_TEXT = 128, 16, 512
"""Characters; contexts of 16 and more, continuations of one, texts of a quarter of theirs."""


def quickstart_model() -> StagedModel:
    """A new model of the quickstart's shapes: how fast it answers does not depend on training."""
    config = load_config(QUICKSTART).model
    layers = config.stage_partition(STAGES)

    def parameters(stage: int) -> Any:
        return nnx.to_pure_dict(nnx.state(create_stage(config, stage, layers, jax.random.key(0))))

    return StagedModel(config, [parameters(stage) for stage in range(STAGES)])


def requests_of(count: int) -> dict[str, list[Instance]]:
    """Draw so many requests of each kind, of random lengths."""
    random = np.random.default_rng(0)

    def text(least: int, most: int) -> str:
        return bytes(random.integers(97, 123, random.integers(least, most + 1))).decode()

    generated = {"until": [], "max_gen_toks": NEW_TOKENS}
    asked: dict[Any, Callable[[], tuple[Any, ...]]] = {
        "generate_until": lambda: (text(16, LONGEST_CONTEXT), generated),
        "loglikelihood": lambda: (text(16, LONGEST_CONTEXT), text(1, LONGEST_CONTINUATION)),
        "loglikelihood_rolling": lambda: (text(LONGEST_TEXT // 4, LONGEST_TEXT),),
    }
    return {
        kind: [Instance(kind, doc={}, arguments=draw(), idx=idx) for idx in range(count)]
        for kind, draw in asked.items()
    }


def measured(slots: int, count: int, turns: int) -> dict[str, dict[str, Any]]:
    """Seconds of each turn, by the kind of request; a first turn compiles, and does not count."""
    model = quickstart_model()
    ways = {own: HarnessModel(model, own) for own in (slots, 1)}
    results = {}
    for kind, asked in requests_of(count).items():
        seconds: dict[int, list[float]] = {own: [] for own in ways}
        for turn in range(turns + 1):
            answers = {}
            for own, harness in ways.items():
                start = time.perf_counter()
                answers[own] = getattr(harness, kind)(asked)
                if turn > 0:
                    seconds[own].append(time.perf_counter() - start)
            require_alike(kind, *answers.values())
        results[kind] = {
            "seconds": {str(own): [round(s, 4) for s in taken] for own, taken in seconds.items()},
            "requests_per_second": {
                str(own): round(count / statistics.median(taken), 2)
                for own, taken in seconds.items()
            },
            "times_as_fast": round(ratio(seconds[1], seconds[slots]), 2),
        }
    return results


def require_alike(kind: str, some: Sequence[Any], others: Sequence[Any]) -> None:
    """Refuse answers that are not the same within rounding.

    Raises:
        RuntimeError: if a text differs, or a log-likelihood by more than a thousandth of a nat.
    """
    for one, other in zip(some, others, strict=True):
        is_text = isinstance(one, str)
        if one != other if is_text else np.abs(np.subtract(one, other)).max() > 1e-3:
            raise RuntimeError(
                f"{kind} returns {one!r}, but {other!r} with another number of slots"
            )


def table(results: Mapping[str, Mapping[str, Any]], slots: int) -> str:
    """A line for each kind of request."""
    rows = [["requests per second", f"{slots} at once", "one at a time", "times as fast"]]
    for kind, own in results.items():
        rates = own["requests_per_second"]
        figures = [f"{rates[name]:.1f}" for name in (str(slots), "1")]
        rows.append([kind, *figures, f"{own['times_as_fast']:.2f}"])
    return aligned(rows, [0])


def main() -> int:
    """Parse the command line, measure and report; returns the exit code."""
    parser = reporting.parser("serving.many_requests", __doc__)
    numbers = {
        "slots": (DEFAULT_SLOTS, "slots"),
        "requests": (64, "requests of each kind"),
        "turns": (5, "counted turns"),
    }
    reporting.add_numbers(parser, numbers)
    return reporting.run(parser, _run)


def _run(arguments: argparse.Namespace) -> int:
    report = reporting.begun("serving.many_requests")
    results = measured(arguments.slots, arguments.requests, arguments.turns)
    own = {"slots": arguments.slots, "requests": arguments.requests, "new_tokens": NEW_TOKENS}
    report |= own | {"results": results}
    return reporting.finish(report, table(results, arguments.slots), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
