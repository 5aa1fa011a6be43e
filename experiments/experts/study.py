"""The claims of HDEE (arXiv 2502.19385) about ensembles of experts, tried on small models.

    python -m experiments.experts.study                    trains what is missing, prints and writes
    python -m experiments.experts.study --seeds 0          one seed: a third of the time

Each seed is an ensemble of its own: `skippipe experts experiments/experts/study.yaml --set seed=N`.
What is compared is paired by seed. A domain's perplexity is of held-out documents on which nothing
was chosen: lanes come from the loss of a probe on other held-out documents, as cached priors do;
rates and steps were set once, before anything was trained, and not changed after.

Ctrl-C stops, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from skippipe_sched.errors import run_command

from experiments.benchmarks.harness import reporting
from experiments.paper import intervals
from skippipe_jax.config.resume import json_digest
from skippipe_jax.experts import work
from skippipe_jax.experts.config import load_experts
from skippipe_jax.experts.picture import picture
from skippipe_jax.experts.tasks import Workspace
from skippipe_jax.storage.files import atomic_write

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "study.yaml"
RESULT = FOLDER / "results" / "study.json"
COMMAND = "python -m experiments.experts.study"
SEEDS = (0, 1, 2)
# So much worse that the others could not be told apart beside them in the picture.
FAR = ("dense_inference", "averaged")
MAIN = "posterior, cached prior"
HOMOGENEOUS = "homogeneous"
MEANS = ("mean", "inside", "outside")
# What is compared: an arm minus another; and ways in which the same experts are mixed.
ARMS = {
    "heterogeneous steps minus homogeneous": ("heterogeneous_steps", HOMOGENEOUS),
    "heterogeneous sizes minus homogeneous": ("heterogeneous_sizes", HOMOGENEOUS),
    "steps by measured difficulty minus homogeneous": ("by_difficulty", HOMOGENEOUS),
    "measured minus random lanes, steps": ("heterogeneous_steps", "random_lanes_steps"),
    "measured minus random lanes, sizes": ("heterogeneous_sizes", "random_lanes_sizes"),
    "homogeneous minus dense of equal training compute": (HOMOGENEOUS, "dense_training"),
    "homogeneous minus dense of equal inference compute": (HOMOGENEOUS, "dense_inference"),
    "homogeneous minus its averaged parameters": (HOMOGENEOUS, "averaged"),
}
WAYS = {
    "homogeneous minus its top-1": "top-1, cached prior",
    "cached minus uniform prior": "posterior, uniform prior",
    "posterior minus simple average": "simple average",
    "homogeneous minus each domain's own expert": "the domain's own expert",
}
COMPARED = {name: (arm, MAIN, other, MAIN) for name, (arm, other) in ARMS.items()} | {
    name: (HOMOGENEOUS, MAIN, HOMOGENEOUS, way) for name, way in WAYS.items()
}


def digest() -> str:
    """Of all that the study is told."""
    return json_digest([asdict(load_experts(CONFIG, [f"seed={seed}"])) for seed in SEEDS])


def trained(seed: int) -> dict[str, Any]:
    """What results.json of a seed holds; its runs are trained where they are missing."""
    config = load_experts(CONFIG, [f"seed={seed}"])
    print(f"seed {seed}", flush=True)
    return work.train(Workspace(config, Path(config.folder).absolute()))


def loss(result: Mapping[str, Any], arm: str, way: str, domain: str) -> float:
    """Loss [nats per byte] of an arm on a domain, its experts mixed in a way."""
    own = result["arms"][arm]
    return (own["ways"].get(way) or own)["loss"][domain]


def domains_of(result: Mapping[str, Any], *, outside: bool) -> list[str]:
    """The domains that experts were trained on, or the others."""
    inside = result["arms"][HOMOGENEOUS]["members"]
    return [name for name in result["arms"][HOMOGENEOUS]["loss"] if (name not in inside) == outside]


def figures_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is written of the results of all seeds."""
    compared: dict[str, dict[str, Any]] = {"inside": {}, "outside": {}}
    for where, own in compared.items():
        for name, (arm, way, other, other_way) in COMPARED.items():
            by_domain = {
                domain: [
                    loss(result, arm, way, domain) - loss(result, other, other_way, domain)
                    for result in results
                ]
                for domain in domains_of(results[0], outside=where == "outside")
                if "own expert" not in other_way or where == "inside"
            }
            if not by_domain:
                continue
            means = np.mean(list(by_domain.values()), axis=0).tolist()
            own[name] = intervals.figures({name: means})[name] | {
                "by_seed": [round(mean, 5) for mean in means],
                "by_domain": {key: round(float(np.mean(one)), 5) for key, one in by_domain.items()},
                "domains_better": sum(float(np.mean(one)) < 0 for one in by_domain.values()),
                "domains": len(by_domain),
            }
    return {
        "seeds": [result["seed"] for result in results],
        "unit": "nats per byte; " + intervals.HOW,
        "difficulty": [result["difficulty"] for result in results],
        "lanes": [result["arms"]["heterogeneous_steps"]["lanes"] for result in results],
        "random_lanes": [result["arms"]["random_lanes_steps"]["lanes"] for result in results],
        "arms": {arm: mean_of_arm(results, arm) for arm in results[0]["arms"]},
        "best": best_of(results),
        "compared": compared,
    }


def mean_of_arm(results: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    """Perplexities of an arm as results.json has them, means over seeds; and its compute."""

    def mean(values: list[float]) -> float:
        return round(float(np.mean(values)), 4)

    first = results[0]["arms"][arm]
    return {
        "domains": {
            domain: mean([math.exp(loss(one, arm, MAIN, domain)) for one in results])
            for domain in first["loss"]
        },
        **{key: mean([one["arms"][arm][key] for one in results]) for key in MEANS},
        **{key: first[key] for key in ("training_flops", "training_flops_with_seeds")},
    }


def best_of(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Which of the three arms of the paper has the lowest mean loss, by domain."""
    arms = (HOMOGENEOUS, "heterogeneous_steps", "heterogeneous_sizes")
    found: dict[str, dict[str, str]] = {}
    for where in ("inside", "outside"):
        for domain in domains_of(results[0], outside=where == "outside"):
            means = {
                arm: float(np.mean([loss(one, arm, MAIN, domain) for one in results]))
                for arm in arms
            }
            found.setdefault(where, {})[domain] = min(arms, key=lambda arm: means[arm])
    return found


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each comparison."""
    lines = [f"held-out loss [nats per byte], means over domains, seeds {figures['seeds']}:"]
    for where, compared in figures["compared"].items():
        lines.append(f"{where}:")
        lines += [
            f"  {name:50s} {intervals.with_ends(own)}; {intervals.by_seed(own['by_seed'])}; lower "
            f"in {own['domains_better']} of {own['domains']} domains"
            for name, own in compared.items()
        ]
    best = [arm for own in figures["best"].values() for arm in own.values()]
    lines.append(
        "lowest of the three arms: "
        + ", ".join(f"{arm} in {best.count(arm)}" for arm in dict.fromkeys(best))
        + f" of {len(best)} domains"
    )
    return "\n".join(lines)


def main() -> int:
    """Parse the command line, train, print and write; returns the exit code."""
    parser = reporting.documented_parser(COMMAND, __doc__)
    parser.add_argument(
        "--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS), help="(all)"
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="(%(default)s)")
    arguments = parser.parse_args()
    return run_command(lambda: _run(arguments), "stopped; run the same command to continue")


def _run(arguments: argparse.Namespace) -> int:
    results = [trained(seed) for seed in arguments.seeds]
    figures: dict[str, Any] = reporting.origin(COMMAND) | {"digest": digest()} | figures_of(results)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.output, json.dumps(figures, indent=1) + "\n")
    inside, outside = (domains_of(results[0], outside=where) for where in (False, True))
    near = {arm: own for arm, own in figures["arms"].items() if arm not in FAR}
    atomic_write(arguments.output.with_suffix(".svg"), picture(inside, outside, near))
    print(table(figures), arguments.output, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
