"""What runs of the paper's campaign might have found."""

from __future__ import annotations

import math

from experiments.paper.summary import Summary


def made_up(loss: float, steps: int, stages: int = 6, gain: float = 0.05) -> Summary:
    """What a run might have found, with that loss at the end, and less by `gain` if scaled."""

    def spread(nats: float) -> dict[str, float]:
        own = math.exp(nats)
        return {
            "perplexity": own,
            "deviation": 0.2,
            "least": 0.9 * own,
            "greatest": 1.1 * own,
            "loss": nats,
        }

    counts = range(1, stages + 1)
    return Summary(
        digest="",
        steps=steps,
        tokens_per_iteration=3840,
        curve=[[step, 50.0 * step, loss + 50 / step] for step in range(20, steps + 1, 20)],
        simulated_s=50.0 * steps,
        loss=loss,
        loss_scaled=loss - gain,
        keep={str(n): spread(loss + 0.1 * (stages - n)) for n in counts},
        keep_scaled={str(n): spread(loss - gain + 0.1 * (stages - n)) for n in counts},
        early_exit=[loss + 0.1 * (stages - n) for n in counts],
        swaps=spread(loss + 0.01),
        minutes=5.0,
        command="",
        commit="",
        machine={},
    )
