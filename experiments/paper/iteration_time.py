"""Seconds of one iteration: every method on every case of the paper, and what is behind the gain.

Simulated under our timing model, averaging included, several seeds:

runs             every plan: its seconds and bytes, and the processor time that found it
cases            medians over the seeds, by case and method; `datacentre` is cluster1 with hops that
                 cost only latency and bytes, the case in which skipping has least to win
published        the published plan and full pipeline of gcp20
gain             planning apart from skipping, in both orders: what each brings depends on that
correlation      of the ranks of plans by seconds and by bytes between locations
in_flight        how many microbatches a node may hold, a limit that full pipelines suffer from more
search           what a longer search brings, and how many iterations repay it

Measured on a network shaped by `tc`, by
`experiments.benchmarks.network.wan`, whose committed figures are taken as they are:

shaped_network   predicted and measured seconds by method
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy.stats import spearmanr
from skippipe_sched.figures.flows import link_traffic, wide_area_bytes
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import Plan, parse_plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline

from experiments.paper import cases, drawing
from skippipe_jax.storage.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "iteration_time"
SHAPED_NETWORK = Path(__file__).parents[1] / "results" / "wan_epyc_2_cores.json"
YARDSTICK = "gcp20"
DATACENTRE = "datacentre"
# How many microbatches a node may hold in the paper's cases.
MEMORY = 3


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    A budget pays for what two cores of the machine of the committed results do in about 0.6 of so
    many seconds.
    """

    cases: tuple[str, ...]
    seeds: int
    budget_s: float
    in_flight_cases: tuple[str, ...]
    in_flight: tuple[int, ...]
    in_flight_seeds: int
    budgets_s: tuple[float, ...]


FULL = Scope(
    cases=(*cases.CASES, DATACENTRE),
    seeds=3,
    budget_s=5.0,
    in_flight_cases=(YARDSTICK, "cluster1", DATACENTRE),
    in_flight=(3, 6, 12),
    in_flight_seeds=2,
    budgets_s=(0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
QUICK = Scope(
    cases=(YARDSTICK, "cluster1", DATACENTRE),
    seeds=1,
    budget_s=1.0,
    in_flight_cases=(YARDSTICK, DATACENTRE),
    in_flight=(3, 12),
    in_flight_seeds=1,
    budgets_s=(0.25, 1.0, 4.0),
)
IN_FLIGHT_METHODS = ("full", "full-joint", "joint")
# The method whose search is watched, and the one that needs none worth speaking of.
SEARCHING, INSTANT = "joint", "balanced"


@dataclass(frozen=True)
class Job:
    """One plan to be made, for a case whose nodes hold up to `memory` microbatches."""

    case: str
    method: str
    seed: int
    budget_s: float
    memory: int = MEMORY

    @property
    def name(self) -> str:
        """A name for files, and for people who wait."""
        memory = "" if self.memory == MEMORY else f"_memory_{self.memory}"
        return f"{self.case}{memory}_{self.method}_seed_{self.seed}_{self.budget_s:g}_s"


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Plan and simulate everything; plans are kept below `folder` and not made again."""
    scope = QUICK if quick else FULL
    folder = folder / NAME
    folder.mkdir(parents=True, exist_ok=True)
    # Compiles what is not yet compiled, so that no search counts it.
    make_plan(cases.load(YARDSTICK), SEARCHING, Search(budget_s=0.01))
    jobs = dict.fromkeys(chain(*jobs_of(scope)))
    return figures_of_runs(scope, {job: _row(job, folder) for job in jobs})


def figures_of_runs(scope: Scope, row_of: Mapping[Job, dict[str, Any]]) -> dict[str, Any]:
    """Gather what is written, from the figures of each plan."""
    rows, in_flight, searches = ([row_of[job] for job in part] for part in jobs_of(scope))
    medians = {case: _medians(_of_case(rows, case)) for case in scope.cases}
    shaped = json.loads(SHAPED_NETWORK.read_text(encoding="utf-8"))
    measured_s = {row["method"]: row["measured_s"] for row in shaped["methods"]}
    of_methods = {
        case: {method: median["iteration_s"] for method, median in of_case.items()}
        for case, of_case in medians.items()
    }
    return {
        "scope": asdict(scope),
        "cases": medians,
        "published": _published(),
        "gain": {
            case: gain(seconds)
            for case, seconds in (of_methods | {"shaped network": measured_s}).items()
        },
        "correlation": {case: correlation(_of_case(rows, case)) for case in scope.cases},
        "in_flight": _in_flight_medians(in_flight),
        "search": _search_costs(searches, rows),
        "shaped_network": {
            "source": "experiments/results/wan_epyc_2_cores.json, measured before by "
            "python -m experiments.benchmarks.network.wan",
            "machine": shaped["machine"],
            "methods": [
                {key: row[key] for key in ("method", "predicted_s", "measured_s", "bytes_sent")}
                for row in shaped["methods"]
            ],
        },
        "runs": list(row_of.values()),
    }


def jobs_of(scope: Scope) -> tuple[list[Job], list[Job], list[Job]]:
    """List the plans of the comparison, those of limits in flight, and those of longer searches."""
    compared = product(scope.cases, COLOURS, range(scope.seeds))
    limited = product(
        scope.in_flight_cases, scope.in_flight, IN_FLIGHT_METHODS, range(scope.in_flight_seeds)
    )
    searches = product(scope.budgets_s, range(scope.seeds))
    return (
        [Job(*own, scope.budget_s) for own in compared],
        [Job(case, method, seed, scope.budget_s, memory) for case, memory, method, seed in limited],
        [Job(YARDSTICK, SEARCHING, seed, budget_s) for budget_s, seed in searches],
    )


def case_of(job: Job) -> Case:
    """The case that a job plans for."""
    if job.case == DATACENTRE:
        case, changes = cases.load("cluster1"), {"hop_overhead_s": 0.0}
    else:
        case, changes = cases.load(job.case), {}
    return parse_case({**case.source, **changes, "memory": job.memory})


def _row(job: Job, folder: Path) -> dict[str, Any]:
    """The figures of a job's plan, which is taken from `folder` if it is there."""
    path = folder / f"{job.name}.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        plan = parse_plan(kept["plan"])
    else:
        start_s = time.process_time()
        # Without a clock, every machine finds the same plan.
        plan = make_plan(case_of(job), job.method, Search(job.seed, job.budget_s, timed=False))
        kept = {
            "processor_s": round(time.process_time() - start_s, 3),
            "plan": plan.to_json(),
        }
        atomic_write(path, json.dumps(kept))
    row = asdict(job) | {"processor_s": kept["processor_s"]}
    row |= figures_of(plan, simulate_plan(plan))
    print(f"{NAME}: {job.name}: {row['iteration_s']:.2f} s", flush=True)
    return row


def figures_of(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """What one iteration of a plan takes [s], and what it sends from location to location [B]."""
    flows = link_traffic(plan, timeline)
    sent = {
        use: wide_area_bytes(plan.case, [flow for flow in flows if flow.use == use])
        for use in ("pipeline", "averaging")
    }
    assert plan.predicted.lower_bound_s is not None
    return {
        "path_length": len(plan.microbatches[0]),
        "iteration_s": round(timeline.iteration_s, 4),
        "pipeline_s": round(timeline.pipeline_s, 4),
        "averaging_s": round(timeline.averaging_s, 4),
        "lower_bound_s": round(plan.predicted.lower_bound_s, 4),
        "pipeline_bytes": round(sent["pipeline"]),
        "averaging_bytes": round(sent["averaging"]),
    }


def _published() -> dict[str, Any]:
    """What was published for gcp20, under our timing model."""
    plan, full = cases.published_plan(), cases.published_full_pipeline()
    return {
        "skippipe": figures_of(plan, simulate_plan(plan)),
        "full": {
            "iteration_s": round(full.iteration_s, 4),
            "pipeline_s": round(full.pipeline_s, 4),
            "averaging_s": round(full.averaging_s, 4),
        },
    }


def _of_case(rows: Sequence[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["case"] == case]


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over the seeds, by method; `least_s` and `most_s` are of iteration_s."""
    of_methods: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_methods[row["method"]].append(row)
    names = ("iteration_s", "pipeline_s", "averaging_s", "lower_bound_s", "processor_s")
    names += ("pipeline_bytes", "averaging_bytes")
    full_s = _median(of_methods["full"], "iteration_s")
    return {
        method: {name: _median(own, name) for name in names}
        | {
            "least_s": min(row["iteration_s"] for row in own),
            "most_s": max(row["iteration_s"] for row in own),
            "of_full": round(_median(own, "iteration_s") / full_s, 4),
        }
        for method, own in of_methods.items()
    }


def _median(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def gain(seconds: Mapping[str, float]) -> dict[str, Any]:
    """What planning and skipping bring from `full` to `joint`, given seconds by method.

    Planning first: the same search finds full paths (`full-joint`), then may skip (`joint`).
    Skipping first: the paper's search finds partial paths on DT-FM's placement (`skippipe`), then
    all is searched together. The two orders share out differently what comes from both at once.
    """
    whole_s = seconds["full"] - seconds["joint"]

    def split(planning_s: float) -> dict[str, float]:
        return {
            "planning_s": round(planning_s, 4),
            "skipping_s": round(whole_s - planning_s, 4),
            "planning_share": round(planning_s / whole_s, 4),
        }

    return {
        "full_s": seconds["full"],
        "joint_s": seconds["joint"],
        "of_full": round(seconds["joint"] / seconds["full"], 4),
        "planning_first": split(seconds["full"] - seconds["full-joint"]),
        "skipping_first": split(seconds["skippipe"] - seconds["joint"]),
    }


def correlation(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Correlate by ranks the seconds of an iteration with its bytes between locations.

    Of all plans, and of those that skip alone: that full paths send more and take longer is one
    thing, whether bytes tell a good partial plan from a bad one another. None where bytes or
    seconds are all the same, as bytes between locations in one location.
    """
    longest = max(row["path_length"] for row in rows)
    skipping = [row for row in rows if row["path_length"] < longest]
    return {"all": _correlation(rows), "skipping": _correlation(skipping)}


def _correlation(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds, sent = [row["iteration_s"] for row in rows], [_bytes(row) for row in rows]
    found = None
    if len(set(sent)) > 1 < len(set(seconds)):
        rank: Any = spearmanr(sent, seconds)
        found = round(float(rank.statistic), 4)
    return {"plans": len(rows), "bytes": {"spearman": found}}


def _bytes(row: Mapping[str, Any]) -> float:
    return row["pipeline_bytes"] + row["averaging_bytes"]


def _in_flight_medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, int], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        of_methods = groups.setdefault((row["case"], row["memory"]), defaultdict(list))
        of_methods[row["method"]].append(row)
    return [
        {"case": case, "memory": memory}
        | {f"{method}_s": _median(own, "iteration_s") for method, own in of_methods.items()}
        | {
            "of_full": round(
                _median(of_methods["joint"], "iteration_s")
                / min(_median(of_methods[name], "iteration_s") for name in ("full", "full-joint")),
                4,
            )
        }
        for (case, memory), of_methods in groups.items()
    ]


def _search_costs(
    searches: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Processor seconds of search against seconds of an iteration, and what repays the search.

    `repaid_after` is in iterations, against the plan that needs hardly any search, and
    `repaid_after_more` against the next shorter search; None where nothing was gained.
    """
    instant = [r for r in rows if (r["case"], r["method"]) == (YARDSTICK, INSTANT)]
    first = {name: _median(instant, name) for name in ("processor_s", "iteration_s")}
    budgets: list[dict[str, Any]] = []
    for budget_s in dict.fromkeys(row["budget_s"] for row in searches):
        own = [row for row in searches if row["budget_s"] == budget_s]
        found = {name: _median(own, name) for name in ("processor_s", "iteration_s")}
        budgets.append(
            {"budget_s": budget_s}
            | found
            | {
                "repaid_after": _repaid_after(found, first),
                "repaid_after_more": _repaid_after(found, budgets[-1] if budgets else first),
            }
        )
    return {"case": YARDSTICK, "method": SEARCHING, INSTANT: first, "budgets": budgets}


def _repaid_after(longer: Mapping[str, float], shorter: Mapping[str, float]) -> float | None:
    saved_s = shorter["iteration_s"] - longer["iteration_s"]
    if saved_s <= 0:
        return None
    return round(max(0.0, longer["processor_s"] - shorter["processor_s"]) / saved_s, 2)


# The methods that are compared.
COLOURS = {
    "full": "#5f6b7a",
    "full-joint": "#9aa5b1",
    "dtfm-skip": "#c9843b",
    "balanced": "#dcc26a",
    "skippipe-no-tc2": "#7fb7a6",
    "skippipe": "#2f8f7a",
    "joint": "#2f5fa8",
}
MARKERS = ("o", "s", "^", "D", "v", "P")
GOOD, OTHER, DARK = "#2f5fa8", "#c9843b", "#171b22"
# Random paths now and then cross the slowest link: their bars are cut, and their figure told.
HIGHEST_BAR = 1.45
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}


def draw(figures: dict[str, Any]) -> Figure:
    """All of it in one picture."""
    figure, [[of_cases], [of_gain, of_bytes], [of_limits, of_search]] = drawing.panels(
        (1, 2, 2), 4.4, 4.0, 3.8
    )
    _draw_cases(of_cases, figures["cases"])
    _draw_gain(of_gain, figures["gain"])
    _draw_bytes(of_bytes, figures)
    _draw_in_flight(of_limits, figures["in_flight"])
    _draw_search(of_search, figures["search"])
    return figure


def _draw_cases(axes: Axes, of_cases: Mapping[str, Any]) -> None:
    width = 0.8 / len(COLOURS)
    for place, (method, colour) in enumerate(COLOURS.items()):
        for number, of_methods in enumerate(of_cases.values()):
            own, full_s = of_methods[method], of_methods["full"]["iteration_s"]
            x = number + (place - (len(COLOURS) - 1) / 2) * width
            height, pipeline = own["of_full"], own["pipeline_s"] / full_s
            label = method if number == 0 else None
            axes.bar(x, min(height, HIGHEST_BAR), width, color=colour, alpha=0.45)
            axes.bar(x, min(pipeline, HIGHEST_BAR), width, color=colour, label=label)
            if height > HIGHEST_BAR:
                axes.text(x, HIGHEST_BAR + 0.02, f"{height:.1f}", ha="center", fontsize=8)
                continue
            axes.hlines(own["lower_bound_s"] / full_s, x - width / 2, x + width / 2, DARK)
            axes.vlines(x, own["least_s"] / full_s, own["most_s"] / full_s, DARK, linewidth=1)
    axes.set_xticks(range(len(of_cases)), list(of_cases))
    axes.set_ylim(0, HIGHEST_BAR + 0.1)
    axes.set_ylabel("iteration, share of full")
    axes.set_title(
        "Simulated seconds of an iteration as a share of DT-FM's full pipeline "
        "(pale: averaging after it; line: lower bound)"
    )
    axes.legend(ncols=len(COLOURS), loc="upper center", bbox_to_anchor=(0.5, -0.07))


def _draw_gain(axes: Axes, of_cases: Mapping[str, Any]) -> None:
    """Bars one after the other; one that is a loss goes to the left of zero."""
    colours = {"planning": OTHER, "skipping": GOOD}
    for number, own in enumerate(of_cases.values()):
        for aside, *parts in ((-0.18, "planning", "skipping"), (0.18, "skipping", "planning")):
            order, end = f"{parts[0]}_first", 0.0
            for part in parts:
                size = own[order][f"{part}_s"] / own["full_s"]
                label = part if number == 0 and aside < 0 else None
                left = end if size > 0 else 0.0
                axes.barh(number + aside, size, 0.36, left=left, color=colours[part], label=label)
                end += max(size, 0.0)
    axes.set_yticks(range(len(of_cases)), list(of_cases))
    axes.invert_yaxis()
    axes.axvline(0, color=DARK, linewidth=0.8)
    axes.set_xlabel("seconds saved, share of full")
    axes.set_title(
        "Where joint's gain comes from\n(upper bar: planning first; lower: skipping first)"
    )
    axes.legend(ncols=2, **BELOW)


def _draw_bytes(axes: Axes, figures: Mapping[str, Any]) -> None:
    far_apart = [
        case
        for case, own in figures["correlation"].items()
        if own["all"]["bytes"]["spearman"] is not None
    ]
    for marker, case in zip(MARKERS, far_apart, strict=False):
        full = figures["cases"][case]["full"]
        for row in figures["runs"]:
            compared = case, MEMORY, figures["scope"]["budget_s"]
            if (row["case"], row["memory"], row["budget_s"]) == compared:
                x, y = _bytes(row) / _bytes(full), row["iteration_s"] / full["iteration_s"]
                axes.scatter(x, y, s=22, marker=marker, color=COLOURS[row["method"]], alpha=0.85)
        ranks = [own["bytes"]["spearman"] for own in figures["correlation"][case].values()]
        told = ", ".join("none" if rank is None else f"{rank:.2f}" for rank in ranks)
        axes.scatter([], [], s=22, marker=marker, color="#5f6b7a", label=f"{case}: {told}")
    drawing.plain_log(axes, "y", (0.4, 0.6, 0.8, 1, 1.5, 2, 3, 4, 6, 8))
    axes.set_xlabel("bytes between locations, share of full")
    axes.set_ylabel("iteration, share of full")
    axes.set_title(
        "Bytes between locations, averaging included\n"
        "(rank correlation of all plans, of those that skip)"
    )
    axes.legend(ncols=2, **BELOW)


def _draw_in_flight(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    limits = list(dict.fromkeys(row["memory"] for row in rows))
    of_cases = list(dict.fromkeys(row["case"] for row in rows))
    width = 0.8 / len(of_cases)
    for place, (case, colour) in enumerate(zip(of_cases, (GOOD, OTHER, "#7fb7a6"), strict=False)):
        own = [row["of_full"] for row in rows if row["case"] == case]
        middles = [n + (place - (len(of_cases) - 1) / 2) * width for n in range(len(limits))]
        bars = axes.bar(middles, own, width, color=colour, label=case)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(limits)), [str(limit) for limit in limits])
    axes.set_ylim(0, 1)
    axes.set_xlabel("microbatches that a node may hold")
    axes.set_ylabel("joint, share of the best full pipeline")
    axes.set_title("With room for more microbatches,\nfull pipelines catch up")
    axes.legend(ncols=3, loc="upper left")


def _draw_search(axes: Axes, search: Mapping[str, Any]) -> None:
    budgets, instant = search["budgets"], search[INSTANT]
    seconds = [row["processor_s"] for row in budgets]
    axes.plot(seconds, [row["iteration_s"] for row in budgets], marker="o", color=GOOD)
    first = instant["processor_s"], instant["iteration_s"]
    axes.plot(*first, "s", color=COLOURS[INSTANT])
    axes.annotate(INSTANT, first, textcoords="offset points", xytext=(8, -3))
    for row in budgets:
        if row["repaid_after_more"] is not None:
            place = row["processor_s"], row["iteration_s"]
            told = f"{row['repaid_after_more']:.1f}"
            axes.annotate(told, place, textcoords="offset points", xytext=(0, 8), ha="center")
    drawing.plain_log(axes, "x", (0.5, 1, 2, 5, 10, 20, 50))
    axes.set_ylim(0, 1.15 * instant["iteration_s"])
    axes.set_xlabel("processor seconds of search (two threads)")
    axes.set_ylabel("seconds of an iteration")
    axes.set_title(
        f"{search['method']} on {search['case']} searching longer\n"
        "(figures: iterations that repay the longer)"
    )
