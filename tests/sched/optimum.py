"""The true optimum of small cases, found by a constraint solver, and random cases for it.

Everything that a plan decides is left to the solver: which node serves which stage, which way every
microbatch goes, and when each operation starts, so also orders in which a node waits on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from typing import Any, NamedTuple

import numpy as np
from ortools.sat.python import cp_model
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import NodePath, Operation, microbatch_chain
from skippipe_sched.problem.rules import SHARE_TOLERANCE, fair_shares, sequence_problem
from skippipe_sched.timing.averaging import quickest_averaging_s
from skippipe_sched.timing.simulate import simulate

# The solver counts in whole ticks, so every duration of a case must be a multiple of this.
TICK_S = 1 / 256
TICK_ROUNDING = 1e-6
# What a random case may have of nodes times visits: enough to be hard, and solved in seconds.
MOST_VISITS_BY_NODES = 60

Stages = tuple[tuple[int, ...], ...]
Order = tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True)
class Optimum:
    """A plan that no other beats, and its iteration_s [s]."""

    iteration_s: float
    stages: Stages
    paths: tuple[NodePath, ...]
    order: Order


class _Transfer(NamedTuple):
    """Which link a transfer takes, when its data are ready, when it leaves, how long it takes.

    With shared connections, `leaves` is when it is on the link, `hop` how long that is taken, and
    its node sends it from `begins` to `has_left`.
    """

    microbatch: int
    links: dict[tuple[int, int], cp_model.IntVar]
    ready: cp_model.IntVar
    leaves: cp_model.IntVar
    hop: cp_model.IntVar
    begins: cp_model.IntVar
    has_left: cp_model.IntVar


def optimum_s(case: Case) -> float:
    """The least iteration_s [s] over all plans of a small case."""
    return optimum(case).iteration_s


def optimum(case: Case) -> Optimum:
    """A best plan over all placements, paths of `case.path_length` and orders.

    Seconds for up to about 6 nodes and 4 microbatches.

    Raises:
        ValueError: if a duration is not a multiple of `TICK_S`, or no plan keeps the rules.
    """
    return _Model(case).solve()


def ticks(seconds: float) -> int:
    """A duration in whole ticks; `ValueError` if it is none."""
    count = round(seconds / TICK_S)
    if abs(count - seconds / TICK_S) > TICK_ROUNDING:
        raise ValueError(f"{seconds} s is no multiple of {TICK_S} s")
    return count


class _Model:
    """The decisions of a plan as variables of the solver, and what binds them.

    Everything about a microbatch is indexed by the position on its path, 0 on its data node.
    """

    def __init__(self, case: Case):
        self.case = case
        self.model = cp_model.CpModel()
        self.nodes = range(len(case.nodes))
        self.stages = range(len(case.stages))
        self.positions = range(case.path_length)
        self.sender = [place for place, count in enumerate(case.microbatches) for _ in range(count)]
        self.microbatches = range(len(self.sender))
        self.latest = self.horizon()
        self.iteration = self.moment()
        self.place()
        self.route()
        self.share()
        self.work()
        self.transfer()
        self.average()
        self.model.minimize(self.iteration)

    def horizon(self) -> int:
        """Ticks within which a best plan ends: those of another plan."""
        return ticks(make_plan(self.case, "balanced").predicted.iteration_s)

    def flag(self) -> cp_model.IntVar:
        return self.model.new_bool_var("")

    def moment(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.latest, "")

    def place(self) -> None:
        """Every stage gets a set of nodes; the data stage an order too where it matters."""
        self.chosen: list[dict[tuple[int, ...], cp_model.IntVar]] = []
        for stage, size in enumerate(self.case.stages):
            ordered = stage == 0 and len(set(self.case.microbatches)) > 1
            options = (permutations if ordered else combinations)(self.nodes, size)
            self.chosen.append({nodes: self.flag() for nodes in options})
            self.model.add_exactly_one(self.chosen[-1].values())
        for n in self.nodes:
            self.model.add_exactly_one(
                flag for options in self.chosen for nodes, flag in options.items() if n in nodes
            )

    def route(self) -> None:
        """Every microbatch visits stages in a sequence that keeps CC2, one replica of each."""
        model = self.model
        sequences = [
            (0, *rest)
            for rest in permutations(self.stages[1:], len(self.positions) - 1)
            if sequence_problem((0, *rest), self.case.rules) is None
        ]
        self.sequence = [{s: self.flag() for s in sequences} for _ in self.microbatches]
        # Of every microbatch and position: the stage there; the stage and node; the node.
        self.stage_at = self.each_position(lambda: [self.flag() for _ in self.stages])
        self.visit = self.each_position(
            lambda: {visit: self.flag() for visit in product(self.stages, self.nodes)}
        )
        self.node_at = self.each_position(lambda: [self.flag() for _ in self.nodes])
        for m, place in enumerate(self.sender):
            model.add_exactly_one(self.sequence[m].values())
            for p in self.positions:
                visits = self.visit[m][p]
                for stage in self.stages:
                    going = [flag for s, flag in self.sequence[m].items() if s[p] == stage]
                    model.add(self.stage_at[m][p][stage] == sum(going))
                    replicas = sum(visits[stage, n] for n in self.nodes)
                    model.add(self.stage_at[m][p][stage] == replicas)
                for n in self.nodes:
                    model.add(self.node_at[m][p][n] == sum(visits[s, n] for s in self.stages))
                for (stage, n), flag in visits.items():
                    serves = [f for nodes, f in self.chosen[stage].items() if n in nodes]
                    model.add(flag <= sum(serves))
            for n in self.nodes:
                own = [f for nodes, f in self.chosen[0].items() if nodes[place] == n]
                model.add(self.node_at[m][0][n] == sum(own))

    def each_position(self, make: Callable[[], Any]) -> list[list[Any]]:
        return [[make() for _ in self.positions] for _ in self.sender]

    def share(self) -> None:
        """CC3 and TC1: what each inner stage and each of its nodes is visited."""
        model = self.model
        if len(self.stages) == 1:
            return
        visits = len(self.sender) * (len(self.positions) - 1)
        least, rest = divmod(visits, len(self.stages) - 1)
        for stage in self.stages[1:]:
            own = [
                sum(self.visit[m][p][stage, n] for m in self.microbatches for p in self.positions)
                for n in self.nodes
            ]
            count = {number: self.flag() for number in ((least, least + 1) if rest else (least,))}
            model.add_exactly_one(count.values())
            for number, counted in count.items():
                model.add(sum(own) == number).only_enforce_if(counted)
                for nodes, chosen in self.chosen[stage].items():
                    for n, share in zip(
                        nodes, fair_shares(self.case, stage, nodes, number), strict=True
                    ):
                        low = math.floor(share + SHARE_TOLERANCE)
                        high = math.ceil(share - SHARE_TOLERANCE)
                        model.add(own[n] >= low).only_enforce_if(chosen, counted)
                        model.add(own[n] <= high).only_enforce_if(chosen, counted)

    def work(self) -> None:
        """Operations follow their chains, one at a time on a node and within its memory."""
        model = self.model
        self.runs = {kind: self.each_position(self.moment) for kind in "FLB"}
        self.ends = {kind: self.each_position(self.moment) for kind in "FLB"}
        machines: list[list[Any]] = [[] for _ in self.nodes]
        flights: list[list[Any]] = [[] for _ in self.nodes]
        for m, p in product(self.microbatches, self.positions):
            flight = self.moment()
            for kind in "FLB" if p == 0 else "FB":
                start, end, length = self.runs[kind][m][p], self.ends[kind][m][p], self.moment()
                durations = [
                    ticks(self.case.duration(kind, n, stage)) * flag
                    for (stage, n), flag in self.visit[m][p].items()
                ]
                model.add(length == sum(durations))
                for n in self.nodes:
                    here = self.node_at[m][p][n]
                    machines[n].append(
                        model.new_optional_interval_var(start, length, end, here, "")
                    )
                model.add(end == start + length)
            first, last = self.runs["F"][m][p], self.ends["B"][m][p]
            for n in self.nodes:
                here = self.node_at[m][p][n]
                flights[n].append(model.new_optional_interval_var(first, flight, last, here, ""))
        for n in self.nodes:
            model.add_no_overlap(machines[n])
            model.add_cumulative(flights[n], [1] * len(flights[n]), self.case.nodes[n].memory)
        for m, following in pairwise(self.microbatches):
            # Microbatches of one data node are alike: let them start in order.
            if self.sender[m] == self.sender[following]:
                model.add(self.ends["F"][m][0] <= self.runs["F"][following][0])

    def transfer(self) -> None:
        """From each operation to the next, there with activations and back with gradients."""
        transfers: list[_Transfer] = []
        for m in self.microbatches:
            if len(self.positions) == 1:
                self.model.add(self.ends["F"][m][0] <= self.runs["L"][m][0])
                self.model.add(self.ends["L"][m][0] <= self.runs["B"][m][0])
                continue
            for p in self.positions:
                last = p == self.positions[-1]
                q = 0 if last else p + 1
                links = self.links(m, p, q)
                reached = self.runs["L" if last else "F"][m][q]
                returned = self.ends["L" if last else "B"][m][q]
                back = {(b, a): flag for (a, b), flag in links.items()}
                transfers += [
                    self.one_transfer(m, "F", links, self.ends["F"][m][p], reached),
                    self.one_transfer(m, "B", back, returned, self.runs["B"][m][p]),
                ]
        self.transfers = transfers
        if self.case.contention != "none":
            for one, other in combinations(transfers, 2):
                if one.microbatch != other.microbatch:
                    self.follow(one, other)

    def links(self, m: int, p: int, q: int) -> dict[tuple[int, int], cp_model.IntVar]:
        """Which link leads from position p of a path to position q."""
        links = {link: self.flag() for link in permutations(self.nodes, 2)}
        for n in self.nodes:
            out = sum(flag for (a, _), flag in links.items() if a == n)
            into = sum(flag for (_, b), flag in links.items() if b == n)
            self.model.add(out == self.node_at[m][p][n])
            self.model.add(into == self.node_at[m][q][n])
        return links

    def one_transfer(
        self,
        m: int,
        kind: str,
        links: dict[tuple[int, int], cp_model.IntVar],
        ready: cp_model.IntVar,
        needed: cp_model.IntVar,
    ) -> _Transfer:
        if self.case.contention == "node":
            return self.one_of_connections(m, kind, links, ready, needed)
        hop = self.taking(links, lambda *link: self.case.hop_duration(kind, *link))
        leaves = ready
        if self.case.contention == "link":
            leaves = self.moment()
            self.model.add(leaves >= ready)
        self.model.add(needed >= leaves + hop)
        return _Transfer(m, links, ready, leaves, hop, leaves, leaves)

    def taking(
        self, links: dict[tuple[int, int], cp_model.IntVar], seconds: Callable[..., Any]
    ) -> cp_model.IntVar:
        """How long something takes on whichever link is chosen."""
        taken = self.moment()
        self.model.add(taken == sum(ticks(seconds(*link)) * flag for link, flag in links.items()))
        return taken

    def one_of_connections(
        self,
        m: int,
        kind: str,
        links: dict[tuple[int, int], cp_model.IntVar],
        ready: cp_model.IntVar,
        needed: cp_model.IntVar,
    ) -> _Transfer:
        """A transfer between nodes that are all elsewhere, so that it takes their connections."""
        case, size = self.case, self.case.hop_bytes(kind)
        latency_s, bandwidth = case.pair_matrices
        sending, receiving = case.connection_rates
        connection = self.taking(links, lambda a, _: size / sending[a])
        link = self.taking(links, lambda a, b: size / bandwidth[a, b])
        slower = self.taking(links, lambda a, b: size / min(bandwidth[a, b], receiving[b]))
        latency = self.taking(links, lambda a, b: latency_s[a, b])
        begins, has_left, leaves = self.moment(), self.moment(), self.moment()
        overhead = ticks(case.hop_overhead_s)
        self.model.add(begins >= ready)
        self.model.add(has_left == begins + overhead + connection)
        self.model.add(leaves >= begins + overhead)
        self.model.add(needed >= has_left + latency)
        self.model.add(needed >= leaves + slower + latency)
        return _Transfer(m, links, ready, leaves, link, begins, has_left)

    def follow(self, one: _Transfer, other: _Transfer) -> None:
        """On the same link, what became ready first goes first, and the other after it."""
        same, first = self.flag(), self.flag()
        for link in one.links:
            self.model.add_bool_or(~one.links[link], ~other.links[link], same)
        for order, before, after in ((first, one, other), (~first, other, one)):
            self.model.add(before.ready <= after.ready).only_enforce_if(same, order)
            self.model.add(before.leaves + before.hop <= after.leaves).only_enforce_if(same, order)
        if self.case.contention != "node":
            return
        # From the same node, over its connection.
        same, first = self.flag(), self.flag()
        for (source, _), flag in one.links.items():
            for (node, _), taken in other.links.items():
                if node == source:
                    self.model.add_bool_or(~flag, ~taken, same)
        for order, before, after in ((first, one, other), (~first, other, one)):
            self.model.add(before.ready <= after.ready).only_enforce_if(same, order)
            self.model.add(before.has_left <= after.begins).only_enforce_if(same, order)

    def average(self) -> None:
        """The iteration ends when the last stage has averaged, after its last backward."""
        for stage in self.stages:
            averaging = sum(
                ticks(quickest_averaging_s(self.case, stage, nodes)) * flag
                for nodes, flag in self.chosen[stage].items()
            )
            self.model.add(self.iteration >= averaging)
            for m, p in product(self.microbatches, self.positions):
                end = self.iteration >= self.ends["B"][m][p] + averaging
                self.model.add(end).only_enforce_if(self.stage_at[m][p][stage])
            if self.case.stages[stage] < 2 or self.case.contention != "node":
                continue
            # A ring begins when the connections of its nodes are empty.
            for sent, node in product(self.transfers, self.nodes):
                going = [flag for (source, _), flag in sent.links.items() if source == node]
                serving = [f for nodes, f in self.chosen[stage].items() if node in nodes]
                for flag, chosen in product(going, serving):
                    after = self.iteration >= sent.has_left + averaging
                    self.model.add(after).only_enforce_if(flag, chosen)

    def solve(self) -> Optimum:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 0
        if solver.solve(self.model) != cp_model.OPTIMAL:
            raise ValueError("no plan of this case keeps the rules")
        on = solver.boolean_value
        stages = tuple(
            next(nodes for nodes, flag in options.items() if on(flag)) for options in self.chosen
        )
        paths = tuple(
            tuple(next(n for n in self.nodes if on(flags[n])) for flags in positions)
            for positions in self.node_at
        )
        operations = [op for m, path in enumerate(paths) for op in microbatch_chain(m, path)]
        operations.sort(
            key=lambda op: solver.value(
                self.runs[op.kind][op.microbatch][paths[op.microbatch].index(op.node)]
            )
        )
        order = tuple(tuple(op for op in operations if op.node == n) for n in self.nodes)
        iteration_s = simulate(self.case, stages, paths, order).iteration_s
        assert ticks(iteration_s) == solver.value(self.iteration), "simulator and solver disagree"
        return Optimum(iteration_s, stages, paths, order)


def random_small_case(seed: int) -> Case:
    """A case of up to 6 nodes and 4 microbatches whose durations are whole ticks.

    Replicas, path length, microbatches, memory, swaps, speeds, links (slower one way than the
    other), bytes of activations, costs of stages and contention all vary, and in every other case
    bytes of gradients; some plan keeps the rules.
    """
    random = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    sizes = pick(
        [1, 1], [2, 1], [1, 2], [2, 2], [1, 1, 1], [2, 1, 1], [1, 2, 2], [2, 2, 1], [2, 2, 2],
        [1, 1, 1, 1], [2, 1, 1, 1], [1, 2, 1, 1], [2, 2, 1, 1], [3, 1, 1, 1], [1, 1, 1, 1, 1],
        [3, 2, 1], [2, 1, 1, 1, 1], [1, 3, 2], [3, 3],
    )  # fmt: skip
    path_length = int(random.integers(max(2, len(sizes) - 2), len(sizes) + 1))
    microbatches = pick(*_MICROBATCHES[sizes[0]])
    sent = microbatches if isinstance(microbatches, list) else [microbatches] * sizes[0]
    while path_length > 2 and sum(sizes) * sum(sent) * path_length > MOST_VISITS_BY_NODES:
        path_length -= 1
    places = [f"place {index}" for index in range(sum(sizes))]
    speeds = pick([0.5], [0.5], [0.25, 0.5, 1.0])
    given = {
        "nodes": [
            {"location": place, "forward_s": pick(*speeds), "memory": pick(1, 2, 3)}
            for place in places
        ],
        "locations": places,
        "links": [
            [a, b, 15.625 * int(random.integers(1, 40)), pick(0.125, 0.25, 0.5, 1.0)]
            for a, b in permutations(places, 2)
        ],
        "activation_bytes": pick(0, 2**24, 2**26),
        "stage_bytes": [3 * 2 ** int(random.integers(23, 27)) for _ in sizes],
        "forward_s": 0.5,
        "backward_ratio": pick(1.5, 2.0),
        "loss_ratio": pick(0.25, 0.5),
        "stage_cost": pick(1.0, [1.5, *[1.0] * (len(sizes) - 1)], [pick(1, 2) for _ in sizes]),
        "contention": pick("none", "link"),
        "stages": sizes,
        "path_length": path_length,
        "microbatches_per_data_node": microbatches,
        "memory": 1,
        "rules": {
            "max_swaps": pick(0, 1, 2),
            "max_swap_distance": pick(1, 2),
            # No less, so that the inner stages can be visited equally often.
            "max_jump": pick(len(sizes) - path_length, len(sizes)),
        },
    }
    if seed % 2 == 0:
        given["gradient_bytes"] = pick(0, 2**22, 2**25)
    return parse_case(given)


def with_connections(case: Case, seed: int) -> Case:
    """The case with connections that its nodes share, whose durations are whole ticks too."""
    random = np.random.default_rng(seed)
    rates = {"uplink_GiB_per_s": (0.0625, 0.125, 0.25), "downlink_GiB_per_s": (0.125, 0.5, 1.0)}
    nodes = [
        node | {key: float(random.choice(values)) for key, values in rates.items()}
        for node in case.source["nodes"]
    ]
    overhead_s = float(random.choice([0.0, 0.125]))
    changes = {"nodes": nodes, "contention": "node", "hop_overhead_s": overhead_s}
    return parse_case({**case.source, **changes})


_MICROBATCHES = {1: (1, 2, 3, 4), 2: (1, 2, [1, 2], [3, 1]), 3: (1, [2, 1, 1])}
