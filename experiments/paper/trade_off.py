"""Where skipping pays: held-out loss after equal time, against the share of stages skipped.

An iteration that skips is shorter, so there are more of them in the same time; how many more
depends on the network. For each share there is a run with as many iterations as the control and
one with as many as take its time in 12 regions. The loss after another number of iterations, each
with a learning rate that falls to its end, lies on the line through the two against the logarithm
of that number. So it does for a smaller model that is trained in full: whoever skips to save time
could as well train that. An arm is compared with the control, and with that model, over the seeds
that both have; the difference comes with its interval (see `intervals`), which knows nothing of how
straight the line is. What skips is compared as it was trained and with scaled branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper import drawing, intervals, plans
from experiments.paper.campaign import Campaign, runs_of
from experiments.paper.drawing import BLACK, BLUE, GREEN, VERMILION
from experiments.paper.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "trade_off"

SKIPPED = {"skip25": 1 / 4, "skip33": 1 / 3, "skip50": 1 / 2}
# Has as many blocks as a path visits with a third skipped.
SMALLER, WORTH_SKIPPING = "small67", SKIPPED["skip33"]
OTHERS = (*SKIPPED, SMALLER)
ARMS = ("full", *OTHERS, *(f"{name}_equal_time" for name in OTHERS))
COLORS = (BLUE, VERMILION, GREEN)
ASIDE = 0.008
PLAIN, SCALED = WAYS = ("loss", "loss_scaled")
BUDGET_S, QUICK_BUDGET_S = 30.0, 0.3


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Seconds of an iteration for each share on each network, and the loss after equal time."""
    found = Campaign(folder, quick).train(runs_of(ARMS, quick))
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    seconds = {
        network: {
            name: plans.iteration_s(name, network, budget_s, folder / "plans")
            for name in ("full", *OTHERS)
        }
        for network in plans.NETWORKS
    }
    return figures_of(found, seconds)


def figures_of(
    found: dict[str, list[Summary]], seconds: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Return what is drawn, from summaries of each arm's seeds and seconds by network and plan."""
    [control] = {seed.steps for seed in found["full"]}
    alike = {name: found[name] for name in ("full", *OTHERS)}
    return {
        "intervals": intervals.HOW,
        "control": {"iterations": control},
        "equal_data": _compared(
            {way: {name: _losses(own, way) for name, own in alike.items()} for way in WAYS}
        ),
        "iteration_s": seconds,
        "equal_time": {
            network: _of_network(found, control, of_plan) for network, of_plan in seconds.items()
        },
    }


def _of_network(
    found: dict[str, list[Summary]], control: int, of_plan: dict[str, float]
) -> dict[str, Any]:
    """What is found where iterations of the plans take so many seconds."""
    iterations = {name: control * of_plan["full"] / of_plan[name] for name in OTHERS}
    longer = {name: found[f"{name}_equal_time"] for name in OTHERS}

    def losses(way: str) -> dict[str, list[float]]:
        return {"full": _losses(found["full"], way)} | {
            name: _losses_after(iterations[name], found[name], longer[name], way) for name in OTHERS
        }

    return {
        "iterations": iterations,
        "beyond_what_was_trained": {
            name: iterations[name] > 1.02 * longer[name][0].steps for name in OTHERS
        },
    } | _compared({way: losses(way) for way in WAYS})


def _compared(losses: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Losses of seeds, as trained and scaled, and how much more they are than those of others."""

    def minus(control: str) -> dict[str, dict[str, dict[str, Any]]]:
        # Scales change nothing in what was trained in full.
        return {
            way: intervals.minus(
                {arm: own for arm, own in of_way.items() if arm != control}, losses[PLAIN][control]
            )
            for way, of_way in losses.items()
        }

    return losses | {"minus_control": minus("full"), "minus_smaller": minus(SMALLER)}


def _losses(seeds: Sequence[Summary], way: str) -> list[float]:
    return [seed.loss if way == PLAIN else seed.loss_scaled for seed in seeds]


def _losses_after(
    iterations: float, shorter: Sequence[Summary], longer: Sequence[Summary], way: str
) -> list[float]:
    """The loss of each seed after a run of so many iterations, on the line through two runs."""
    reach = math.log(longer[0].steps / shorter[0].steps)
    share = math.log(iterations / shorter[0].steps) / reach
    pairs = zip(_losses(shorter, way), _losses(longer, way), strict=False)
    return [first + (second - first) * share for first, second in pairs]


def draw(figures: dict[str, Any]) -> Figure:
    """Loss minus the control's against the share skipped, at equal data and time; and the pace."""
    figure, [(plain, scaled, pace)] = drawing.panels(3, 4.4)
    for axes, way in ((plain, PLAIN), (scaled, SCALED)):
        axes.axhline(0.0, color=BLACK, linewidth=0.8)
        alike = figures["equal_data"]["minus_control"][way]
        _against_share(axes, alike, {}, "grey", "--", "equal data")
        networks = zip(figures["equal_time"].items(), COLORS, strict=True)
        for number, ((network, own), color) in enumerate(networks, start=1):
            minus, beyond = own["minus_control"][way], own["beyond_what_was_trained"]
            aside = number * ASIDE
            _against_share(axes, minus, beyond, color, "-", f"equal time, {network}", aside)
        axes.plot([], [], "*", color="grey", markersize=9, label="8 blocks, trained in full")
        axes.set_ylabel("held-out loss minus the full pipeline's, nats per byte")
    limits = [*plain.get_ylim(), *scaled.get_ylim()]
    for axes in (plain, scaled):
        axes.set_ylim(min(limits), max(limits))
    plain.set_title("Below 0, skipping pays")
    scaled.set_title("The same, branches scaled")
    for own, color in zip(figures["equal_time"].values(), COLORS, strict=True):
        more = [own["iterations"][name] / figures["control"]["iterations"] for name in SKIPPED]
        pace.plot([0, *SKIPPED.values()], [1.0, *more], "o-", color=color, markersize=4)
    pace.set_title("What skipping saves")
    pace.set_ylabel("iterations in the time of one full iteration")
    pace.set_ylim(bottom=0.9)
    for axes in (plain, scaled, pace):
        axes.set_xlabel("share of the stages skipped")
        axes.set_xticks([0, *SKIPPED.values()], ["0", "1/4", "1/3", "1/2"])
    figure.legend(*plain.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _against_share(
    axes: Any,
    minus: dict[str, dict[str, Any]],
    beyond: dict[str, bool],
    color: str,
    style: str,
    label: str,
    aside: float = 0.0,
) -> None:
    """A line through the shares with bars for intervals, and a star for the smaller model.

    What lies beyond the runs that were trained is hollow. Points are drawn `aside` of their share,
    so that bars do not cover each other.
    """
    shares = [share + aside for share in SKIPPED.values()]
    axes.plot([0, *shares], [0, *(minus[name]["mean"] for name in SKIPPED)], style,
              color=color, linewidth=1.2, label=label)  # fmt: skip
    for name, share, mark, size in (
        *((name, share, "o", 5) for name, share in zip(SKIPPED, shares, strict=True)),
        (SMALLER, WORTH_SKIPPING + aside, "*", 9),
    ):
        own, face = minus[name], "white" if beyond.get(name) else color
        if own["low"] is not None:
            axes.vlines([share], own["low"], own["high"], color=color, linewidth=1.0, alpha=0.7)
        axes.plot([share], [own["mean"]], mark, color=color, mfc=face, markersize=size)
