"""Traffic of the links in one iteration: bytes, and seconds in use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.averaging import all_reduce_bytes, best_ring, rings_of_iteration
from skippipe_sched.timing.timeline import Timeline

LinkEnd = TypeVar("LinkEnd", int, str)
# Uses of a link: activations and their gradients, or the ring of a stage.
LinkUse = Literal["pipeline", "averaging"]


@dataclass(frozen=True)
class Flow(Generic[LinkEnd]):
    """Traffic of one directed link in an iteration for one use.

    `source` and `target` are nodes, or locations. `busy_s` is the time during which a transfer is
    in progress; overlapping transfers count once.
    """

    source: LinkEnd
    target: LinkEnd
    use: LinkUse
    bytes: float
    busy_s: float


def link_traffic(plan: Plan, timeline: Timeline) -> list[Flow[int]]:
    """Sum bytes and busy seconds of every directed pair of nodes, the busiest first.

    The pipeline's are those of the timeline's transfers. In the averaging of a stage with n
    replicas each sends 2(n-1)/n of the stage's bytes to the next in the best ring; its link counts
    as busy for the time of these bytes and the latency of each step, even where it then waits for a
    slower link of the ring. In outer mode, an iteration has its mean share of the fragments'
    averaging: n - 1 messages each.

    Replicas of one stage never send each other activations, so each pair has one use.
    """
    return _summed(_sendings(plan, timeline), lambda node: node)


def location_traffic(plan: Plan, timeline: Timeline) -> list[Flow[str]]:
    """Sum as `link_traffic`, by directed pairs of locations; within one, from it to itself."""
    return _summed(_sendings(plan, timeline), lambda node: plan.case.nodes[node].location)


def wide_area_bytes(case: Case, flows: Iterable[Flow[int]]) -> float:
    """Count the bytes that are sent between locations."""
    return sum(
        flow.bytes
        for flow in flows
        if case.nodes[flow.source].location != case.nodes[flow.target].location
    )


class _Sending(NamedTuple):
    source: int
    target: int
    use: LinkUse
    bytes: float
    start_s: float
    end_s: float


def _sendings(plan: Plan, timeline: Timeline) -> Iterator[_Sending]:
    case = plan.case
    for sent in timeline.transfers:
        size = case.hop_bytes(sent.operation.kind)
        yield _Sending(sent.source, sent.target, "pipeline", size, sent.start_s, sent.end_s)
    latency, bandwidth = case.link_matrices
    rings = rings_of_iteration(case.averaging)
    share = rings.of_all_reduce * rings.number
    for averaging in timeline.averagings:
        ring = best_ring(case, averaging.stage, plan.stages[averaging.stage])
        if len(ring) < 2:
            continue
        steps = share * 2 * (len(ring) - 1)
        stage_bytes = case.stage_bytes[averaging.stage]
        size = steps / len(ring) * all_reduce_bytes(case.averaging, stage_bytes, len(ring))
        for link in zip(ring, [*ring[1:], ring[0]], strict=True):
            seconds = float(size / bandwidth[link] + steps * latency[link])
            start_s = averaging.start_s
            # A measured averaging may end before the case predicts that its links are free.
            end_s = min(start_s + seconds, averaging.end_s)
            yield _Sending(*link, "averaging", size, start_s, end_s)


def _summed(
    sendings: Iterable[_Sending], place_of: Callable[[int], LinkEnd]
) -> list[Flow[LinkEnd]]:
    groups: dict[tuple[LinkEnd, LinkEnd, LinkUse], list[_Sending]] = defaultdict(list)
    for sending in sendings:
        groups[place_of(sending.source), place_of(sending.target), sending.use].append(sending)
    flows = [
        Flow(*key, sum(sending.bytes for sending in group), _covered_s(group))
        for key, group in groups.items()
    ]
    return sorted(flows, key=lambda flow: (-flow.busy_s, flow.source, flow.target, flow.use))


def _covered_s(sendings: Sequence[_Sending]) -> float:
    covered_s, until_s = 0.0, 0.0
    for start_s, end_s in sorted((sending.start_s, sending.end_s) for sending in sendings):
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def link_name(case: Case, flow: Flow) -> str:
    """Name a link in words: node 3 (Iowa) → node 8 (Singapore), or only the locations."""
    places = (flow.source, flow.target)
    return " → ".join(
        f"node {place} ({case.nodes[place].location})" if isinstance(place, int) else place
        for place in places
    )
