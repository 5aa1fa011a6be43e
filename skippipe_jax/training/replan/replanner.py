"""The leader looks for a better plan while all train on by the quick one, and proposes it.

It searches when the hosts have changed, and where `replan.drift` is given, when iterations take
other than predicted for several of them; then nodes count as quick as they were measured to be.
Links are not measured while a run trains.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from skippipe_sched.problem.plan import Plan, parse_plan

from skippipe_jax import log
from skippipe_jax.cluster.agreement import hear, tell
from skippipe_jax.cluster.group import Group
from skippipe_jax.config import Config
from skippipe_jax.config.resume import digest
from skippipe_jax.connections.links import MESSAGE_CHARACTERS
from skippipe_jax.consensus.generations import Wish
from skippipe_jax.models.footprint import copied_bytes
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.replan.candidates import (
    busy_seconds,
    cases_to_search,
    has_drifted,
    keeps_data_hosts,
    pays_off,
    placement_of,
    recalibrated,
)
from skippipe_jax.training.replan.planner_process import PlanSearch, WarmPlanner
from skippipe_jax.training.report import SessionPlan

# Of so many iterations the median is compared with what was predicted.
SEVERAL = 8

# What is told besides a plan in the message that tells it.
ROOM_CHARACTERS = 1 << 10


class SharedPlans:
    """The plan of each generation that goes on by one that was searched for, as hosts know it."""

    def __init__(self):
        """Know none."""
        self._plans: dict[str, Plan] = {}

    def keep(self, plan: Plan) -> str | None:
        """Know a plan, and return its digest; None for one that is too large to be told."""
        packed = _packed(plan)
        if len(packed) > MESSAGE_CHARACTERS - ROOM_CHARACTERS:
            return None
        name = digest(plan.to_json())
        self._plans[name] = _unpacked(packed)  # As all others get it.
        return name

    @property
    def names(self) -> list[str]:
        """The digests of those that are known here."""
        return [*self._plans]

    def fetch(self, group: Group, agreed: SessionPlan) -> Plan | None:
        """Return the plan of a group's generation; hosts that know it send it to the others.

        All hosts of the group call this together. None where the generation has none, or nobody who
        is left knows it: they then go on by the quick plan.
        """
        name, source = group.generation.plan, agreed.plan_source
        if not name or not agreed.is_plan_known:
            return None
        if group.index == source:
            tell(group, "found_plan", lambda: _packed(self._plans[name]))
        if name not in self._plans:
            assert source is not None, "another host knows it"
            plan = _unpacked(hear(group, "found_plan", [source], group.timeout_s)[source])
        else:
            plan = self._plans[name]
        self._plans = {name: plan}
        return plan


def _packed(plan: Plan) -> str:
    return base64.b64encode(zlib.compress(json.dumps(plan.to_json()).encode())).decode()


def _unpacked(packed: str) -> Plan:
    return parse_plan(json.loads(zlib.decompress(base64.b64decode(packed))))


class Replanner(Callback):
    """Searches as long as a generation lasts, on the leader, which may take what is found."""

    def __init__(
        self,
        config: Config,
        group: Group,
        plans: SharedPlans,
        standing: Plan,
        own: Plan,
        host_of: Sequence[int],
        planner: WarmPlanner,
        wish: Callable[[Wish], object],
    ):
        """Search once training begins, if `standing` is a quick plan, and `wish` for a better one.

        `own` is the run's own plan, whose nodes are served by the hosts `host_of`.
        """
        self._config, self._group, self._plans = config, group, plans
        self._planner, self._wish = planner, wish
        self._standing, self._own = standing, own
        self._kept = [node for node, host in enumerate(host_of) if host in group.hosts]
        self._host_of = [host_of[node] for node in self._kept]
        self._recent: deque[StepMetrics] = deque(maxlen=SEVERAL)
        self._looks_for_drift = config.replan.drift is not None
        self._search: PlanSearch | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Begin to search."""
        self._view = run
        if self._standing is not self._own and not self._group.generation.plan:
            self._begin_search()

    def _begin_search(self) -> None:
        cases = cases_to_search(self._standing, self._own)
        config = self._config
        try:
            process = self._planner.process()
        except OSError as error:  # No memory, or a full disk: a run needs no better plan.
            return log.info(f"no search for a better plan: {error}")
        self._search = PlanSearch(
            cases, self._standing, config.replan, config.plan.seed, process, self._found
        )

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Look whether a search has to begin."""
        if self._search is None or self._search.is_over():
            self._look_for_drift(metrics)

    def _found(self, plans: Sequence[Plan]) -> None:
        """Propose the quickest plan that may be used, while a step is under way, if it pays off."""
        config, standing, host_of = self._config, self._standing, self._host_of
        generation, apart = self._group.generation, self._group.generation.apart
        suitable = [own for own in plans if keeps_data_hosts(own, standing, host_of, apart)]
        found = min(suitable, key=lambda plan: plan.predicted.iteration_s, default=None)
        if found is None:
            return
        iterations = config.train.steps - self._view.step
        sizes = copied_bytes(config, len(found.stages))
        if not pays_off(found, standing, config.replan.gain, iterations, host_of, sizes):
            return
        name = self._plans.keep(found)
        if name is None:
            return
        log.info(
            f"{found.method} has found a plan by which an iteration takes "
            f"{found.predicted.iteration_s:.3g} s instead of {standing.predicted.iteration_s:.3g} s"
        )
        placement = placement_of(found, self._kept, generation.placement)
        self._wish(Wish(generation.number, placement, name))

    def _look_for_drift(self, metrics: StepMetrics) -> None:
        """Search once in a generation with node speeds as measured."""
        drift = self._config.replan.drift
        if drift is None or not self._looks_for_drift or metrics.compilations:
            return
        self._recent.append(metrics)
        seconds = [noted.seconds_per_iteration for noted in self._recent]
        if len(seconds) < SEVERAL or not has_drifted(
            seconds, metrics.predicted_seconds or 0.0, drift
        ):
            return
        busy_s = busy_seconds(self._recent)
        self._looks_for_drift = False
        if busy_s is not None:
            self._standing = recalibrated(self._standing, busy_s)
            self._begin_search()

    def close(self) -> None:
        """Search no more."""
        if self._search is not None:
            self._search.close()
            self._search = None
