"""Replanning on the leader: it searches for a better plan during training and proposes it.

It searches after a change of hosts, and with `replan.drift` also when the median time of several
iterations deviates from the prediction; that search uses measured node speeds. Links are not
measured during training.
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
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.config.resume import json_digest
from skippipe_jax.connections.links import MESSAGE_CHARACTERS
from skippipe_jax.consensus.generations import PlanRequest
from skippipe_jax.models.footprint import buddy_checkpoint_bytes
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

# Number of iterations whose median is compared with the prediction.
SEVERAL = 8

# Room in characters for the rest of a message with a plan.
ROOM_CHARACTERS = 1 << 10


class SharedPlans:
    """Plans found by a search that this host has, by digest."""

    def __init__(self):
        """Start without plans."""
        self._plans: dict[str, Plan] = {}

    def keep(self, plan: Plan) -> str | None:
        """Store a plan and return its digest; return None for one too large for a message."""
        packed = _packed(plan)
        if len(packed) > MESSAGE_CHARACTERS - ROOM_CHARACTERS:
            return None
        name = json_digest(plan.to_json())
        self._plans[name] = _unpacked(packed)  # Identical to the received plan of other hosts.
        return name

    @property
    def names(self) -> list[str]:
        """Digests of the plans that this host has."""
        return [*self._plans]

    def fetch(self, group: Group, agreed: SessionPlan) -> Plan | None:
        """Return the plan of a group's generation; a host that has it sends it to the others.

        All hosts of the group call this together. Returns None if the generation has no such plan,
        or no remaining host has it: then they continue by the repair plan.
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
    """Callback of the leader that searches for better plans during a generation."""

    def __init__(
        self,
        config: Config,
        group: Group,
        plans: SharedPlans,
        current: Plan,
        own: Plan,
        host_of: Sequence[int],
        planner: WarmPlanner,
        request_plan: Callable[[PlanRequest], object],
    ):
        """Store the plans; a search starts with training if `current` is a repair plan.

        A better plan is proposed by `request_plan`. `own` is the run's own plan, and `host_of` the
        host of each of its nodes.
        """
        self._config, self._group, self._plans = config, group, plans
        self._planner, self._request_plan = planner, request_plan
        self._current, self._own = current, own
        self._kept = [node for node, host in enumerate(host_of) if host in group.hosts]
        self._host_of = [host_of[node] for node in self._kept]
        self._recent: deque[StepMetrics] = deque(maxlen=SEVERAL)
        self._looks_for_drift = config.replan.drift is not None
        self._search: PlanSearch | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Start the search after a change of hosts."""
        self._view = run
        if self._current is not self._own and not self._group.generation.plan:
            self._begin_search()

    def _begin_search(self) -> None:
        cases = cases_to_search(self._current, self._own)
        config = self._config
        try:
            process = self._planner.process()
        except OSError as error:  # Out of memory or disk: the run can continue without.
            return log.info(f"the search for a better plan could not start: {error}")
        self._search = PlanSearch(
            cases, self._current, config.replan, config.plan.seed, process, self._on_search_end
        )

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Start a search if iterations deviate from the prediction and none is running."""
        if self._search is None or self._search.is_over():
            self._look_for_drift(metrics)

    def _on_search_end(self, plans: Sequence[Plan]) -> None:
        """Propose the fastest usable plan if it pays off; called during a step."""
        config, current, host_of = self._config, self._current, self._host_of
        generation, diskless = self._group.generation, self._group.generation.diskless
        suitable = [own for own in plans if keeps_data_hosts(own, current, host_of, diskless)]
        found = min(suitable, key=lambda plan: plan.predicted.iteration_s, default=None)
        if found is None:
            return
        iterations = config.train.steps - self._view.step
        sizes = buddy_checkpoint_bytes(config, len(found.stages))
        if not pays_off(found, current, config.replan.gain, iterations, host_of, sizes):
            return
        name = self._plans.keep(found)
        if name is None:
            return
        log.info(
            f"found a better plan with {found.method}: predicted iteration "
            f"{current.predicted.iteration_s:.3g} s -> {found.predicted.iteration_s:.3g} s"
        )
        placement = placement_of(found, self._kept, generation.placement)
        self._request_plan(PlanRequest(generation.number, placement, name))

    def _look_for_drift(self, metrics: StepMetrics) -> None:
        """Start at most one search a generation with measured node speeds, if iterations drift."""
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
            self._current = recalibrated(self._current, busy_s)
            self._begin_search()

    def close(self) -> None:
        """Stop searching."""
        if self._search is not None:
            self._search.close()
            self._search = None
